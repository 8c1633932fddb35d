package pull

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var t0 = time.Unix(1000, 0)

func newQueue(tb testing.TB, o Options) *Queue {
	tb.Helper()
	q, err := New(o)
	if err != nil {
		tb.Fatal(err)
	}
	return q
}

// all takes everything that may be asked now.
func all(q *Queue, now time.Time) (out []Ask) {
	for {
		a, ok := q.Next(now)
		if !ok {
			return out
		}
		out = append(out, a)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{{InFlight: -1}, {PerHost: -1}, {MaxWaiting: -1}, {AnswerWithin: -1}, {Pause: -1}, {LongestPause: -1}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v was taken", o)
		}
	}
}

// A fleet that comes all at once is asked in turn, host by host, and never more
// than the bound at a time.
func TestColdStartIsFairAndBounded(t *testing.T) {
	q := newQueue(t, Options{})
	for h := range 125 {
		for w := range 8 {
			q.Want(Stream{fmt.Sprintf("h%03d", h), uint32(w)}, "new", true)
		}
	}
	asked := map[Stream]int{}
	perHost := map[string]int{}
	var under []Ask
	for len(asked) < 1000 {
		news := all(q, t0)
		if len(news) == 0 {
			t.Fatalf("stuck with %d asked", len(asked))
		}
		for _, a := range news {
			asked[a.Stream]++
			perHost[a.Host]++
		}
		under = append(under, news...)
		if len(under) > DefaultInFlight {
			t.Fatalf("%d under way", len(under))
		}
		least, most := 8, 0
		for h := range 125 {
			n := perHost[fmt.Sprintf("h%03d", h)]
			least, most = min(least, n), max(most, n)
		}
		if most > least+1 {
			t.Fatalf("one host was asked %d times, another %d times", most, least)
		}
		q.Answered(under[0].ID, true)
		under = under[1:]
	}
	for s, n := range asked {
		if n != 1 {
			t.Errorf("%v asked %d times", s, n)
		}
	}
}

func TestOneHostDoesNotTakeAllPulls(t *testing.T) {
	q := newQueue(t, Options{InFlight: 4, PerHost: 2})
	for w := range 10 {
		q.Want(Stream{"big", uint32(w)}, "new", true)
	}
	if got := all(q, t0); len(got) != 2 {
		t.Fatalf("%d pulls of one host at once", len(got))
	}
	q.Want(Stream{"small", 0}, "gap", true)
	if got := all(q, t0); len(got) != 1 || got[0].Host != "small" || got[0].Reason != "gap" {
		t.Fatalf("asked %v", got)
	}
}

// What is not answered is asked again, later and later, and never twice at once.
func TestUnansweredIsRepeatedWithAGrowingPause(t *testing.T) {
	q := newQueue(t, Options{AnswerWithin: time.Second, Pause: time.Second, LongestPause: 16 * time.Second})
	s := Stream{"h", 1}
	if !q.Want(s, "gap", true) || q.Want(s, "missing", false) {
		t.Error("wanted twice")
	}
	var at []time.Duration
	for now := t0; now.Before(t0.Add(2 * time.Minute)); now = now.Add(100 * time.Millisecond) {
		for _, a := range all(q, now) {
			if a.Reason != "gap" {
				t.Errorf("asked for %s", a.Reason)
			}
			at = append(at, now.Sub(t0))
			if q.Want(s, "missing", false) {
				t.Error("wanted while it is under way")
			}
		}
		if in, _ := q.Counts(); in > 1 {
			t.Fatal("two pulls of one stream under way")
		}
	}
	want := []time.Duration{1, 2, 4, 8, 16, 16, 16}
	if len(at) < len(want)+1 {
		t.Fatalf("asked at %v", at)
	}
	for i, w := range want {
		if pause := at[i+1] - at[i]; pause < w*time.Second || pause > w*time.Second*5/4+100*time.Millisecond {
			t.Errorf("pause %d is %v, want %d s and up to a quarter more", i, pause, w)
		}
	}
}

func TestPartsOfAnAnswerKeepItUnderWay(t *testing.T) {
	q := newQueue(t, Options{AnswerWithin: time.Second})
	q.Want(Stream{"h", 1}, "new", true)
	a := all(q, t0)[0]
	for i := range 10 {
		now := t0.Add(time.Duration(i) * 900 * time.Millisecond)
		if !q.Progress(a.Stream, a.ID, now) || len(all(q, now)) != 0 {
			t.Fatal("an answer that comes in parts was given up")
		}
	}
	if !q.Answered(a.ID, true) || q.Answered(a.ID, true) || q.Progress(a.Stream, a.ID, t0) {
		t.Error("an answer ends once")
	}
}

// Who guesses the number of another's pull does not keep it from being repeated.
func TestAnswersAreOfTheStreamThatWasAsked(t *testing.T) {
	q := newQueue(t, Options{AnswerWithin: time.Second})
	q.Want(Stream{"h", 1}, "new", false)
	a := all(q, t0)[0]
	for _, other := range []Stream{{"h", 2}, {"i", 1}, {"", 0}} {
		if q.Progress(other, a.ID, t0.Add(900*time.Millisecond)) {
			t.Errorf("%+v answers for %+v", other, a.Stream)
		}
	}
	if again := all(q, t0.Add(time.Second)); len(again) != 1 || again[0].Stream != a.Stream || again[0].ID == a.ID {
		t.Errorf("asked %v again", again)
	}
}

// A stream that was whole is asked at once the next time but for the least pause.
func TestAnAnswerThatHelpedEndsThePauses(t *testing.T) {
	q := newQueue(t, Options{Pause: time.Second, LongestPause: time.Minute})
	now := t0
	for _, helped := range []bool{false, false, false, true} {
		q.Want(Stream{"h", 1}, "digest", false)
		now = now.Add(time.Minute)
		q.Answered(all(q, now)[0].ID, helped)
	}
	for range 3 {
		q.Want(Stream{"h", 1}, "gap", false)
		now = now.Add(1250 * time.Millisecond * 8)
		q.Answered(all(q, now)[0].ID, true)
		q.Want(Stream{"h", 1}, "gap", false)
		if got := all(q, now.Add(990*time.Millisecond)); len(got) != 0 {
			t.Error("asked within the least pause")
		}
		now = now.Add(1250 * time.Millisecond)
		got := all(q, now)
		if len(got) != 1 {
			t.Fatalf("asked %v a pause after an answer that helped", got)
		}
		q.Answered(got[0].ID, true)
	}
}

// What a lane that is gone was asked is forgotten; its next lane is asked at once.
func TestDropCancels(t *testing.T) {
	q := newQueue(t, Options{InFlight: 2})
	for w := range 4 {
		q.Want(Stream{"gone", uint32(w)}, "new", true)
		q.Want(Stream{"stays", uint32(w)}, "new", true)
	}
	first := all(q, t0)
	q.Drop("gone")
	q.Drop("unknown")
	for _, a := range first {
		if got := q.Answered(a.ID, true); got != (a.Host == "stays") {
			t.Errorf("%v: answered %v", a, got)
		}
	}
	rest := append(all(q, t0), first...)
	if slices.ContainsFunc(rest[:len(rest)-len(first)], func(a Ask) bool { return a.Host == "gone" }) {
		t.Errorf("asked %v", rest)
	}
	if !q.Want(Stream{"gone", 0}, "new", false) {
		t.Error("the next lane is not asked")
	}
}

func TestWaitingIsBounded(t *testing.T) {
	q := newQueue(t, Options{MaxWaiting: 10})
	for w := range 50 {
		if got := q.Want(Stream{"h", uint32(w)}, "new", true); got != (w < 10) {
			t.Errorf("stream %d: %v", w, got)
		}
	}
	q.Drop("h")
	if !q.Want(Stream{"i", 0}, "new", true) {
		t.Error("the room is not given back")
	}
}

// Whatever happens, the bounds hold, a stream is under way once at most, Due is
// never later than the next ask, and at rest everything wanted was asked.
func TestQueueProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := Options{InFlight: 3, PerHost: 2, AnswerWithin: time.Second, Pause: 300 * time.Millisecond, LongestPause: 2 * time.Second, Seed: rapid.Uint64().Draw(t, "seed")}
		q, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		now := t0
		under := map[uint32]Ask{}
		wanted := map[Stream]bool{}
		take := func() {
			due, dueOK := q.Due()
			for {
				a, ok := q.Next(now)
				if !ok {
					break
				}
				if !dueOK || due.After(now) {
					t.Fatalf("an ask at %v although the next is due at %v", now, due)
				}
				for id, o := range under {
					if o.Stream == a.Stream {
						delete(under, id) // expired
					}
				}
				under[a.ID] = a
				delete(wanted, a.Stream)
			}
			in, _ := q.Counts()
			per := map[string]int{}
			for _, st := range q.flights {
				per[st.host.name]++
			}
			for h, n := range per {
				if n > o.PerHost {
					t.Fatalf("%d pulls of %s", n, h)
				}
			}
			if in > o.InFlight {
				t.Fatalf("%d under way", in)
			}
		}
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			s := Stream{rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "host"), uint32(rapid.IntRange(0, 3).Draw(t, "index"))}
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0, 1:
				if q.Want(s, "gap", rapid.Bool().Draw(t, "at once")) {
					wanted[s] = true
				}
			case 2:
				if len(under) > 0 {
					id := slices.Min(slices.Collect(maps.Keys(under)))
					q.Answered(id, rapid.Bool().Draw(t, "helped"))
					delete(under, id)
				}
			case 3:
				now = now.Add(time.Duration(rapid.IntRange(1, 1500).Draw(t, "ms")) * time.Millisecond)
			case 4:
				q.Drop(s.Host)
				for id, a := range under {
					if a.Host == s.Host {
						delete(under, id)
					}
				}
				for w := range wanted {
					if w.Host == s.Host {
						delete(wanted, w)
					}
				}
			}
			take()
		}
		for range 200 {
			for id := range under {
				q.Answered(id, true)
				delete(under, id)
			}
			now = now.Add(100 * time.Millisecond)
			take()
		}
		if len(wanted) > 0 {
			t.Fatalf("never asked: %v", wanted)
		}
		if in, waiting := q.Counts(); in+waiting != 0 {
			t.Fatalf("%d under way and %d waiting at rest", in, waiting)
		}
	})
}
