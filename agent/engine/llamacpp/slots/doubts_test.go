package slots

import (
	"fmt"
	"slices"
	"testing"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// beginAt begins a request that names its slot.
func (d *driver) beginAt(tokens []uint32, slot int) ledger.ClaimID {
	d.n++
	id := ledger.ClaimID{Coordinator: 1, Seq: d.n}
	d.Begin(id, keysOf(tokens), len(tokens), slot)
	return id
}

// Where the server's page fails, what may have been overwritten by any number of
// requests takes no more room than by a few, and stays hidden: until a page shows it
// there long after the last of them, not after the last that was noted.
func TestDoubtsAreBounded(t *testing.T) {
	const conversations = 5000
	prompts := map[string][]uint32{"kept": text("system", 266, "kept", 640), "new": text("new", 320)}
	d, told := toldDriver(t, 2)
	d.Done(d.beginAt(text("system", 266, "first", 600), 0), 4, 0)
	d.Done(d.beginAt(prompts["kept"], 1), 4, 0)
	// Between two points it depends on what follows which of the two slots is taken.
	turn := func(i int) {
		d.Done(d.begin(text("system", 266, fmt.Sprintf("turn%d", i), 300)), 4, 266)
	}
	most := 0
	for i := range conversations {
		turn(i % 400)
		if got := told.match(prompts["kept"]); got != 256 {
			t.Fatalf("after %d conversations %d tokens of what may be overwritten are promised, want 256", i+1, got)
		}
		for k := range d.slots {
			most = max(most, len(d.slots[k].doubts.noted))
		}
	}
	if most != maxDoubts {
		t.Errorf("%d requests are noted for a slot, want %d", most, maxDoubts)
	}
	page := func() { d.Observe([]Seen{{Tokens: 9000 + int(d.looks)}, {Tokens: 909}}) }
	page()
	page()
	turn(401) // its doubt is not noted, and those that are end with the next page
	page()
	if n := len(d.slots[1].doubts.noted); n != 0 {
		t.Fatalf("%d requests are noted still: the test shows nothing", n)
	}
	for range 2 {
		promised(t, "soon after the last", told, map[string]int{"kept": 256}, prompts)
		page()
	}
	page()
	promised(t, "seen long after the last", told, map[string]int{"kept": 896}, prompts)
	// What is written over it is there whatever was doubted of what it held.
	for i := range 2 * maxDoubts {
		turn(i)
	}
	d.Done(d.beginAt(prompts["new"], 1), 4, 0)
	promised(t, "overwritten", told, map[string]int{"kept": 256, "new": 320}, prompts)
	if d.slots[1].latest.beforeDoubts.any() {
		t.Error("a request that has ended keeps those that came before it")
	}
}

// aOrBOverwritten is three slots, 0 to 2, that hold b, a and c; a and b became idle
// together, so new overwrote one of them: by the order that is known a.
func aOrBOverwritten(t *testing.T, prompts map[string][]uint32) (*driver, *mirror) {
	d, told := toldDriver(t, 3)
	a, b := d.beginAt(prompts["a"], 1), d.beginAt(prompts["b"], 0)
	d.Done(a, 4, 0)
	d.Done(b, 4, 0)
	d.Done(d.beginAt(prompts["c"], 2), 20, 0)
	d.Done(d.begin(prompts["new"]), 4, 0)
	return d, told
}

// What a request was taken to overwrite may have been overwritten by an earlier one.
// If it was not by this one after all, that is doubted as before.
func TestDoubtsOutliveARequestElsewhere(t *testing.T) {
	apart := map[string][]uint32{"a": text("a", 600), "b": text("bb", 640), "c": text("ccc", 480), "new": text("new", 320)}
	// b and c share what ends between two points, and c no more than that.
	alike := map[string][]uint32{"a": apart["a"], "b": text("system", 266, "b", 640), "c": text("system", 266), "new": apart["new"]}
	// From here on a request is taken to overwrite b.
	begin := func(d *driver, keys []prefix.Key, tokens int) ledger.ClaimID {
		d.n++
		id := ledger.ClaimID{Coordinator: 1, Seq: d.n}
		if d.Begin(id, keys, tokens, -1); d.Slot(id) != 0 {
			t.Fatalf("it is in slot %d, want 0", d.Slot(id))
		}
		return id
	}
	in := func(d *driver, tokens int) {
		t.Helper()
		if got := d.slots[2].held.tokens; got != tokens {
			t.Fatalf("slot 2 holds %d tokens, want %d: it is not there", got, tokens)
		}
	}

	d, told := aOrBOverwritten(t, apart)
	promised(t, "at first", told, map[string]int{"a": 0, "b": 0, "c": 480, "new": 320}, apart)
	id := begin(d, nil, 700)
	next := append(slices.Clone(apart["c"]), text("next", 120)...)
	d.Learn(id, keysOf(next), len(next))
	in(d, len(next))
	promised(t, "its prompt is learnt", told, map[string]int{"a": 0, "b": 0, "new": 320}, apart)

	d, told = aOrBOverwritten(t, apart)
	begin(d, nil, 700)
	d.Observe([]Seen{{Tokens: 7}, {Tokens: 8}, {Tokens: 700, Prompt: 700, Busy: true, Task: 9}})
	in(d, 700)
	promised(t, "it is seen elsewhere", told, map[string]int{"a": 0, "b": 0, "new": 320}, apart)

	// A slot that is seen to hold what it did before is believed as late as any other.
	d, told = aOrBOverwritten(t, apart)
	begin(d, nil, 700)
	for _, want := range []int{0, 0, 640} {
		d.Observe([]Seen{{Tokens: 643}, {Tokens: 8}, {Tokens: 7}})
		promised(t, fmt.Sprintf("it is nowhere on page %d", d.looks), told, map[string]int{"b": want}, apart)
	}

	// What it went on from, by the server's word, is not doubted on its account.
	d, told = aOrBOverwritten(t, apart)
	begin(d, nil, 700)
	d.Observe([]Seen{{Tokens: 7}, {Tokens: 8}, {Tokens: 700, Prompt: 700, Busy: true}})
	d.Observe([]Seen{{Tokens: 7}, {Tokens: 700, Prompt: 700, Busy: true}, {Tokens: 499}})
	promised(t, "it is seen in a third", told, map[string]int{"b": 0, "c": 480}, apart)

	d, told = aOrBOverwritten(t, alike)
	promised(t, "alike, at first", told, map[string]int{"a": 0, "b": 256, "c": 256, "new": 320}, alike)
	next = append(slices.Clone(alike["c"]), text("answer", 19, "next", 315)...)
	id = begin(d, keysOf(next), len(next))
	d.Done(id, 4, 285) // so much only c gives
	in(d, len(next)+3)
	promised(t, "its reuse tells", told, map[string]int{"a": 0, "b": 256, "new": 320}, alike)
	d.Observe([]Seen{{Tokens: 7}, {Tokens: 8}, {Tokens: len(next) + 3}})
	// That it is there says nothing of what new did.
	promised(t, "and it is seen there", told, map[string]int{"a": 0, "b": 256, "new": 320}, alike)
}

// A request that is gone before its first token leaves what its slot shared with it,
// which is doubted as before. What it computed itself is there whatever was doubted.
func TestDoubtsOutliveARequestThatIsGone(t *testing.T) {
	prompts := map[string][]uint32{"a": text("a", 600), "b": text("bb", 640), "c": text("ccc", 480), "new": text("new", 320)}
	next := append(slices.Clone(prompts["b"]), text("next", 300)...)
	for name, c := range map[string]struct {
		then func(d *driver, id ledger.ClaimID)
		want int
	}{
		"gone":                    {func(d *driver, id ledger.ClaimID) { d.Gone(id) }, 0},
		"gone after a first word": {func(d *driver, id ledger.ClaimID) { d.First(id); d.Gone(id) }, 640},
		"gone twice": {func(d *driver, id ledger.ClaimID) {
			d.Gone(id)
			id = d.begin(next)
			d.Gone(id)
		}, 0},
		"gone, and what overwrote the other is seen there": {func(d *driver, id ledger.ClaimID) {
			d.Gone(id)
			d.Observe([]Seen{{Tokens: 643}, {Tokens: 323}, {Tokens: 499}})
		}, 640},
		// Any length is one that may have been computed of it, or another's.
		"gone, and the slot holds something as long": {func(d *driver, id ledger.ClaimID) {
			d.Gone(id)
			for range 5 {
				d.Observe([]Seen{{Tokens: 800}, {Tokens: 8}, {Tokens: 499}})
			}
		}, 0},
		"seen there, then gone, and the slot names it": {func(d *driver, id ledger.ClaimID) {
			d.Observe([]Seen{{Busy: true, Prompt: len(next), Tokens: 700, Task: 9}, {Tokens: 8}, {Tokens: 499}})
			d.Gone(id)
			for range 5 {
				d.Observe([]Seen{{Tokens: 800, Task: 9}, {Tokens: 8}, {Tokens: 499}})
			}
		}, 640},
	} {
		d, told := aOrBOverwritten(t, prompts)
		promised(t, name+", at first", told, map[string]int{"b": 0}, prompts)
		id := d.begin(next)
		if d.Slot(id) != 0 || d.open[id].expected != 640 {
			t.Fatalf("%s: it is in slot %d, where %d tokens are expected", name, d.Slot(id), d.open[id].expected)
		}
		c.then(d, id)
		promised(t, name, told, map[string]int{"b": c.want}, prompts)
	}

	// What waited for the slot overwrites what was doubted.
	d, told := aOrBOverwritten(t, prompts)
	first := d.begin(next)
	second := d.beginAt(next, 0)
	d.Gone(first)
	if q := d.open[second]; q.slot != 0 || len(q.beforeDoubts.noted) != 1 {
		t.Fatalf("in slot %d with %d doubts, want slot 0 with one", q.slot, len(q.beforeDoubts.noted))
	}
	d.Gone(second)
	promised(t, "another waited for the slot", told, map[string]int{"b": 0}, prompts)
}

// A doubt that is settled while another request is taken to be in the slot comes back
// no more.
func TestDoubtsEndMeanwhile(t *testing.T) {
	prompts := map[string][]uint32{"a": text("a", 600), "b": text("system", 266, "b", 640), "c": text("system", 266)}
	next := append(slices.Clone(prompts["c"]), text("answer", 19, "next", 315)...)
	longer := append(slices.Clone(next), text("longer", 100)...)
	for name, c := range map[string]struct {
		settle func(d *driver, earlier ledger.ClaimID)
		want   int
	}{
		"not at all":   {func(*driver, ledger.ClaimID) {}, 0},
		"by its reuse": {func(d *driver, earlier ledger.ClaimID) { d.Done(earlier, 4, 285) }, 896},
		// More of its prompt says no more of which slot it is in.
		"by its prompt": {func(d *driver, earlier ledger.ClaimID) { d.Learn(earlier, keysOf(longer), len(longer)) }, 0},
		"by where it is": {func(d *driver, _ ledger.ClaimID) {
			d.Observe([]Seen{{Tokens: 600, Prompt: 600, Busy: true, Task: 9}, {Tokens: 8}, {Tokens: 7}})
		}, 896},
	} {
		d, told := toldDriver(t, 3)
		d.Done(d.beginAt(prompts["b"], 2), 4, 0)
		d.Done(d.beginAt(prompts["c"], 0), 20, 0)
		d.Done(d.beginAt(prompts["a"], 1), 4, 0)
		earlier := d.begin(next) // in slot 0, or that of b
		id := ledger.ClaimID{Coordinator: 9, Seq: 1}
		d.Begin(id, nil, 700, -1)
		if d.Slot(earlier) != 0 || d.Slot(id) != 2 || len(d.open[id].beforeDoubts.noted) != 1 {
			t.Fatalf("%s: the requests are in slots %d and %d", name, d.Slot(earlier), d.Slot(id))
		}
		c.settle(d, earlier)
		d.Learn(id, keysOf(prompts["a"]), 600)
		if d.Slot(id) != 1 {
			t.Fatalf("%s: it is in slot %d, want 1", name, d.Slot(id))
		}
		promised(t, name, told, map[string]int{"b": c.want}, prompts)
	}
}
