package slots

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// What becomes known of a prompt while its request runs puts it where the rules
// do, and what was taken to be overwritten or taken for it is there again.
func TestPromptIsLearnt(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 2, HostTokens: 1 << 20})}
	first, other := text("a", 480), text("b", 320)
	d.send(first, 4)
	d.send(other, 4)
	next := append(slices.Clone(first), text("more", 96)...)
	id := ledger.ClaimID{Coordinator: 2, Seq: 1}
	if got := d.Begin(id, nil, 700, -1); got != 0 || d.Slot(id) != 1 {
		t.Fatalf("of an unknown text %d tokens are expected in slot %d", got, d.Slot(id))
	}
	d.Begin(ledger.ClaimID{Coordinator: 2, Seq: 2}, nil, 100, -1)
	d.Done(ledger.ClaimID{Coordinator: 2, Seq: 2}, 4, -1)
	d.Learn(id, keysOf(next), len(next))
	if got := d.open[id]; got.expected != 480 || got.tokens != 576 {
		t.Errorf("%d of %d tokens expected, want 480 of 576", got.expected, got.tokens)
	}
	d.Done(id, 5, 480)
	if got := d.slots[1].held; got.tokens != 580 || !got.exact || len(got.keys) != 36 {
		t.Errorf("its slot holds %d tokens, %d points", got.tokens, len(got.keys))
	}
	// What was taken from the host cache for what was known goes back to its place
	// there.
	d = &driver{Replay: New(Options{Slots: 1, HostTokens: 1 << 20})}
	for _, name := range []string{"x", "y", "z"} {
		d.send(text("sys", 256, name, 400), 4)
	}
	like := append(text("sys", 256, "y", 400), text("more", 50)...)
	id = ledger.ClaimID{Coordinator: 2, Seq: 3}
	d.Begin(id, keysOf(like)[:16], 700, -1) // any of the two would do
	d.Learn(id, keysOf(like), len(like))
	if n := len(d.cache.entries); n != 2 || d.open[id].expected != 656 || d.cache.entries[0].shared(keysOf(text("sys", 256, "x", 400))) != 656 {
		t.Errorf("%d entries, %d tokens expected", n, d.open[id].expected)
	}
	d.Done(id, 4, 656)
	// Nothing is learnt of what is not known or has ended, and nothing forgotten.
	d = &driver{Replay: New(Options{Slots: 2, HostTokens: 1 << 20})}
	d.send(first, 4)
	d.Learn(id, nil, 5)
	d.Learn(ledger.ClaimID{Coordinator: 9, Seq: 9}, keysOf(first), len(first))
	running := d.begin(first)
	d.Learn(running, keysOf(first)[:3], 50)
	if got := d.open[running]; len(got.keys) != 30 || got.tokens != 480 {
		t.Errorf("%d points of %d tokens are left", len(got.keys), got.tokens)
	}
}

// What is learnt of a prompt at once leaves all as if it had been known: where the
// request is, what it reuses, and what slots and host cache hold in which order.
func TestLearntIsAsKnown(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		opt := Options{
			Slots: rapid.IntRange(1, 4).Draw(t, "slots"), Shared: rapid.Bool().Draw(t, "shared"),
			HostTokens: rapid.SampledFrom([]int{0, 3000, 1 << 20}).Draw(t, "host"), HostKnown: true,
		}
		known, learnt := New(opt), New(opt)
		var running []ledger.ClaimID
		for n := range rapid.IntRange(1, 30).Draw(t, "requests") {
			id := ledger.ClaimID{Coordinator: 1, Seq: uint64(n + 1)}
			chat, length := rapid.IntRange(0, 5).Draw(t, "chat"), rapid.IntRange(1, 1200).Draw(t, "length")
			prompt := text("sys", 200, fmt.Sprintf("chat %d", chat), length)
			keys := keysOf(prompt)
			of := rapid.IntRange(0, len(keys)).Draw(t, "known")
			known.Begin(id, keys, len(prompt), -1)
			learnt.Begin(id, keys[:of], max((of+1)*ledger.PointTokens, rapid.IntRange(1, 1600).Draw(t, "guess")), -1)
			learnt.Learn(id, keys, len(prompt))
			if running = append(running, id); len(running) > rapid.IntRange(0, 2).Draw(t, "running") {
				for _, r := range []*Replay{known, learnt} {
					r.Done(running[0], 5, -1)
				}
				running = running[1:]
			}
			if a, b := stateOf(known), stateOf(learnt); a != b {
				t.Fatalf("known: %s\nlearnt: %s", a, b)
			}
		}
	})
}

// What others did between a request and what is learnt of it stays.
func TestLearningLateKeepsWhatCameSince(t *testing.T) {
	x, y, z := text("x", 480), text("y", 480), text("z", 480)
	id := func(n uint64) ledger.ClaimID { return ledger.ClaimID{Coordinator: 2, Seq: n} }
	for _, c := range []struct {
		name  string
		opt   Options
		do    func(d *driver)
		slots []int      // tokens
		host  [][]uint32 // prompts
	}{
		{"what was given to the host cache is there", Options{Slots: 2}, func(d *driver) {
			d.send(x, 4)
			d.Begin(id(1), nil, 700, -1)
			d.send(y, 4)
			d.begin(z)
			d.Learn(id(1), keysOf(text("p", 320)), 320)
		}, []int{320, 480}, [][]uint32{x, y}},
		{"what another gave of which little was known is there", Options{Slots: 2}, func(d *driver) {
			d.send(x, 4)
			d.Begin(id(1), nil, 700, -1)
			d.send(y, 4)
			d.Begin(id(2), nil, 500, -1)
			d.Learn(id(1), keysOf(text("p", 320)), 320)
		}, []int{320, 500}, [][]uint32{x, y}},
		{"a slot that was emptied holds what came into it since", Options{Slots: 2, Shared: true}, func(d *driver) {
			d.send(x, 4)
			d.Begin(id(1), nil, 700, -1)
			d.send(y, 4)
			d.Learn(id(1), keysOf(text("p", 320)), 320)
		}, []int{320, 0}, [][]uint32{x, y}},
	} {
		c.opt.HostTokens = 1 << 20
		d := &driver{Replay: New(c.opt)}
		c.do(d)
		var slots []int
		for i := range d.slots {
			slots = append(slots, d.slots[i].held.tokens)
		}
		if !slices.Equal(slots, c.slots) {
			t.Errorf("%s: the slots hold %v tokens, want %v", c.name, slots, c.slots)
		}
		for i, e := range d.cache.entries {
			if i >= len(c.host) || e.shared(keysOf(c.host[i])) != 480 {
				t.Errorf("%s: entry %d of the host cache is another", c.name, i)
			}
		}
		if len(d.cache.entries) != len(c.host) {
			t.Errorf("%s: %d entries in the host cache, want %d", c.name, len(d.cache.entries), len(c.host))
		}
	}
}

// Whatever changes what the host cache holds is counted, and stays when something is
// learnt of a request that came before it.
func TestChangesOfTheHostCacheAreCounted(t *testing.T) {
	entry := func(name string, tokens int) *sequence {
		return &sequence{keys: keysOf(text(name, tokens)), tokens: tokens, exact: true}
	}
	for name, change := range map[string]func(r *Replay){
		"give":     func(r *Replay) { r.give(entry("c", 320)) },
		"take":     func(r *Replay) { r.cache.take(r.cache.entries[0]) },
		"limit":    func(r *Replay) { r.cache.missed(1000) },
		"name":     func(r *Replay) { r.place(entry("d", 640)) },
		"put back": func(r *Replay) { r.cache.putBack(entry("e", 500), nil) },
	} {
		r := New(Options{Slots: 1, HostTokens: 1 << 20})
		r.cache.entries = []*sequence{entry("a", 480), {tokens: 640, exact: true}, entry("b", 480)}
		id := ledger.ClaimID{Coordinator: 1, Seq: 1}
		r.Begin(id, nil, 700, -1)
		before := r.cache.changes
		change(r)
		after := slices.Clone(r.cache.entries)
		if r.cache.changes == before {
			t.Errorf("%s: not counted", name)
		}
		r.Learn(id, keysOf(text("p", 320)), 320)
		if !slices.Equal(r.cache.entries, after) {
			t.Errorf("%s: was undone", name)
		}
	}
}

// stateOf tells what a replay believes of a server.
func stateOf(r *Replay) string {
	var b strings.Builder
	of := func(s *sequence) { fmt.Fprintf(&b, " %d tokens %x", s.tokens, s.keys[max(0, len(s.keys)-1):]) }
	for i := range r.slots {
		s := &r.slots[i]
		fmt.Fprintf(&b, " slot %d:", i)
		if of(s.held); s.by != nil {
			fmt.Fprintf(&b, " reuses %d", s.by.expected)
		}
	}
	for _, list := range [][]*sequence{r.cache.entries, r.cache.ghosts} {
		b.WriteString(" host:")
		for _, e := range list {
			of(e)
		}
	}
	return b.String()
}

// The length of a text that was only guessed is not what its slot holds.
func TestGuessedLengthIsNotExact(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 1, HostTokens: 0})}
	id := ledger.ClaimID{Coordinator: 2, Seq: 1}
	d.Begin(id, keysOf(text("a", 480))[:20], 700, -1)
	d.Done(id, 4, 0)
	for range 3 {
		d.Observe([]Seen{{Tokens: 483, Task: 1}})
	}
	if got := d.slots[0].held; len(got.keys) != 20 || got.tokens != 483 || d.Blocks() != 20 {
		t.Errorf("%d points of %d tokens", len(got.keys), got.tokens)
	}
}

// A text of which only a beginning is known is saved beside another that begins
// alike: however its request ended, and whatever its length was seen to be.
func TestAPartlyKnownTextIsSavedBesideOthers(t *testing.T) {
	part, other := text("sys", 256, "a", 300), text("sys", 256, "b", 700)
	id := ledger.ClaimID{Coordinator: 2, Seq: 1}
	for name, end := range map[string]func(d *driver){
		"its end was told": func(d *driver) { d.Done(id, 4, 0) },
		"it broke off":     func(d *driver) { d.First(id); d.Gone(id) },
		"its end was seen": func(d *driver) {
			for range 3 {
				d.Observe([]Seen{{Tokens: -1}, {Tokens: 559, Task: 2}})
			}
		},
	} {
		d := &driver{Replay: New(Options{Slots: 2, HostTokens: 1 << 20})}
		d.send(other, 4)
		d.Begin(id, keysOf(part)[:16], len(part), -1)
		end(d)
		d.send(text("c", 300), 4)
		if n := len(d.cache.entries); n != 2 {
			t.Errorf("%s: %d entries, want the two that begin alike", name, n)
		}
	}
}

// Slots are named only once they were seen to keep what they hold: where they share
// a buffer, another request empties them, and a named empty slot takes nothing
// from the host cache (seen with b10434).
func TestSlotsOfOneBufferAreNotNamed(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 2, HostTokens: 1 << 20})}
	a, b := text("a", 480), text("b", 320)
	d.send(a, 4)
	d.Observe([]Seen{{Tokens: -1}, {Tokens: 483, Task: 1}})
	if idle := d.Idle(); len(idle) != 0 {
		t.Errorf("%+v: it may be emptied", idle)
	}
	d.send(b, 4)
	d.Observe([]Seen{{Tokens: 323, Task: 2}, {Tokens: 483, Task: 1}})
	if idle := d.Idle(); len(idle) != 2 {
		t.Errorf("%+v, want both slots: they keep what they hold", idle)
	}
	d.Observe([]Seen{{Tokens: 0, Task: 2}, {Tokens: 483, Task: 3}})
	if idle := d.Idle(); len(idle) != 0 || d.Blocks() == 0 {
		t.Errorf("%+v of one buffer, %d blocks", idle, d.Blocks())
	}
	d = &driver{Replay: New(Options{Slots: 2, Shared: true, HostTokens: 1 << 20})}
	d.send(a, 4)
	d.send(b, 4)
	if got := d.Begin(ledger.ClaimID{Coordinator: 2, Seq: 1}, keysOf(a), len(a), 1); got != 0 {
		t.Errorf("%d tokens are expected of a named empty slot", got)
	}
}

// mirror is a listener that holds what it is told.
type mirror struct {
	t      interface{ Fatalf(string, ...any) }
	replay *Replay
	blocks map[uint32]summary.Block
	byKey  map[prefix.Key]uint32
	keys   map[uint32]prefix.Key
	// children counts those of each block.
	children map[uint32]int
}

func newMirror(t interface{ Fatalf(string, ...any) }) *mirror {
	return &mirror{t: t, blocks: map[uint32]summary.Block{}, byKey: map[prefix.Key]uint32{}, keys: map[uint32]prefix.Key{}, children: map[uint32]int{}}
}

func (m *mirror) Attached(b summary.Block) {
	if _, ok := m.blocks[b.ID]; ok {
		m.t.Fatalf("block %d attached twice", b.ID)
	}
	if p, ok := m.blocks[b.Parent]; b.Parent != 0 && (!ok || p.EndTokens != b.StartTokens) {
		m.t.Fatalf("block %d hangs in the air", b.ID)
	}
	m.blocks[b.ID] = b
	m.children[b.Parent]++
	k := prefix.Key(m.replay.PointOf(b.ID))
	m.byKey[k], m.keys[b.ID] = b.ID, k
}

func (m *mirror) Detached(id uint32) {
	if _, ok := m.blocks[id]; !ok {
		m.t.Fatalf("block %d detached that is not attached", id)
	}
	if n := m.children[id]; n > 0 {
		m.t.Fatalf("block %d detached before its %d children", id, n)
	}
	m.children[m.blocks[id].Parent]--
	delete(m.children, id)
	delete(m.blocks, id)
	delete(m.byKey, m.keys[id])
	delete(m.keys, id)
}

func (m *mirror) UsableChanged(id uint32, usable bool) {
	b := m.blocks[id]
	b.Usable = usable
	m.blocks[id] = b
}

func (m *mirror) TierChanged(id uint32, tier summary.Tier) {
	b := m.blocks[id]
	b.Tier = tier
	m.blocks[id] = b
}

func (m *mirror) StoreEnded(id uint32) {
	if _, ok := m.blocks[id]; !ok {
		m.t.Fatalf("a store ended at block %d that is not attached", id)
	}
}

func (m *mirror) Cleared() {
	clear(m.blocks)
	clear(m.byKey)
	clear(m.keys)
	clear(m.children)
}

// match is the deepest usable block of a prompt.
func (m *mirror) match(tokens []uint32) (deepest int) {
	for _, k := range keysOf(tokens) {
		id, ok := m.byKey[k]
		if !ok {
			break
		}
		if b := m.blocks[id]; b.Usable {
			deepest = int(b.EndTokens)
		}
	}
	return deepest
}

// check compares what was told with what the replay would tell anew.
func (m *mirror) check() {
	for id := range m.blocks {
		if got := m.replay.tree.block(id); got != m.blocks[id] {
			m.t.Fatalf("block %d was told as %+v and is %+v", id, m.blocks[id], got)
		}
		if parent, end := m.replay.PlaceOf(id); parent != m.blocks[id].Parent || end != m.blocks[id].EndTokens {
			m.t.Fatalf("block %d was told as %+v and is at %d behind %d", id, m.blocks[id], end, parent)
		}
	}
	if parent, end := m.replay.PlaceOf(math.MaxUint32); parent != 0 || end != 0 {
		m.t.Fatalf("what is no block is at %d behind %d", end, parent)
	}
	if len(m.blocks) != m.replay.Blocks() {
		m.t.Fatalf("%d blocks were told, %d are shown", len(m.blocks), m.replay.Blocks())
	}
}

// Whether a quarter of an entry is shared may depend on tokens between two points:
// then it is promised no more, unless the server's word shows that it was not taken.
func TestAnEntryThatMayBeTaken(t *testing.T) {
	a, b := text("system", 262, "alpha", 768), text("system", 262, "beta", 917)
	rules := newServer(1, 1<<20, false)
	for _, prompt := range [][]uint32{a, text("other", 600), b} {
		rules.finish(rules.arrive(prompt, make([]uint32, 4)))
	}
	if last := rules.arrive(a, nil); last.reused >= 1024 {
		t.Fatal("by the rules the entry is taken")
	}
	for _, c := range []struct {
		cached int
		there  bool
	}{{262, false}, {0, true}, {-1, false}} {
		told := newMirror(t)
		d := &driver{Replay: New(Options{Slots: 1, HostTokens: 1 << 20, Listener: told})}
		told.replay = d.Replay
		d.send(a, 4)
		d.send(text("other", 600), 4)
		if told.match(a) != 1024 {
			t.Fatalf("%d tokens of the entry are promised", told.match(a))
		}
		d.Done(d.begin(b), 4, c.cached)
		if there := told.match(a) == 1024; there != c.there {
			t.Errorf("%d tokens reused: %d of the entry are promised", c.cached, told.match(a))
		}
		kept := slices.ContainsFunc(d.cache.entries, func(e *sequence) bool { return e.shared(keysOf(a)) == 1024 })
		if kept != (c.cached != 262) { // and takes its room
			t.Errorf("%d tokens reused: kept %v", c.cached, kept)
		}
		if c.cached >= 0 {
			continue
		}
		// What may be gone teaches nothing of the cache's size by being gone.
		known, fits, limit := d.cache.doubts, d.cache.fits, d.cache.limitTokens
		d.Done(d.begin(a), 4, 0)
		if d.counts.Missed != 1 || d.cache.doubts != known || d.cache.fits != fits || d.cache.limitTokens != limit {
			t.Errorf("%d missed: doubts %d, fits %d, limit %d; before %d, %d, %d", d.counts.Missed, d.cache.doubts, d.cache.fits, d.cache.limitTokens, known, fits, limit)
		}
	}
	// A prompt that becomes known while it runs is judged as the one it is.
	told := newMirror(t)
	d := &driver{Replay: New(Options{Slots: 1, HostTokens: 1 << 20, Listener: told})}
	told.replay = d.Replay
	d.send(a, 4)
	d.send(text("other", 600), 4)
	id := ledger.ClaimID{Coordinator: 2, Seq: 1}
	d.Begin(id, keysOf(b)[:16], len(b), -1)
	if got := told.match(a); got == 1024 {
		t.Errorf("%d tokens of an entry that may be taken are promised", got)
	}
	d.Learn(id, keysOf(b), len(b))
	d.Done(id, 4, 0)
	if got := told.match(a); got != 1024 {
		t.Errorf("%d tokens of the entry are promised after it was not taken", got)
	}
}

// A server that starts anew is asked by nobody yet.
func TestResetForgetsTheCrowd(t *testing.T) {
	d := &driver{Replay: New(Options{Slots: 2, HostTokens: 1 << 20})}
	first, second := d.begin(text("a", 480)), d.begin(text("b", 320))
	d.Done(first, 4, 0)
	d.Done(second, 4, 0)
	if !d.crowded() {
		t.Error("two at once are no crowd")
	}
	d.Reset()
	if d.crowded() {
		t.Error("the former life's crowd is still there")
	}
}
