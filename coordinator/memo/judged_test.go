package memo

import (
	"slices"
	"testing"
)

// chatAt reads a dialogue as of the memo's present epoch.
func chatAt(t *testing.T, m *Memo, d *dialogue) *Request {
	t.Helper()
	var rd Reader
	r, err := rd.Chat(vectorKey, "p", m.Epoch(), d.body())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// judged is a memo that knows a system text of 300 words, and a function that
// looks a request with it up and returns what to do when its ids are there, which
// are others from a word on; -1: nowhere.
func judged(t *testing.T) (m *Memo, ask func(seed uint64) (learn func(from int) Learnt)) {
	m = newMemo(t)
	system := "system:" + someText(rng(1), 300)
	ask = func(seed uint64) func(from int) Learnt {
		d := talk(system, "user:"+someText(rng(seed), 5))
		r := chatAt(t, m, d)
		given := &Prediction{}
		m.Lookup(r, given)
		return func(from int) Learnt {
			ids := words(appendOnly(d))
			for i := range ids {
				if from >= 0 && i >= from {
					ids[i] += uint32(seed) + 1
				}
			}
			return m.Learn(r, ids, given)
		}
	}
	for seed := range uint64(3) {
		ask(100 + seed)(-1)
	}
	return m, ask
}

// What was asked before a template changed and is answered afterwards counts
// neither for nor against what is learnt since, and is not kept: nobody asks for it
// under its names any more.
func TestWhatIsOfAFormerEpochIsNotLearnt(t *testing.T) {
	m, ask := judged(t)
	var waiting []func(int) Learnt
	for seed := range uint64(6) {
		waiting = append(waiting, ask(seed))
	}
	for i, learn := range waiting {
		if out := learn(5); out.Judged != (i < epochFailures) || out.NewEpoch != (i == epochFailures-1) {
			t.Errorf("answer %d: %+v", i, out)
		}
	}
	if s := m.Stats(); s.Epochs != 1 || s.Wrong != epochFailures || m.Records() != 0 {
		t.Errorf("%d epochs, %d wrong, %d records", s.Epochs, s.Wrong, m.Records())
	}
}

// Only failures near the start of the prompt, in a row, begin a new epoch.
func TestWhatBeginsAnEpoch(t *testing.T) {
	for name, c := range map[string]struct {
		from   []int
		open   bool
		epochs uint64
	}{
		"near the start":                {[]int{5, 5}, false, 1},
		"later":                         {[]int{100, 100, 100, 100}, false, 0},
		"one was later":                 {[]int{5, 100, 5}, false, 0},
		"one was right":                 {[]int{5, -1, 5}, false, 0},
		"predictions are not given":     {[]int{5, 5, 5, 5}, true, 0},
		"near the start after it began": {[]int{5, 5, 5}, false, 1},
	} {
		m, ask := judged(t)
		m.breaker.open = c.open
		var learn []func(int) Learnt
		for i := range c.from {
			learn = append(learn, ask(uint64(i)))
		}
		for i, from := range c.from {
			learn[i](from)
		}
		if n := m.Stats().Epochs; n != c.epochs {
			t.Errorf("%s: %d epochs, want %d", name, n, c.epochs)
		}
	}
}

// A prompt that lacks the words of its messages counts against the pool once,
// whether or not a prediction for it was wrong as well.
func TestAWrongPromptCountsOnce(t *testing.T) {
	for _, predicted := range []bool{true, false} {
		m, _ := judged(t)
		d := talk("system:"+someText(rng(1), 300), "user:"+someText(rng(7), 400))
		if !predicted {
			d.Messages[0].Content = someText(rng(8), 300)
		}
		r, given := chatAt(t, m, d), &Prediction{}
		if hit := m.Lookup(r, given); hit != predicted {
			t.Fatalf("a prediction: %t, want %t", hit, predicted)
		}
		ids := slices.Clone(words(appendOnly(d))[:110])
		for i := range ids {
			ids[i] += 9
		}
		if out := m.Learn(r, ids, given); out.Judged != predicted {
			t.Errorf("%+v", out)
		}
		if _, share, _ := m.Breaker(); share != breakerRate {
			t.Errorf("predicted %t: a share of %.4f is wrong, want %.4f", predicted, share, breakerRate)
		}
	}
}
