package slots

import (
	"testing"

	"waypost/gossip/ledger"
)

// toldDriver is a replay without a host cache, and what it tells.
func toldDriver(t *testing.T, slots int) (*driver, *mirror) {
	told := newMirror(t)
	d := &driver{Replay: New(Options{Slots: slots, HostKnown: true, Listener: told})}
	told.replay = d.Replay
	return d, told
}

// promised compares what is promised of prompts with what is wanted.
func promised(t *testing.T, when string, told *mirror, want map[string]int, prompts map[string][]uint32) {
	t.Helper()
	for name, tokens := range want {
		if got := told.match(prompts[name]); got != tokens {
			t.Errorf("%s: %d tokens of %s are promised, want %d", when, got, name, tokens)
		}
	}
}

// What lies between two points decides which slot a request goes to: a tenth of its
// prompt or not, and which of two slots shares most of it. What both hold is promised
// no more, until the reuse that the server reports, or its page, tells.
func TestSlotsBetweenTwoPoints(t *testing.T) {
	prompts := map[string][]uint32{
		"oldest": text("another", 600),
		"a":      text("system", 266, "a", 600),
		"b":      text("system", 266, "b", 640),
		// 256 tokens are less than a tenth of it, 266 are more.
		"long": text("system", 266, "long", 2334),
		"c":    text("system", 266, "c", 680),
	}
	send := func(d *driver, name string, cached int) { d.Done(d.begin(prompts[name]), 4, cached) }
	page := func(held map[int]string) []Seen {
		out := make([]Seen, 3)
		for i := range out {
			out[i] = Seen{Tokens: len(prompts[held[i]]) + 3}
		}
		return out
	}
	for name, c := range map[string]struct {
		request string
		cached  int
		seen    map[int]string
		want    map[string]int
	}{
		// The slot of a, or the least recently used.
		"a tenth or not":                    {"long", -1, nil, map[string]int{"oldest": 0, "a": 256, "long": 2592}},
		"a tenth, as it reused":             {"long", 266, nil, map[string]int{"oldest": 0, "a": 256, "long": 2592}},
		"a tenth, as it reused and is seen": {"long", 266, map[int]string{2: "oldest", 1: "long", 0: "b"}, map[string]int{"oldest": 592, "a": 256, "long": 2592}},
		"no tenth, as it reused":            {"long", 0, nil, map[string]int{"oldest": 0, "a": 864, "long": 2592}},
		"a tenth, as the server says":       {"long", -1, map[int]string{2: "oldest", 1: "long", 0: "b"}, map[string]int{"oldest": 592, "a": 256, "b": 896}},
		"no tenth, as the server says":      {"long", -1, map[int]string{2: "long", 1: "a", 0: "b"}, map[string]int{"oldest": 0, "a": 864, "b": 896}},
		"one of two":                        {"c", 268, nil, map[string]int{"oldest": 592, "a": 256, "b": 256, "c": 944}},
		"the first of two, as it says":      {"c", 268, map[int]string{2: "oldest", 1: "a", 0: "c"}, map[string]int{"oldest": 592, "a": 864, "b": 256}},
		"the second of two, as it says":     {"c", 268, map[int]string{2: "oldest", 1: "c", 0: "b"}, map[string]int{"oldest": 592, "a": 256, "b": 896}},
		"it goes on from one of them":       {"a", -1, nil, map[string]int{"oldest": 592, "a": 864, "b": 896}},
		"no slot would give that":           {"c", 900, nil, map[string]int{"a": 256, "b": 256, "c": 944}},
	} {
		d, told := toldDriver(t, 3)
		for _, first := range []string{"oldest", "a", "b"} { // slots 2, 1 and 0
			if first == "b" && c.request == "long" {
				prompts["b"] = text("yet another", 906)
			} else if first == "b" {
				prompts["b"] = text("system", 266, "b", 640)
				d.Begin(ledger.ClaimID{Coordinator: 3, Seq: 1}, keysOf(prompts["b"]), len(prompts["b"]), 0) // its slot named
				d.Done(ledger.ClaimID{Coordinator: 3, Seq: 1}, 4, 0)
				continue
			}
			send(d, first, -1)
		}
		send(d, c.request, c.cached)
		if c.seen != nil {
			for range 3 {
				d.Observe(page(c.seen))
			}
		}
		promised(t, name, told, c.want, prompts)
	}
}

// Of requests that ran at once it is not known which ended first, and so which of
// their slots the next one overwrites, unless the server was looked at in between.
func TestSlotsThatBecameIdleTogether(t *testing.T) {
	prompts := map[string][]uint32{"a": text("a", 600), "b": text("bb", 640), "new": text("new", 320)}
	for name, c := range map[string]struct {
		atOnce, looked bool
		want           map[string]int
	}{
		"one after the other":      {false, false, map[string]int{"a": 0, "b": 640, "new": 320}},
		"at once":                  {true, false, map[string]int{"a": 0, "b": 0, "new": 320}},
		"at once, seen in between": {true, true, map[string]int{"a": 0, "b": 640, "new": 320}},
	} {
		d, told := toldDriver(t, 2)
		a := d.begin(prompts["a"])
		if !c.atOnce {
			d.Done(a, 4, 0)
		}
		b := d.begin(prompts["b"])
		if c.atOnce {
			d.Done(a, 4, 0)
		}
		if c.looked {
			d.Observe([]Seen{{Tokens: 641, Prompt: 640, Busy: true, Task: 4}, {Tokens: 603, Task: 2}})
		}
		d.Done(b, 4, 0)
		d.Done(d.begin(prompts["new"]), 4, 0)
		promised(t, name, told, c.want, prompts)
	}
}

// Where requests come at once and fast, as many of the slots least recently used are
// not promised as requests may be on their way; where they come seldom, all are.
func TestSlotsForRequestsOnTheirWay(t *testing.T) {
	prompts := map[string][]uint32{"a": text("a", 600), "b": text("bb", 640), "c": text("ccc", 320)}
	page := []Seen{{Tokens: -1}, {Tokens: 323, Task: 6}, {Tokens: 643, Task: 4}, {Tokens: 603, Task: 2}}
	d, told := toldDriver(t, 4)
	ids := []ledger.ClaimID{d.begin(prompts["a"]), d.begin(prompts["b"]), d.begin(prompts["c"])}
	for i := range d.crowds {
		d.crowds[i] = 3 // it has been like that
	}
	for _, id := range ids {
		d.Done(id, 4, 0)
	}
	// Two more may be on their way: one takes the slot that was never used.
	promised(t, "fast", told, map[string]int{"a": 0, "b": 640, "c": 320}, prompts)
	d.Observe(page)
	d.Observe(page)
	promised(t, "seldom", told, map[string]int{"a": 592, "b": 640, "c": 320}, prompts)
}

// What is saved anew is surely there, whatever was doubted of it before.
func TestWhatIsSavedIsThere(t *testing.T) {
	told := newMirror(t)
	d := &driver{Replay: New(Options{Slots: 2, HostTokens: 1000, HostKnown: true, Listener: told})}
	told.replay = d.Replay
	a := text("a", 480)
	d.send(a, 4)
	d.send(text("bb", 320), 4) // the server copies what a left
	d.cache.entries[0].doubtful = true
	d.cache.limitTokens = 1
	d.cache.trim()
	d.cache.limitTokens = 1000
	d.send(text("ccc", 320), 4) // and again, before its slot is overwritten
	if got := told.match(a); got != 480 {
		t.Errorf("%d tokens of what was copied again are promised, want 480", got)
	}
}
