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

// An answer is kept for the message that the client sends back, but for its last
// token, which may become another one; not while predictions are withheld, nor of a
// former epoch.
func TestWhichAnswersAreKept(t *testing.T) {
	for name, c := range map[string]struct {
		before func(m *Memo)
		tokens int
	}{
		"kept":                     {func(*Memo) {}, 48},
		"the breaker is open":      {func(m *Memo) { m.breaker.open = true }, 0},
		"it is of a former epoch":  {func(m *Memo) { m.newEpoch(m.epoch + 1) }, 0},
		"it is of an epoch before": {func(m *Memo) { m.newEpoch(m.epoch + 1); m.newEpoch(m.epoch + 1) }, 0},
	} {
		m := newMemo(t)
		r := chatAt(t, m, talk("user:"+someText(rng(1), 40)))
		c.before(m)
		if err := m.Answer(r, words(someText(rng(2), 64)), []byte(`{"role":"assistant","content":"yes"}`)); err != nil {
			t.Fatal(err)
		}
		tokens := 0
		for i := range m.nodes {
			tokens += int(m.nodes[i].tokens)
		}
		if tokens != c.tokens || m.Records() != bit(c.tokens > 0) {
			t.Errorf("%s: %d tokens of %d records, want %d", name, tokens, m.Records(), c.tokens)
		}
	}
}

// What fails near the start of a prompt says nothing of how templates write a kind
// of message.
func TestFailuresNearTheStartCostNoTrust(t *testing.T) {
	m := newMemo(t)
	u := unit{role: roleUser}
	c := u.classOf(same, false, false)
	for range 20 {
		m.note(c, earlyTokens-pointTokens, 200)
	}
	if m.trust[c].seen || !m.trust.trusts(c) {
		t.Errorf("%+v", m.trust[c])
	}
	for range 5 {
		m.note(c, earlyTokens, 200)
	}
	if m.trust.trusts(c) {
		t.Errorf("%+v", m.trust[c])
	}
}
