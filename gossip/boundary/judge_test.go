package boundary

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

var t0 = time.Unix(1e9, 0)

// told prints verdicts, one per line.
func told(verdicts []Verdict) string {
	var b strings.Builder
	for _, v := range verdicts {
		fmt.Fprintf(&b, "%s %s credit=%v %s\n", v.Worker, v.State, v.Credit, v.Why)
	}
	return strings.TrimSpace(b.String())
}

func expect(t *testing.T, what string, got []Verdict, want string) {
	t.Helper()
	var lines []string
	for _, l := range strings.Split(strings.TrimSpace(want), "\n") {
		lines = append(lines, strings.TrimSpace(l))
	}
	var have []string
	for _, l := range strings.Split(told(got), "\n") {
		have = append(have, strings.TrimSpace(l))
	}
	if w, h := strings.Join(lines, "\n"), strings.Join(have, "\n"); w != h {
		t.Errorf("%s:\n%s\nwant:\n%s", what, h, w)
	}
}

// A difference counts once both sides have measured it again, and is taken back
// when they agree.
func TestADifferenceIsMeasuredAgainFirst(t *testing.T) {
	var j Judge
	good, bad := "chat3 a b c", "chat3 a b x"
	workers := []Worker{
		{Name: "a", Pool: "p", Vector: vector(1, good)},
		{Name: "b", Pool: "p", Vector: vector(1, good)},
		{Name: "c", Pool: "p", Vector: vector(1, bad)},
		{Name: "d", Pool: "q", Vector: vector(1, bad)},
		{Name: "e", Pool: "p"},
	}
	v, asks := j.Judge(t0, workers)
	expect(t, "at first", v, `
		a agrees credit=true
		b agrees credit=true
		c measuring again credit=true
		d agrees credit=true
		e unknown credit=true`)
	if got := fmt.Sprint(asks); got != "[{a chat 3} {c chat 3}]" {
		t.Errorf("asks %s", got)
	}
	if _, asks = j.Judge(t0.Add(time.Second), workers); len(asks) != 0 {
		t.Errorf("asked again at once: %v", asks)
	}
	workers[2].Vector = vector(2, bad)
	v, asks = j.Judge(t0.Add(4*time.Second), workers)
	if v[2].State != StateMeasuring || fmt.Sprint(asks) != "[{a chat 3}]" {
		t.Errorf("one side measured again: %s, asks %v", v[2].State, asks)
	}
	workers[0].Vector = vector(2, good)
	v, _ = j.Judge(t0.Add(5*time.Second), workers)
	expect(t, "measured again", v, `
		a agrees credit=true
		b agrees credit=true
		c differs credit=false boundary differs: chat rendering, probe 3, token 2: worker c is not as a
		d agrees credit=true
		e unknown credit=true`)
	// A newer measurement that still differs, and a key that changes on one
	// side, take nothing back.
	workers[2].Vector = vector(3, bad)
	if v, _ = j.Judge(t0.Add(6*time.Second), workers); v[2].Credit {
		t.Error("a third measurement gave credit back")
	}
	workers[2].Vector.KeyID = 2
	if v, _ = j.Judge(t0.Add(7*time.Second), workers); v[2].Credit {
		t.Error("a new key gave credit back")
	}
	workers[2].Vector = vector(4, good)
	if v, _ = j.Judge(t0.Add(8*time.Second), workers); v[2].State != StateAgrees || !v[2].Credit {
		t.Errorf("agrees again: %s", v[2].State)
	}
	if len(j.pending) != 0 {
		t.Errorf("%d pairs are still kept", len(j.pending))
	}
}

// A difference that counts does so whoever stands for the pool: when that one
// leaves, or its agent begins anew, nothing is given back meanwhile.
func TestADifferenceOutlivesTheOneComparedWith(t *testing.T) {
	good, bad := "chat3 a b c", "chat3 a b x"
	pool := func() (*Judge, []Worker) {
		j := &Judge{}
		workers := []Worker{
			{Name: "a", Pool: "p", Vector: vector(1, "raw1 r", good)},
			{Name: "b", Pool: "p", Vector: vector(1, "raw1 r", good)},
			{Name: "c", Pool: "p", Vector: vector(1, "raw1 r", good)},
			{Name: "d", Pool: "p", Vector: vector(1, "raw1 r", bad)},
		}
		j.Judge(t0, workers)
		workers[0].Vector, workers[3].Vector = vector(2, "raw1 r", good), vector(2, "raw1 r", bad)
		if v, _ := j.Judge(t0.Add(time.Second), workers); v[3].State != StateDiffers {
			t.Fatal(told(v))
		}
		return j, workers
	}
	t.Run("it leaves", func(t *testing.T) {
		j, workers := pool()
		v, asks := j.Judge(t0.Add(2*time.Second), workers[1:])
		expect(t, "without a", v, `
			b agrees credit=true
			c agrees credit=true
			d differs credit=false boundary differs: chat rendering, probe 3, token 2: worker d is not as b`)
		if len(asks) != 0 {
			t.Errorf("asks %v", asks)
		}
	})
	t.Run("its agent begins anew", func(t *testing.T) {
		j, workers := pool()
		for _, now := range []*Vector{nil, {KeyID: 1}, vector(1, "raw1 r")} {
			workers[0].Vector = now
			if v, _ := j.Judge(t0.Add(2*time.Second), workers); v[3].State != StateDiffers || v[3].Credit {
				t.Error(told(v))
			}
		}
	})
}

// What is known of a worker outlives its agent, whose next life tells nothing at
// first, then probe by probe. It ends when the probe is measured and agrees, with
// another pool, and when the probe is not measured any more.
func TestADifferenceOutlivesTheAgent(t *testing.T) {
	good, bad := "chat3 a b c", "chat3 a b x"
	for name, c := range map[string]struct {
		last *Vector
		pool string
		wait time.Duration
		want State
	}{
		"it still differs":         {last: vector(1, "raw1 r", bad), want: StateDiffers},
		"the template was mended":  {last: vector(1, "raw1 r", good), want: StateAgrees},
		"it serves something else": {last: vector(1, "raw1 r"), pool: "q", want: StateAgrees},
		"the probe is refused now": {last: vector(1, "raw1 r"), wait: holdBlank, want: StateAgrees},
		"it tells no ids any more": {last: &Vector{Declared: "m"}, wait: holdBlank, want: StateDeclared},
	} {
		var j Judge
		workers := []Worker{{Name: "a", Pool: "p", Vector: vector(1, "raw1 r", good)}, {Name: "b", Pool: "p", Vector: vector(1, "raw1 r", bad)}}
		j.Judge(t0, workers)
		workers[0].Vector, workers[1].Vector = vector(2, "raw1 r", good), vector(2, "raw1 r", bad)
		now := t0.Add(time.Second)
		j.Judge(now, workers)
		for _, v := range []*Vector{nil, {KeyID: 1}, vector(1, "raw1 r")} {
			workers[1].Vector = v
			now = now.Add(time.Second)
			if got, _ := j.Judge(now, workers); got[1].State != StateDiffers || got[1].Credit || !strings.Contains(got[1].Why, "chat rendering, probe 3: worker b is not as a") {
				t.Errorf("%s: meanwhile %s", name, told(got))
			}
		}
		workers[1].Vector = c.last
		if c.pool != "" {
			workers[1].Pool = c.pool
		}
		j.Judge(now, workers)
		if got, _ := j.Judge(now.Add(c.wait), workers); got[1].State != c.want || got[1].Credit == (c.want == StateDiffers) {
			t.Errorf("%s: %s", name, told(got))
		}
		workers[1].Name = "another"
		if j.Judge(now, workers); len(j.pending) > 1 || j.pending["b"] != nil {
			t.Errorf("%s: %d are kept of workers that are gone", name, len(j.pending))
		}
	}
}

// Each restart of an agent has its own time to measure: one that was long ago takes
// nothing from it.
func TestADifferenceOutlivesEachRestart(t *testing.T) {
	var j Judge
	good, bad := vector(1, "chat3 a b c"), vector(1, "chat3 a b x")
	workers := []Worker{{Name: "a", Pool: "p", Vector: good}, {Name: "b", Pool: "p", Vector: bad}}
	j.Judge(t0, workers)
	workers[0].Vector, workers[1].Vector = vector(2, "chat3 a b c"), vector(2, "chat3 a b x")
	j.Judge(t0.Add(time.Second), workers)
	for k, blank := range []*Vector{{KeyID: 1}, {KeyID: 1}, {KeyID: 2}} {
		for _, at := range []time.Duration{0, holdBlank - time.Second} {
			workers[1].Vector = blank
			if v, _ := j.Judge(t0.Add(time.Duration(k+1)*time.Hour+at), workers); v[1].State != StateDiffers || v[1].Credit {
				t.Errorf("restart %d, after %v: %s", k+1, at, told(v))
			}
		}
		workers[1].Vector = bad
		if k == 1 { // measured with another key, which tells nothing
			other := *bad
			other.KeyID = 2
			workers[1].Vector = &other
		}
		j.Judge(t0.Add(time.Duration(k+1)*time.Hour+holdBlank), workers)
	}
	// It is of the pool: in another one nothing is held against it.
	moved := []Worker{{Name: "0", Pool: "q", Vector: good}, {Name: "b", Pool: "q", Vector: &Vector{KeyID: 1}}}
	other := j
	if v, _ := other.Judge(t0.Add(24*time.Hour), moved); v[1].State == StateDiffers {
		t.Error(told(v))
	}
	// Nobody differs from what itself is.
	workers[1].Vector = &Vector{KeyID: 1}
	if v, _ := j.Judge(t0.Add(24*time.Hour), workers[1:]); v[0].State == StateDiffers {
		t.Error(told(v))
	}
}

// What another one measured is not measured again by who stands for the pool now.
func TestADifferenceIsMeasuredAgainByBoth(t *testing.T) {
	var j Judge
	workers := []Worker{
		{Name: "a", Pool: "p", Vector: vector(1, "chat3 a b c")},
		{Name: "b", Pool: "p", Vector: vector(5, "chat3 a b c")},
		{Name: "c", Pool: "p", Vector: vector(5, "chat3 a b c")},
		{Name: "d", Pool: "p", Vector: vector(1, "chat3 a b x")},
	}
	j.Judge(t0, workers)
	workers[3].Vector = vector(2, "chat3 a b x")
	v, asks := j.Judge(t0.Add(time.Second), workers[1:])
	if v[2].State != StateMeasuring || len(asks) != 2 {
		t.Errorf("%s, asks %v", told(v), asks)
	}
	workers[1].Vector, workers[3].Vector = vector(6, "chat3 a b c"), vector(3, "chat3 a b x")
	if v, _ := j.Judge(t0.Add(2*time.Second), workers[1:]); v[2].State != StateDiffers {
		t.Error(told(v))
	}
}

// What passes by itself, as midnight between two measurements, never counts.
func TestMidnightSplitsNoPool(t *testing.T) {
	var j Judge
	workers := []Worker{{Name: "a", Pool: "p", Vector: vector(1, "chat1 a 30 nov c")}, {Name: "b", Pool: "p", Vector: vector(1, "chat1 a 1 dec c")}}
	if v, asks := j.Judge(t0, workers); !v[1].Credit || len(asks) != 2 {
		t.Errorf("%s, asks %v", told(v), asks)
	}
	workers[0].Vector, workers[1].Vector = vector(2, "chat1 a 1 dec c"), vector(2, "chat1 a 1 dec c")
	if v, _ := j.Judge(t0.Add(time.Second), workers); v[1].State != StateAgrees {
		t.Errorf("%s", told(v))
	}
}

// A rule that differs is shown and costs plain requests nothing; a template that
// differs later is measured again all the same.
func TestRule(t *testing.T) {
	var j Judge
	named, omitted := vector(1, "chat1 a"), vector(1, "chat1 a")
	named.Rule, omitted.Rule = "named", "omitted"
	workers := []Worker{{Name: "a", Pool: "p", Vector: named}, {Name: "b", Pool: "p", Vector: omitted}}
	v, asks := j.Judge(t0, workers)
	expect(t, "rule", v, `
		a agrees credit=true
		b differs credit=true boundary differs: adapter and salt rule: worker b is not as a`)
	if len(asks) != 0 {
		t.Errorf("asks %v", asks)
	}
	changed := vector(2, "chat1 x")
	changed.Rule, workers[1].Vector = "omitted", changed
	if v, asks = j.Judge(t0.Add(time.Second), workers); v[1].State != StateMeasuring || !v[1].Credit || len(asks) != 2 {
		t.Errorf("%s, asks %v", told(v), asks)
	}
}

func TestDeclared(t *testing.T) {
	declared := func(name, word string, outcomes, found float64) Worker {
		return Worker{Name: name, Pool: "p", Vector: &Vector{Declared: word}, Outcomes: outcomes, FoundRatio: found}
	}
	var j Judge
	v, _ := j.Judge(t0, []Worker{
		declared("a", "x", 3, 0), declared("b", "x", 20, .9), declared("c", "x", 20, .02), declared("d", "x", 20, .5), declared("e", "y", 20, .9),
		{Name: "m", Pool: "p", Vector: vector(1, "raw1 a")},
	})
	expect(t, "declared", v, `
		a declared credit=true
		b confirmed credit=true
		c revoked credit=false boundary differs: declared boundary revoked: the engine found 2 % of the reuse that was expected
		d declared credit=true
		e differs credit=false boundary differs: declared boundary: worker e is not as a
		m unknown credit=true`)
}

// Whoever asks, in whatever order: the same worker stands for the pool. And
// hostile workers cost no more than a bound.
func TestGroups(t *testing.T) {
	v, w := vector(1, "raw1 a"), vector(1, "raw1 b")
	for _, workers := range [][]Worker{
		{{Name: "a", Pool: "p", Vector: v}, {Name: "b", Pool: "p", Vector: w}},
		{{Name: "b", Pool: "p", Vector: w}, {Name: "a", Pool: "p", Vector: v}},
	} {
		var j Judge
		verdicts, _ := j.Judge(t0, workers)
		for _, got := range verdicts {
			if got.Against != "a" {
				t.Errorf("%s is compared with %s", got.Worker, got.Against)
			}
		}
	}
	var many []Worker
	for i := range 200 {
		many = append(many, Worker{Name: fmt.Sprintf("w%03d", i), Pool: "p", Vector: vector(1, fmt.Sprintf("raw1 t%d", i))})
	}
	var j Judge
	verdicts, _ := j.Judge(t0, many)
	for _, got := range verdicts {
		if got.Group > maxGroups+1 {
			t.Errorf("group %d", got.Group)
		}
	}
}
