package slots

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

var keyer = prefix.NewKeyer(prefix.ClusterKey{1}, prefix.Domain{Model: "tiny"})

// text is a prompt made of pieces: a name and a length in tokens each.
func text(pieces ...any) []uint32 {
	var out []uint32
	for i := 0; i < len(pieces); i += 2 {
		rng := rand.New(rand.NewPCG(7, uint64(len(pieces[i].(string)))))
		seed := uint32(0)
		for _, c := range []byte(pieces[i].(string)) {
			seed = seed*131 + uint32(c)
		}
		for range pieces[i+1].(int) {
			out = append(out, seed^rng.Uint32N(1<<20))
		}
	}
	return out
}

// keysOf are the keys of a prompt at each point.
func keysOf(tokens []uint32) []prefix.Key {
	var p prefix.Probe
	p.ResetTokens(tokens, keyer)
	var keys []prefix.Key
	for d := ledger.PointTokens; d <= len(tokens); d += ledger.PointTokens {
		k, _ := p.At(d)
		keys = append(keys, k)
	}
	return keys
}

// driver sends whole requests to a replay, one after the other.
type driver struct {
	*Replay
	n uint64
}

// send returns the slot and the reuse that the rules give.
func (d *driver) send(tokens []uint32, output int) (slot, expected int) {
	id := d.begin(tokens)
	slot, expected = d.Slot(id), d.open[id].expected
	d.Done(id, output, -1)
	return slot, expected
}

func (d *driver) begin(tokens []uint32) ledger.ClaimID {
	d.n++
	id := ledger.ClaimID{Coordinator: 1, Seq: d.n}
	d.Begin(id, keysOf(tokens), len(tokens), -1)
	return id
}

func floor(n int) int { return n / ledger.PointTokens * ledger.PointTokens }

// The conversation of the recordings of b10434 and b11434 (observations.txt),
// by its lengths: which slot each request went to, how much it reused, and how
// long the slots were after it.
func TestRecordedConversation(t *testing.T) {
	sys, alpha := []any{"sys", 178}, []any{"sys", 178, "alpha", 295}
	aTurn2 := append(slices.Clone(alpha), "answer", 3, "now", 19)
	aTurn3 := append(slices.Clone(alpha), "answer", 3, "other", 33)
	b1 := []any{"bsys", 200, "beta", 317}
	b2 := append(slices.Clone(b1), "banswer", 3, "more", 15)
	c := func(i int) []any { return []any{fmt.Sprintf("c%d", i), 471} }
	branch := append(slices.Clone(sys), "branch", 295)
	d := &driver{Replay: New(Options{Slots: 4, HostTokens: 1 << 20})}
	for _, step := range []struct {
		name   string
		prompt []any
		slot   int
		cached int // by the recording
	}{
		{"A turn 1", alpha, 3, 0},
		{"A turn 2", aTurn2, 3, 473},
		{"A turn 2 again", aTurn2, 3, 494},
		{"B turn 1", b1, 2, 0},
		{"A turn 3", aTurn3, 3, 476},
		{"B turn 2", b2, 2, 517},
		{"C0", c(0), 1, 0},
		{"C1", c(1), 0, 0},
		{"C2: the least recently used slot is overwritten", c(2), 3, 0},
		{"C3", c(3), 2, 0},
		{"A turn 3 again, from the host cache", aTurn3, 1, 508},
		{"B turn 2 again, from the host cache", b2, 0, 534},
		{"branch of A", branch, 1, 178},
		{"A turn 3 after the branch, from the host cache", aTurn3, 1, 508},
	} {
		slot, expected := d.send(text(step.prompt...), 4)
		if slot != step.slot || expected > step.cached || floor(expected) < floor(step.cached)-ledger.PointTokens {
			t.Errorf("%s: slot %d, %d tokens, the server took slot %d and %d", step.name, slot, expected, step.slot, step.cached)
		}
	}
}

// What shares little of a long prompt, or keeps little of a long entry, is not
// reused (both seen).
func TestAShortCommonPrefixIsWorthNothing(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 2, HostTokens: 1 << 20})}
	d.send(text("sys", 176, "a", 100), 4)
	if slot, expected := d.send(text("sys", 176, "long", 2597), 4); slot != 0 || expected != 0 {
		t.Errorf("6 %% of a prompt: slot %d, %d tokens", slot, expected)
	}
	d = &driver{Replay: New(Options{Slots: 1, HostTokens: 1 << 20})}
	d.send(text("sys", 176, "long", 1824), 4)
	d.send(text("other", 600), 4)
	if _, expected := d.send(text("sys", 176, "b", 124), 4); expected != 0 {
		t.Errorf("9 %% of an entry are taken: %d tokens", expected)
	}
	if _, expected := d.send(text("sys", 176, "long", 1824), 4); expected != 1999 {
		t.Errorf("the entry is still there: %d tokens, want 1999", expected)
	}
}

// A prefix in a busy slot serves nobody else, and is not shown.
func TestABusySlotServesOne(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 3, HostTokens: 0})}
	prompt := text("shared", 480)
	d.send(prompt, 4)
	if d.Blocks() != 30 {
		t.Fatalf("%d blocks shown, want 30", d.Blocks())
	}
	first := d.begin(prompt)
	if d.Blocks() != 0 {
		t.Errorf("%d blocks of a busy slot are shown", d.Blocks())
	}
	second := d.begin(prompt)
	if a, b := d.open[first].expected, d.open[second].expected; a != 479 || b != 0 {
		t.Errorf("at once they reuse %d and %d, want 479 and 0", a, b)
	}
	third, fourth := d.begin(text("x", 64)), d.begin(text("y", 64))
	if d.Slot(third) < 0 || d.Slot(fourth) != -1 {
		t.Errorf("slots %d and %d, want one and none", d.Slot(third), d.Slot(fourth))
	}
	d.Done(first, 4, -1)
	if d.Slot(fourth) != 2 {
		t.Errorf("the waiting one is in slot %d, want the freed 2", d.Slot(fourth))
	}
}

// One KV buffer for all slots: a new request empties the idle ones, and what
// they held is reused from the host cache (seen with the defaults).
func TestSharedBufferKeepsAllInTheHostCache(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 4, Shared: true, HostTokens: 1 << 20})}
	for i := range 6 {
		d.send(text(fmt.Sprintf("c%d", i), 471), 4)
	}
	full := 0
	for i := range d.slots {
		if d.slots[i].held.tokens > 0 {
			full++
		}
	}
	if full != 1 {
		t.Errorf("%d slots hold something, want the latest", full)
	}
	for _, i := range []int{0, 4} {
		if _, expected := d.send(text(fmt.Sprintf("c%d", i), 471), 4); expected != 464 {
			t.Errorf("conversation %d: %d tokens, want 464", i, expected)
		}
	}
}

// What is shown can be reused: a prompt matched against it promises hardly
// more, and not much less, than the rules then give.
func TestShownIsWhatARequestGets(t *testing.T) {
	var prompts, promised, over, under int
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(3, seed))
		l := newMirror(t)
		d := &driver{Replay: New(Options{Slots: 1 + rng.IntN(4), Shared: rng.IntN(2) == 0, HostTokens: []int{0, 3000, 8000, 1 << 20}[rng.IntN(4)], Listener: l})}
		l.replay = d.Replay
		turns := map[int]int{}
		for range 30 {
			conv := rng.IntN(8)
			if turns[conv]++; rng.IntN(4) == 0 {
				turns[conv] = 1
			}
			prompt := text(fmt.Sprintf("sys%d", conv%2), 208, fmt.Sprintf("c%d", conv), 96*(3+turns[conv]))
			shown := l.match(prompt)
			if shown <= len(prompt)/10 {
				shown = 0 // as a coordinator takes it
			}
			_, expected := d.send(prompt, 20)
			prompts += len(prompt)
			promised += shown
			over += max(0, shown-expected-1)
			under += max(0, floor(expected)-shown)
		}
	}
	if share := float64(over) / float64(prompts); share > 0.005 || promised == 0 {
		t.Errorf("%d of %d tokens promised and not reused: %.2f %%", over, prompts, 100*share)
	}
	if share := float64(under) / float64(promised); share > 0.03 {
		t.Errorf("%d tokens reused beyond %d that were promised", under, promised)
	}
	t.Logf("%d prompt tokens: %d promised, %d too many, %d too few", prompts, promised, over, under)
}

// What a listener is told always adds up to what the replay holds, whatever
// requests come and in which order they end.
func TestListenerIsToldEverything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := newMirror(t)
		d := &driver{Replay: New(Options{
			Slots: rapid.IntRange(1, 4).Draw(t, "slots"), Shared: rapid.Bool().Draw(t, "shared"),
			HostTokens: rapid.SampledFrom([]int{0, 1500, 1 << 20}).Draw(t, "host"), Listener: l,
		})}
		l.replay = d.Replay
		var running []ledger.ClaimID
		for step := range rapid.IntRange(5, 25).Draw(t, "steps") {
			conv := rapid.IntRange(0, 5).Draw(t, "conv")
			prompt := text("sys"+fmt.Sprint(conv%2), 208, fmt.Sprintf("c%d", conv), 48*rapid.IntRange(1, 6).Draw(t, "turns"))
			switch rapid.IntRange(0, 5).Draw(t, "do") {
			case 0, 1, 2:
				running = append(running, d.begin(prompt))
			case 3:
				seen := make([]Seen, len(d.slots))
				for i := range seen {
					seen[i] = Seen{Busy: rapid.Bool().Draw(t, "busy"), Tokens: rapid.SampledFrom([]int{-1, 0, 300, 400}).Draw(t, "tokens")}
				}
				d.Observe(seen)
				d.Observe(seen)
			default:
				if len(running) == 0 {
					continue
				}
				id := running[0]
				running = running[1:]
				switch rapid.IntRange(0, 2).Draw(t, "end") {
				case 0:
					d.Gone(id)
				case 1:
					d.First(id)
					d.Gone(id)
				default:
					d.Done(id, 1+step, rapid.IntRange(-1, 600).Draw(t, "cached"))
				}
			}
			l.check()
		}
		again := newMirror(t)
		again.replay = d.Replay
		d.Listen(again)
		again.check()
		d.Reset()
		if len(again.blocks) != 0 || d.Blocks() != 0 {
			t.Fatalf("after a restart %d blocks are shown", len(again.blocks))
		}
	})
}

// Keys that name no real prompt damage nothing.
func FuzzBegin(f *testing.F) {
	f.Add([]byte{1, 2, 3, 1, 2, 4, 0, 0, 9, 9})
	f.Fuzz(func(t *testing.T, in []byte) {
		l := newMirror(t)
		r := New(Options{Slots: 2, HostTokens: 1000, Listener: l})
		l.replay = r
		for n := uint64(1); len(in) > 2; n++ {
			k := min(int(in[0]%16), len(in)-2)
			var keys []prefix.Key
			for _, b := range in[2 : 2+k] {
				keys = append(keys, prefix.Key(b%8))
			}
			r.Begin(ledger.ClaimID{Coordinator: 1, Seq: n}, keys, int(in[1]), int(in[0]>>4)-1)
			if in[1]%3 != 0 {
				r.Done(ledger.ClaimID{Coordinator: 1, Seq: n - uint64(in[1]%2)}, int(in[1]%5), int(in[1])-100)
			}
			l.check()
			in = in[2+k:]
		}
	})
}

// A slot that is not as the server says is put right when it is seen twice, and
// nothing is claimed of what is not known.
func TestTheServerIsBelieved(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 2, HostTokens: 0})}
	prompt := text("a", 480)
	d.send(prompt, 4) // in slot 1
	is := []Seen{{Tokens: -1}, {Tokens: 483}}
	d.Observe(is)
	d.Observe(is)
	if c := d.Counts(); c.Corrected != 0 || d.Blocks() != 30 {
		t.Fatalf("what agrees is left alone: %+v, %d blocks", c, d.Blocks())
	}
	other := []Seen{{Tokens: -1}, {Tokens: 200}} // somebody else's request
	d.Observe(other)
	if d.Blocks() != 30 {
		t.Error("once may be on its way")
	}
	d.Observe(other)
	if d.Blocks() != 0 {
		t.Errorf("%d blocks shown of a slot that holds something else", d.Blocks())
	}
	// It is in the other slot than the rules say: a request that nobody told of
	// came first.
	d.send(prompt, 4)
	moved := []Seen{{Tokens: 483}, {Tokens: 200}}
	d.Observe(moved)
	d.Observe(moved)
	if d.Blocks() != 30 || d.slots[0].held.tokens != 483 {
		t.Errorf("%d blocks, slot 0 of %d tokens: it is in slot 0", d.Blocks(), d.slots[0].held.tokens)
	}
	// A request whose end is told after the server was seen idle.
	id := d.begin(text("b", 320))
	idle := []Seen{{Tokens: 483}, {Tokens: 325}}
	d.Observe(idle)
	d.Observe(idle)
	if d.Slot(id) != -1 {
		t.Error("the request is taken to be over")
	}
	d.Done(id, 6, 0)
	d.Observe(idle)
	d.Observe(idle)
	if d.Blocks() != 50 {
		t.Errorf("%d blocks, want 30 and 20: its end was told", d.Blocks())
	}
}

// How much the host cache holds is learnt from what was missing and from what
// was not expected.
func TestHostCacheSizeIsLearnt(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 1, HostTokens: 10_000})}
	conv := func(i int) []uint32 { return text(fmt.Sprintf("c%d", i), 992) }
	for i := range 6 {
		d.send(conv(i), 9)
	}
	// Six entries of 1,000 tokens back, with what the slot gives before.
	id := d.begin(conv(0))
	d.Done(id, 9, 0)
	if d.HostTokens() >= 6000 || d.Counts().Missed != 1 {
		t.Errorf("it is believed to hold %d tokens, %+v", d.HostTokens(), d.Counts())
	}
	d = &driver{Replay: New(Options{Slots: 1, HostTokens: 2_500})}
	for i := range 6 {
		d.send(conv(i), 9)
	}
	id = d.begin(conv(0))
	if got := d.open[id].expected; got != 0 {
		t.Fatalf("%d tokens expected beyond what is believed to fit", got)
	}
	d.Done(id, 9, 991)
	if d.HostTokens() < 5000 || d.Counts().Found != 1 {
		t.Errorf("it is believed to hold %d tokens, %+v", d.HostTokens(), d.Counts())
	}
}

// A size that was told is not doubted for one miss, is after some in a row, and
// is never exceeded; a sequence that does not fit at all drives nothing out.
func TestHostCacheSizeIsKnown(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 1, HostTokens: 10_000, HostKnown: true})}
	conv := func(i int) []uint32 { return text(fmt.Sprintf("c%d", i), 992) }
	miss := func() {
		for i := range 6 {
			d.send(conv(i), 9)
		}
		id := d.begin(conv(0))
		if d.open[id].expected == 0 {
			t.Fatal("nothing is expected")
		}
		d.Done(id, 9, 0)
	}
	for i := range doubtsToLearn {
		if d.HostTokens() != 10_000 {
			t.Errorf("believed to hold %d tokens after %d misses", d.HostTokens(), i)
		}
		miss()
	}
	if d.HostTokens() >= 6000 {
		t.Errorf("still believed to hold %d tokens", d.HostTokens())
	}
	d = &driver{Replay: New(Options{Slots: 1, HostTokens: 2_500, HostKnown: true})}
	for i := range 6 {
		d.send(conv(i), 9)
	}
	d.Done(d.begin(conv(0)), 9, 991)
	if d.HostTokens() != 2_500 {
		t.Errorf("believed to hold %d tokens, told were 2,500", d.HostTokens())
	}
	d.send(text("long", 2_600), 9)
	d.send(conv(7), 9)
	if id := d.begin(conv(0)); d.open[id].expected == 0 {
		t.Error("what does not fit has driven out what does")
	}
}

// Requests that ended untold keep no slot and nobody waiting, whatever else goes
// on, and what they left is known by its length.
func TestEndsThatAreNeverTold(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 1, HostTokens: 0})}
	running, waiting := d.begin(text("a", 480)), []ledger.ClaimID{d.begin(text("b", 320)), d.begin(text("c", 160))}
	if d.Slot(running) != 0 || d.Slot(waiting[0]) != -1 {
		t.Fatal("one is in the slot and one waits")
	}
	d.Observe([]Seen{{Tokens: 326, Task: 2}})
	if d.Slot(running) != 0 || len(d.open) != 3 {
		t.Error("what was just told may still be on its way to the server")
	}
	d.Observe([]Seen{{Tokens: 163, Task: 3}})
	if len(d.open) != 0 || d.Blocks() != 0 {
		t.Errorf("%d requests are under way or wait at an idle server, %d blocks shown", len(d.open), d.Blocks())
	}
	d.Done(waiting[1], 4, 0) // late after all
	if d.Blocks() != 10 {
		t.Errorf("%d blocks, want the 10 of what was found in the slot", d.Blocks())
	}
	if id := d.begin(text("c", 160)); d.Slot(id) != 0 || d.open[id].expected != 159 {
		t.Errorf("slot %d, %d tokens", d.Slot(id), d.open[id].expected)
	}
}

// That requests went to each other's slots changes nothing of what can be reused:
// it is seen at once, and nothing is taken to be overwritten.
func TestExchangedSlotsAreNoDisagreement(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 3, HostTokens: 0})}
	a, b, c := text("a", 480), text("b", 320), text("c", 640)
	d.send(a, 4)
	d.send(b, 4)
	at := d.Slot(d.begin(c))
	// By the server c was first, then b, then a.
	d.Observe([]Seen{{Tokens: 483, Task: 3}, {Tokens: 323, Task: 2}, {Busy: true, Tokens: 641, Prompt: 640, Task: 1}})
	if at != 0 || d.Blocks() != 50 || d.Counts().Corrected != 0 {
		t.Errorf("%d blocks, want 30 and 20; %+v", d.Blocks(), d.Counts())
	}
	if d.slots[2].by == nil || d.slots[2].by.slot != 2 || d.slots[0].held.tokens != 483 {
		t.Errorf("%+v", d.slots)
	}
	d.Done(ledger.ClaimID{Coordinator: 1, Seq: d.n}, 4, 0)
	d.Observe([]Seen{{Tokens: 483, Task: 3}, {Tokens: 323, Task: 2}, {Tokens: 643, Task: 1}})
	if d.Blocks() != 90 || d.Counts().Corrected != 0 {
		t.Errorf("%d blocks, want 90; %+v", d.Blocks(), d.Counts())
	}
	// A request whose name is known is not taken for another of its length.
	d.Observe([]Seen{{Tokens: 483, Task: 3}, {Tokens: 323, Task: 9}, {Tokens: 643, Task: 1}})
	d.Observe([]Seen{{Tokens: 483, Task: 3}, {Tokens: 323, Task: 9}, {Tokens: 643, Task: 1}})
	if d.Blocks() != 70 {
		t.Errorf("%d blocks, want 70: something else of that length is there", d.Blocks())
	}
}
