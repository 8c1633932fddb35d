package kvevents

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"

	"github.com/tinylib/msgp/msgp"
)

// Faults of comparable systems, by the names that they are listed under.

// play is a stream with a mirror behind it and an engine's replay ring in front.
type player struct {
	t             *testing.T
	stream        *Stream
	decoder       *Decoder
	table, beside *blocktable.Table
	tiers         bool
	coverage      engine.Coverage
	hint          string
	hints         []string
	counts        map[string]int
	resets        []engine.ResetCause
	asked         []ask
	now           time.Time
	ring          []Message
	next          uint64
	// lowest is the least reuse of watched while the stream was fed.
	watched []uint32
	lowest  int
}

func newPlayer(t *testing.T, o StreamOptions) *player {
	p := &player{t: t, decoder: NewDecoder(), table: blocktable.New(blocktable.Options{}), counts: map[string]int{}, now: time.Unix(1000, 0), lowest: 1 << 30}
	p.stream = NewStream(o, p)
	return p
}

func (p *player) Apply(m Message) {
	b, err := p.decoder.Decode(m.Payload)
	if err != nil {
		p.stream.BadPayload(m.Received)
		return
	}
	told := tellOf(b.Events)
	p.tiers = p.tiers || told.tiers
	p.stream.UnknownTier(told.untold)
	if told.cleared && !p.tiers {
		p.stream.Cleared()
	}
	table := p.table
	if p.beside != nil {
		table = p.beside
	}
	for i := range b.Events {
		table.Apply(&b.Events[i])
	}
	p.stream.Applied(m.Received, told.gpu, b.Damaged, b.Unknown, b.LostRemovals)
}
func (p *player) AskReplay(run, from uint64) { p.asked = append(p.asked, ask{run, from}) }
func (p *player) Reset(c engine.ResetCause) {
	p.resets, p.beside = append(p.resets, c), nil
	p.table.Clear()
}
func (p *player) Rebuild(engine.ResetCause) { p.beside = blocktable.New(blocktable.Options{}) }
func (p *player) Rebuilt()                  { p.table, p.beside = p.beside, nil }
func (p *player) Coverage(c engine.Coverage, hint string) {
	p.coverage, p.hint = c, hint
	p.hints = append(p.hints, hint)
}
func (p *player) Counted(what string, n int) { p.counts[what] += n }

// publish makes the next batch of events, which the ring keeps.
func (p *player) publish(events ...any) Message {
	payload, err := msgp.AppendIntf(nil, []any{float64(p.next) + .5, events, 0})
	if err != nil {
		p.t.Fatal(err)
	}
	m := Message{Seq: p.next, Payload: payload}
	p.next++
	p.ring = append(p.ring, m)
	return m
}

func (p *player) live(m Message) {
	m.Received = p.now
	p.stream.Live(m)
	p.look()
}

func (p *player) look() {
	if p.watched != nil {
		p.lowest = min(p.lowest, p.table.Match(p.watched, "", ""))
	}
}

// answer answers the latest question from the ring.
func (p *player) answer() {
	for len(p.asked) > 0 {
		a := p.asked[len(p.asked)-1]
		p.asked = nil
		for _, m := range p.ring {
			if m.Seq >= a.from {
				m.Received = p.now
				p.stream.Replayed(a.run, m)
				p.look()
			}
		}
		p.stream.ReplayEnded(a.run, p.now)
	}
}

func (p *player) pass(d time.Duration) {
	p.now = p.now.Add(d)
	p.stream.Tick(p.now, false)
}

func block(parent, hash int) any {
	e := map[string]any{"type": "BlockStored", "block_hashes": []any{hash}, "parent_block_hash": nil, "token_ids": []any{2 * hash, 2*hash + 1}, "block_size": 2, "medium": "GPU"}
	if parent != 0 {
		e["parent_block_hash"] = parent
	}
	return e
}

func prompt(hashes ...int) (out []uint32) {
	for _, h := range hashes {
		out = append(out, uint32(2*h), uint32(2*h+1))
	}
	return append(out, 0)
}

// EVT-01: an engine that is another process begins its numbers again: every
// block of the old one goes in one step, and the low numbers count.
func TestEVT01RestartBeginsAgain(t *testing.T) {
	p := newPlayer(t, StreamOptions{Replay: true})
	p.stream.Connected(p.now)
	p.answer()
	for h := 1; h <= 500; h++ {
		p.live(p.publish(block(h-1, h)))
	}
	if got := p.table.Match(prompt(1, 2, 3), "", ""); got != 6 || p.coverage != engine.CoverageFull {
		t.Fatalf("%d tokens, %s", got, p.coverage)
	}
	p.stream.Disconnected(p.now)
	p.next, p.ring = 0, nil
	p.pass(time.Second)
	p.stream.Connected(p.now)
	for h := 1001; h <= 1010; h++ {
		p.live(p.publish(block(0, h)))
	}
	p.answer()
	if got := p.table.Match(prompt(1, 2, 3), "", ""); got != 0 || p.table.Len() != 10 {
		t.Errorf("%d tokens of the old process, %d blocks", got, p.table.Len())
	}
	if len(p.resets) != 1 || p.resets[0] != engine.ResetRestart || p.coverage != engine.CoverageFull {
		t.Errorf("resets %v, coverage %s (%s)", p.resets, p.coverage, p.hint)
	}
}

// EVT-03: of 10,000 batches one is lost: what is known stays, and only the
// missing one is asked for.
func TestEVT03OneLostBatch(t *testing.T) {
	p := newPlayer(t, StreamOptions{Replay: true})
	p.stream.Connected(p.now)
	p.answer()
	p.live(p.publish(block(0, 1)))
	p.watched, p.lowest = prompt(1), 1<<30
	for h := 2; h <= 10_000; h++ {
		m := p.publish(block(0, h))
		if h != 7000 {
			p.live(m)
		}
		if len(p.asked) > 0 {
			if from := p.asked[0].from; from != 6998 {
				t.Errorf("asked from batch %d, want from the last known one", from)
			}
			p.answer()
		}
	}
	if p.lowest != 2 || len(p.resets) != 0 {
		t.Errorf("reuse of an old prefix fell to %d, resets %v", p.lowest, p.resets)
	}
	if p.table.Len() != 10_000 || p.coverage != engine.CoverageFull || p.counts[CountMissing] != 1 {
		t.Errorf("%d blocks, %s, %v", p.table.Len(), p.coverage, p.counts)
	}
}

// EVT-04: a reader that joins late says so: silence about what came before is
// not an empty cache.
func TestEVT04LateJoinIsPartial(t *testing.T) {
	for _, replay := range []bool{true, false} {
		p := newPlayer(t, StreamOptions{Replay: replay})
		p.stream.SetPool(100)
		p.next = 200 // published before, and not kept
		p.stream.Connected(p.now)
		p.answer()
		p.live(p.publish(block(7, 8))) // a child of a parent that nobody told
		p.answer()
		if p.coverage != engine.CoveragePartial || p.hint == "" || p.table.Attached() != 0 {
			t.Errorf("replay=%v: %s (%s), %d blocks attached", replay, p.coverage, p.hint, p.table.Attached())
		}
		// Once as much was stored as the engine holds, what is older is gone.
		for h := 100; h <= 201; h++ {
			p.live(p.publish(block(0, h)))
		}
		if p.coverage != engine.CoverageFull {
			t.Errorf("replay=%v: %s (%s) after a pool's worth of stores", replay, p.coverage, p.hint)
		}
	}
}

// EVT-06: batches 51 to 150 never come, and there is no replay: how many are
// missing is counted, and the view is trusted less.
func TestEVT06JumpWithoutReplay(t *testing.T) {
	p := newPlayer(t, StreamOptions{})
	p.stream.Connected(p.now)
	for n := 1; n <= 200; n++ {
		m := p.publish(block(0, n))
		if n <= 50 || n > 150 {
			p.live(m)
		}
	}
	if p.counts[CountMissing] != 100 || p.counts[CountGaps] != 1 || p.coverage != engine.CoveragePartial {
		t.Errorf("%v, %s (%s)", p.counts, p.coverage, p.hint)
	}
	if p.counts[CountLost] != 100 || !strings.Contains(p.hint, "set replay_endpoint") {
		t.Errorf("%v, and the hint is %q", p.counts, p.hint)
	}
	if p.table.Len() != 100 {
		t.Errorf("%d blocks: what is known must stay", p.table.Len())
	}
}

// After a clear nothing of before matters: neither what was missed nor what may have
// been removed unseen. Where the engine tells of memory that a clear leaves alone,
// and where a removal was lost behind it, the doubt stays.
func TestClearEndsDoubtsOfBefore(t *testing.T) {
	clear := []any{"AllBlocksCleared"}
	lost := []any{"BlockRemoved", []any{"x"}}
	late := func(p *player) { p.next = 7 }
	gap := func(p *player) {
		p.live(p.publish(block(0, 1)))
		p.ring, p.next = nil, 9
	}
	damage := func(p *player) { p.live(p.publish(block(0, 1), lost)) }
	hole := func(p *player) {
		p.publish(block(0, 1))
		p.publish(block(0, 3))
		p.publish(block(0, 4))
		p.ring = append(p.ring[:1:1], p.ring[2:]...)
	}
	tests := []struct {
		name   string
		replay bool
		before func(*player)
		events []any
		want   engine.Coverage
	}{
		{"late", false, late, []any{clear, block(0, 2)}, engine.CoverageFull},
		{"late with a replay", true, late, []any{clear, block(0, 2)}, engine.CoverageFull},
		{"gap", false, gap, []any{clear, block(0, 2)}, engine.CoverageFull},
		{"gap with a replay", true, gap, []any{clear, block(0, 2)}, engine.CoverageFull},
		{"a lost removal", true, damage, []any{clear, block(0, 2)}, engine.CoverageFull},
		{"a hole in the replay", true, hole, []any{clear, block(0, 2)}, engine.CoverageFull},
		{"no clear", false, gap, []any{block(0, 2)}, engine.CoveragePartial},
		{"another tier is told of", false, gap, []any{[]any{"BlockRemoved", []any{5}, "CPU"}, clear}, engine.CoveragePartial},
		{"a clear of another tier", false, gap, []any{[]any{"AllBlocksCleared", "CPU"}}, engine.CoveragePartial},
		{"a removal is lost behind it", false, gap, []any{clear, lost}, engine.CoveragePartial},
	}
	for _, test := range tests {
		p := newPlayer(t, StreamOptions{Replay: test.replay})
		p.stream.Connected(p.now)
		test.before(p)
		p.answer()
		p.live(p.publish(test.events...))
		p.answer()
		if p.coverage != test.want {
			t.Errorf("%s: %s (%s), want %s", test.name, p.coverage, p.hint, test.want)
		}
		if test.want != engine.CoverageFull {
			continue
		}
		// Nothing is left to be repaired either.
		p.pass(time.Hour)
		if got := p.table.Match(prompt(2), "", ""); got != 2 || len(p.asked) > 0 && p.asked[0].from == 0 {
			t.Errorf("%s: %d tokens, and %v is asked for", test.name, got, p.asked)
		}
	}
}

// EVT-07: a long history shows how far it was read, and what waits meanwhile is
// bounded.
func TestEVT07LongHistory(t *testing.T) {
	p := newPlayer(t, StreamOptions{Replay: true, MaxHeld: 100})
	for h := range 20_000 {
		p.publish(block(0, h+1))
	}
	p.stream.Connected(p.now)
	for range 5000 { // live batches that come in between
		p.live(p.publish(block(0, 1)))
		if n := len(p.stream.held); n > 100 {
			t.Fatalf("%d batches wait", n)
		}
	}
	p.answer()
	if p.coverage != engine.CoverageFull || p.table.Len() != 20_000 {
		t.Errorf("%s (%s), %d blocks", p.coverage, p.hint, p.table.Len())
	}
	if n := len(p.hints); n < 20 || n > 60 {
		t.Errorf("%d signs of progress for 20 thousand batches: %q", n, p.hints)
	}
	percents := 0
	for last, i := 0, 0; i < len(p.hints); i++ {
		_, after, _ := strings.Cut(p.hints[i], "batches, ")
		var percent int
		if _, err := fmt.Sscanf(after, "%d %%", &percent); err != nil {
			continue
		}
		if percents++; percent < last || percent > 100 {
			t.Errorf("%d %% read after %d %%", percent, last)
		}
		last = percent
	}
	if percents < 15 {
		t.Errorf("only %d signs tell how far it is: %q", percents, p.hints)
	}
}

// EVT-10: a reader that is too slow loses most batches: it says so while it
// lasts, with the number, and is whole again once it keeps up.
func TestEVT10LossIsMeasured(t *testing.T) {
	p := newPlayer(t, StreamOptions{Replay: true})
	p.stream.SetPool(1 << 20)
	p.stream.Connected(p.now)
	p.answer()
	lost := 0
	rng := rand.New(rand.NewPCG(1, 2))
	for h := 1; h <= 5000; h++ {
		m := p.publish(block(0, h))
		if h%10 != 0 {
			lost++
			continue
		}
		p.live(m)
		if p.coverage == engine.CoverageFull {
			t.Fatalf("full coverage with %d batches missing", lost)
		}
		if rng.IntN(50) == 0 {
			p.pass(100 * time.Millisecond)
		}
	}
	if gaps, missing := p.counts[CountGaps], p.counts[CountMissing]; gaps != 500 || missing != lost {
		t.Errorf("%d batches are missing in %d gaps, want %d in 500", missing, gaps, lost)
	}
	p.answer()
	p.pass(time.Minute)
	p.answer()
	if p.coverage != engine.CoverageFull || p.table.Len() != 5000 || len(p.resets) != 0 || p.counts[CountLost] != 0 || p.counts[CountMissing] != lost {
		t.Errorf("%s (%s), %d blocks, resets %v, counted %v", p.coverage, p.hint, p.table.Len(), p.resets, p.counts)
	}
}

// TRU-01: a clear takes effect with its batch, for the memory that it names.
func TestTRU01ClearTakesEffectAtOnce(t *testing.T) {
	p := newPlayer(t, StreamOptions{Replay: true})
	p.stream.Connected(p.now)
	p.answer()
	p.live(p.publish(block(0, 1)))
	p.live(p.publish(map[string]any{"type": "AllBlocksCleared", "medium": "CPU"}))
	if got := p.table.Match(prompt(1), "", ""); got != 2 {
		t.Errorf("%d tokens after a clear of host memory", got)
	}
	p.live(p.publish(map[string]any{"type": "AllBlocksCleared"}))
	if got := p.table.Match(prompt(1), "", ""); got != 0 {
		t.Errorf("%d tokens after a clear", got)
	}
}

// TRU-05: where an engine's layout has a field for the memory, a store without or
// with a name that nobody knows is of an unknown tier: it earns nothing, is counted
// and named. Where there is no field, or the engine leaves out what is GPU memory,
// it is that.
func TestTRU05UnknownTierIsNotGPU(t *testing.T) {
	const left = "left out"
	array := func(medium any) any {
		e := []any{"BlockStored", []any{1}, nil, []any{2, 3}, 2, nil}
		if medium != left {
			e = append(e, medium)
		}
		return e
	}
	named := func(medium any) any {
		e := block(0, 1).(map[string]any)
		e["medium"] = medium
		if medium == left {
			delete(e, "medium")
		}
		return e
	}
	const held, other, unknown = 2, 0, -1
	for _, test := range []struct {
		event  func(any) any
		tells  bool
		medium any
		want   int
	}{
		{named, true, "GPU", held},
		{named, true, "gpu", held},
		{named, true, nil, unknown},
		{named, true, left, unknown},
		{named, true, "tape", unknown},
		{named, true, "CPU", other},
		{named, true, "EXTERNAL", other},
		{named, true, "cuda:0", other},
		{array, true, left, held}, // before the field
		{array, true, nil, unknown},
		{array, true, "GPU", held},
		{named, false, nil, held},
		{named, false, left, held},
		{named, false, "CPU_PINNED", other},
		{named, false, "DISK", other},
		{named, false, "tape", unknown},
		{array, false, nil, held},
	} {
		p := newPlayer(t, StreamOptions{Replay: true})
		if test.tells {
			p.decoder.TellsMedium()
		}
		p.stream.Connected(p.now)
		p.answer()
		p.live(p.publish(test.event(test.medium)))
		if got := p.table.Match([]uint32{2, 3, 4}, "", ""); got != max(test.want, 0) {
			t.Errorf("%v, tells %v: %d tokens, want %d", test.event(test.medium), test.tells, got, max(test.want, 0))
		}
		if got := p.counts[CountUnknownTier] > 0; got != (test.want == unknown) {
			t.Errorf("%v, tells %v: unknown tier %v", test.event(test.medium), test.tells, got)
		}
		if test.want == unknown && (p.coverage != engine.CoveragePartial || p.hint != hintUnknownTier) {
			t.Errorf("%v, tells %v: coverage %s (%s)", test.event(test.medium), test.tells, p.coverage, p.hint)
		}
		// Gone from wherever it was.
		p.live(p.publish(map[string]any{"type": "BlockRemoved", "block_hashes": []any{1}}))
		if got := p.table.Match([]uint32{2, 3, 4}, "", ""); got != 0 {
			t.Errorf("%v, tells %v: %d tokens after its removal", test.event(test.medium), test.tells, got)
		}
	}
}

// An engine with pages of one token tells of each token by itself: the whole
// prompt but its last token is reused.
func TestPagesOfOneToken(t *testing.T) {
	p := newPlayer(t, StreamOptions{Replay: true})
	p.stream.Connected(p.now)
	p.answer()
	var hashes, tokens []any
	var whole []uint32
	for i := range 300 {
		hashes, tokens, whole = append(hashes, i+1), append(tokens, 7*i), append(whole, uint32(7*i))
	}
	p.live(p.publish([]any{"BlockStored", hashes[:200], nil, tokens[:200], 1, nil, "GPU"}))
	p.live(p.publish([]any{"BlockStored", hashes[200:], 200, tokens[200:], 1, nil, "GPU"}))
	if got := p.table.Match(whole, "", ""); got != 299 || p.table.BlockTokens() != 1 {
		t.Errorf("%d tokens, pages of %d", got, p.table.BlockTokens())
	}
	p.live(p.publish([]any{"BlockRemoved", hashes[250:], "GPU"}))
	if got := p.table.Match(whole, "", ""); got != 250 {
		t.Errorf("%d tokens", got)
	}
}

// TEN-03: of two prompts with the same text and other pictures the second reuses
// what comes before the picture, whatever tells which picture it is; one that nobody
// tells apart, or asks for without a picture, reuses no more either.
func TestTEN03PicturesAreNotShared(t *testing.T) {
	for name, picture := range map[string]func(id string) any{
		"of an old release": func(id string) any { return id },
		"with its offset":   func(id string) any { return []any{id, 1} },
		"that says so":      func(id string) any { return []any{"mm", id, 1} },
	} {
		p := newPlayer(t, StreamOptions{Replay: true})
		p.stream.Connected(p.now)
		p.answer()
		whole := prompt(1, 2, 3)
		p.live(p.publish(map[string]any{
			"type": "BlockStored", "block_hashes": []any{1, 2, 3}, "parent_block_hash": nil, "token_ids": []any{2, 3, 4, 5, 6, 7}, "block_size": 2, "medium": "GPU",
			"extra_keys": []any{nil, []any{picture("ab12")}, []any{picture("ab12")}},
		}))
		if got := p.table.Match(whole, "", ""); got != 2 {
			t.Errorf("a picture %s: %d tokens of the same text are reused, want the 2 before it", name, got)
		}
		// The other picture's blocks have other hashes, and do no harm.
		p.live(p.publish(map[string]any{
			"type": "BlockStored", "block_hashes": []any{1, 12, 13}, "parent_block_hash": nil, "token_ids": []any{2, 3, 4, 5, 6, 7}, "block_size": 2, "medium": "GPU",
			"extra_keys": []any{nil, []any{picture("cd34")}, []any{picture("cd34")}},
		}))
		if got := p.table.Match(whole, "", ""); got != 2 || p.table.Len() != 5 {
			t.Errorf("two pictures %s: %d tokens are reused of %d blocks", name, got, p.table.Len())
		}
	}
}

// A million clears in one batch are one clear.
func TestFloodOfClears(t *testing.T) {
	clears := make([]any, 100_000)
	for i := range clears {
		clears[i] = []any{"AllBlocksCleared"}
	}
	payload, err := msgp.AppendIntf(nil, []any{1.5, clears, 0})
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewDecoder().Decode(payload)
	if err != nil || len(b.Events) != 1 || b.Clears != len(clears)-1 {
		t.Errorf("%v: %d events, %d clears left out", err, len(b.Events), b.Clears)
	}
}
