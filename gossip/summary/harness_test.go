package summary_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"time"

	"waypost/agent/blocktable"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	"waypost/gossip/summary/summarytest"
)

var (
	keyA    = prefix.ClusterKey{1, 2, 3}
	keyB    = prefix.ClusterKey{4, 5, 6}
	domains = []prefix.Domain{{Model: "m"}, {Model: "m", Adapter: "a"}, {Model: "m", Salt: "s"}}
	start   = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
)

// recorder is a sink that keeps its keys and notes the first breach of the
// contract of summary.IndexSink.
type recorder struct {
	keys     map[plainKey]int
	branch   map[plainKey]int
	extents  map[plainKey]plainExtent
	byKey    map[summary.IndexKey]int
	behind   map[summary.IndexKey]int // keys held whose checkpoint before is this one
	open     bool
	calls    int
	vanished map[plainKey]bool // held no longer at some moment since begin
	err      error
}

func newRecorder() *recorder {
	return &recorder{keys: map[plainKey]int{}, branch: map[plainKey]int{}, extents: map[plainKey]plainExtent{}, byKey: map[summary.IndexKey]int{}, behind: map[summary.IndexKey]int{}, vanished: map[plainKey]bool{}}
}

func (r *recorder) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("sink: "+format, args...)
	}
}

func (r *recorder) Begin() {
	if r.open {
		r.fail("begun twice")
	}
	r.open, r.calls = true, 0
}

func (r *recorder) End() {
	if !r.open || r.calls == 0 {
		r.fail("ended without a beginning, or nothing between")
	}
	r.open = false
}

func (r *recorder) call() {
	r.calls++
	if !r.open {
		r.fail("called outside Begin and End")
	}
}

func (r *recorder) add(k, before summary.IndexKey, depth uint32, branch bool) {
	r.call()
	if (before == 0) != (depth <= 512 && depth%512 == 0 || depth < 512) {
		r.fail("key at %d after %x", depth, before)
	}
	if before != 0 && r.byKey[before] == 0 {
		r.fail("key at %d added before the checkpoint in front of it", depth)
	}
	p := plainKey{uint64(k), int(depth)}
	r.keys[p]++
	r.byKey[k]++
	r.behind[before]++
	if branch {
		r.branch[p]++
	}
}

func (r *recorder) remove(k, before summary.IndexKey, depth uint32, branch bool) {
	r.call()
	p := plainKey{uint64(k), int(depth)}
	if r.keys[p] == 0 || branch && r.branch[p] == 0 || !branch && r.branch[p] == r.keys[p] {
		r.fail("key at %d removed (branch %v), held %d times, %d of them as branch", depth, branch, r.keys[p], r.branch[p])
		return
	}
	r.behind[before]--
	if r.byKey[k]--; r.byKey[k] == 0 && r.behind[k] > 0 {
		r.fail("checkpoint at %d removed before what lies behind it", depth)
	}
	if branch {
		r.branch[p]--
	}
	if r.keys[p]--; r.keys[p] == 0 {
		delete(r.keys, p)
		delete(r.extents, p)
		r.vanished[p] = true
	}
}

func (r *recorder) AddCheckpoint(k, parent summary.IndexKey, depth uint32) {
	if depth%512 != 0 {
		r.fail("checkpoint at %d", depth)
	}
	r.add(k, parent, depth, false)
}

func (r *recorder) AddPoint(k, checkpoint summary.IndexKey, depth uint32, branch bool) {
	if depth%512 == 0 {
		r.fail("point at %d", depth)
	}
	r.add(k, checkpoint, depth, branch)
}

func (r *recorder) RemoveCheckpoint(k, parent summary.IndexKey, depth uint32) {
	r.remove(k, parent, depth, false)
}

func (r *recorder) RemovePoint(k, checkpoint summary.IndexKey, depth uint32, branch bool) {
	r.remove(k, checkpoint, depth, branch)
}

func (r *recorder) SetBranch(k, checkpoint summary.IndexKey, depth uint32) {
	r.call()
	p := plainKey{uint64(k), int(depth)}
	if r.branch[p] >= r.keys[p] {
		r.fail("point at %d made a branch once too often", depth)
	}
	r.branch[p]++
}

func (r *recorder) SetExtent(k, checkpoint summary.IndexKey, depth uint32, x summary.Extent) {
	r.call()
	p := plainKey{uint64(k), int(depth)}
	if r.keys[p] == 0 {
		r.fail("extent of a key at %d that is not held", depth)
	}
	if x.UsableTokens > depth || x.GPUTokens > x.HostTokens || x.HostTokens > depth {
		r.fail("extent %+v at %d", x, depth)
	}
	if r.extents[p] = (plainExtent{int(x.UsableTokens), int(x.GPUTokens), int(x.HostTokens)}); x == summary.WholeExtent(depth) {
		delete(r.extents, p)
	}
}

func (r *recorder) Reset() {
	r.call()
	for k := range r.keys {
		r.vanished[k] = true
	}
	clear(r.keys)
	clear(r.branch)
	clear(r.extents)
	clear(r.byKey)
	clear(r.behind)
}

// world is a block table that changes by numbered steps.
type world interface {
	summary.Blocks
	listen(l summary.Listener)
	step(rng *rand.Rand)
	blocks() []plainBlock
}

// forestWorld is a table whose blocks may be unusable, in lower tiers and equal.
type forestWorld struct{ *summarytest.Forest }

func (w forestWorld) listen(l summary.Listener) { w.Relisten(l) }
func (w forestWorld) step(rng *rand.Rand)       { w.Step(rng.IntN) }

func (w forestWorld) blocks() (out []plainBlock) {
	memo := map[uint32]plainExtent{0: {}}
	var ends func(id uint32) plainExtent // worth of the end of a block
	worst := map[uint32]summary.Tier{}
	ends = func(id uint32) plainExtent {
		if x, ok := memo[id]; ok {
			return x
		}
		x, d := ends(w.Parent(id)), len(w.Path(id))
		if w.Usable(id) {
			x.Usable = d
		}
		tier := max(worst[w.Parent(id)], w.Tier(id))
		worst[id] = tier
		if tier == summary.TierGPU {
			x.GPU = d
		}
		if tier <= summary.TierHost {
			x.Host = d
		}
		memo[id] = x
		return x
	}
	for _, id := range w.IDs() {
		before, at := ends(w.Parent(id)), ends(id)
		b := plainBlock{path: w.Path(id), start: len(w.Path(id)) - w.BlockTokens, domain: w.Domain(id), children: len(w.Children(id))}
		for d := b.start + 1; d <= len(b.path); d++ {
			x := plainExtent{before.Usable, before.GPU, before.Host}
			if worst[id] == summary.TierGPU {
				x.GPU = d
			}
			if worst[id] <= summary.TierHost {
				x.Host = d
			}
			if d == len(b.path) {
				x.Usable = at.Usable
			}
			b.extents = append(b.extents, x)
		}
		out = append(out, b)
	}
	return out
}

// engineWorld is a real block table fed with an engine's events. What it must
// hold is known from the events alone.
type engineWorld struct {
	*blocktable.Table
	size   int
	held   map[uint64]*engineBlock
	hashes []uint64 // of held, in order of first store
}

type engineBlock struct {
	parent uint64 // 0: none
	domain int
	tokens []uint32
	copies int
}

func newEngineWorld(size int) *engineWorld {
	return &engineWorld{Table: blocktable.New(blocktable.Options{Model: "m"}), size: size, held: map[uint64]*engineBlock{}}
}

func (w *engineWorld) listen(l summary.Listener) { w.Listen(l) }

// attached says whether a block and all before it are held.
func (w *engineWorld) attached(h uint64) bool {
	for h != 0 {
		b := w.held[h]
		if b == nil || b.copies == 0 {
			return false
		}
		h = b.parent
	}
	return true
}

func (w *engineWorld) path(h uint64) []uint32 {
	if h == 0 {
		return nil
	}
	return append(w.path(w.held[h].parent), w.held[h].tokens...)
}

func (w *engineWorld) blocks() (out []plainBlock) {
	children := map[uint64]int{}
	for h, b := range w.held {
		if b.copies > 0 && w.attached(h) {
			children[b.parent]++
		}
	}
	for h, b := range w.held {
		if !w.attached(h) {
			continue
		}
		path := w.path(h)
		p := plainBlock{path: path, start: len(path) - len(b.tokens), domain: domains[b.domain], children: children[h]}
		for d := p.start + 1; d <= len(path); d++ {
			usable := p.start
			if d == len(path) {
				usable = d
			}
			p.extents = append(p.extents, plainExtent{usable, d, d})
		}
		out = append(out, p)
	}
	return out
}

const engineMost = 250

// pick draws a block that is part of an unbroken prefix; 0: none, the start.
func (w *engineWorld) pick(rng *rand.Rand, leaf bool) uint64 {
	for range 20 {
		if len(w.hashes) == 0 {
			return 0
		}
		h := w.hashes[rng.IntN(len(w.hashes))]
		if !w.attached(h) {
			continue
		}
		if !leaf || !w.hasChildren(h) {
			return h
		}
	}
	return 0
}

func (w *engineWorld) hasChildren(h uint64) bool {
	for _, b := range w.held {
		if b.parent == h && b.copies > 0 {
			return true
		}
	}
	return false
}

// store stores n blocks after one, as one event. Equal content after one block
// is one block.
func (w *engineWorld) store(rng *rand.Rand, after uint64, n int) uint64 {
	e := blocktable.Event{Op: blocktable.OpStore, Spec: blocktable.SpecFull, BlockTokens: int32(w.size), Parent: after, HasParent: after != 0}
	domain := rng.IntN(len(domains))
	if after != 0 {
		domain = w.held[after].domain
	} else {
		e.Adapter, e.Salt = domains[domain].Adapter, domains[domain].Salt
	}
	for range n {
		content := uint64(rng.IntN(5))
		h := (after*0x9e3779b97f4a7c15 ^ content + uint64(domain)*77 + 1) * 0xd1342543de82ef95
		h |= 1
		b := w.held[h]
		if b == nil {
			b = &engineBlock{parent: after, domain: domain, tokens: contentTokens(h, w.size)}
			w.held[h] = b
			w.hashes = append(w.hashes, h)
		}
		b.copies++
		e.Hashes = append(e.Hashes, h)
		e.Tokens = append(e.Tokens, b.tokens...)
		after = h
	}
	w.Apply(&e)
	return after
}

func contentTokens(seed uint64, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		seed ^= seed << 13
		seed ^= seed >> 7
		seed ^= seed << 17
		out[i] = uint32(seed >> 40)
	}
	return out
}

func (w *engineWorld) drop(h uint64) {
	w.held[h].copies--
	w.Apply(&blocktable.Event{Op: blocktable.OpRemove, Hashes: []uint64{h}})
}

func (w *engineWorld) live() (n int) {
	for _, b := range w.held {
		n += min(b.copies, 1)
	}
	return n
}

func (w *engineWorld) step(rng *rand.Rand) {
	op, live := rng.IntN(100), w.live()
	switch {
	case live == 0 || op < 25 && live < engineMost: // a prompt, in pieces or whole
		after := w.pick(rng, false)
		if rng.IntN(4) == 0 {
			after = 0
		}
		for range 1 + rng.IntN(3) {
			after = w.store(rng, after, 1+rng.IntN(2+1500/w.size))
		}
	case op < 50 && live < engineMost: // an answer grows
		if h := w.pick(rng, true); h != 0 {
			w.store(rng, h, 1)
		}
	case op < 75: // the engine evicts from an end
		for h := w.pick(rng, true); h != 0 && rng.IntN(8) != 0; {
			parent := w.held[h].parent
			for w.held[h].copies > 0 {
				w.drop(h)
			}
			if h = parent; h != 0 && w.hasChildren(h) {
				break
			}
		}
	case op < 85: // and sometimes from the middle, which leaves a hole
		if h := w.pick(rng, false); h != 0 {
			for w.held[h].copies > 0 {
				w.drop(h)
			}
		}
	case op < 92: // one copy of several
		if h := w.pick(rng, false); h != 0 && w.held[h].copies > 1 {
			w.drop(h)
		}
	case op < 99: // a hole is filled again
		for _, h := range w.hashes {
			b := w.held[h]
			if b.copies > 0 || b.parent != 0 && !w.attached(b.parent) {
				continue
			}
			b.copies++
			e := blocktable.Event{Op: blocktable.OpStore, Spec: blocktable.SpecFull, BlockTokens: int32(w.size), Parent: b.parent, HasParent: b.parent != 0, Hashes: []uint64{h}, Tokens: b.tokens}
			if b.parent == 0 {
				e.Adapter, e.Salt = domains[b.domain].Adapter, domains[b.domain].Salt
			}
			w.Apply(&e)
			break
		}
	default:
		w.Apply(&blocktable.Event{Op: blocktable.OpClear})
		for _, b := range w.held {
			b.copies = 0
		}
		w.held, w.hashes = map[uint64]*engineBlock{}, nil
	}
}

// coordinator is a decoder behind a bad line.
type coordinator struct {
	r     *recorder
	d     *summary.Decoder
	queue [][]byte
}

func (c *coordinator) restart(prefer ...prefix.ClusterKey) {
	c.r = newRecorder()
	c.d = summary.NewDecoder(c.r)
	c.d.RequireKeys(prefer...)
}

// take applies one frame and checks that nothing is applied twice or out of
// order, and that a snapshot blinds nobody.
func (c *coordinator) take(b []byte) (summary.Result, error) {
	clear(c.r.vanished)
	before := maps.Clone(c.r.keys)
	epoch, seq, ok := c.d.Have()
	got, err := c.d.Apply(b)
	if err != nil {
		return got, fmt.Errorf("good frame refused: %w", err)
	}
	isSnapshot := b[1]&15 == 2
	newEpoch, newSeq, newOK := c.d.Have()
	switch got {
	case summary.Applied:
		if !isSnapshot && (!ok || epoch != newEpoch || newSeq != seq+1) {
			return got, fmt.Errorf("went from seq %d to %d", seq, newSeq)
		}
		if !newOK {
			return got, fmt.Errorf("applied, but Have is not sure")
		}
	case summary.DigestMismatch:
		return got, fmt.Errorf("digest mismatch on an honest stream")
	default:
		if !maps.Equal(before, c.r.keys) || newSeq != seq || newEpoch != epoch {
			return got, fmt.Errorf("%v changed something", got)
		}
	}
	if isSnapshot {
		for k := range c.r.vanished {
			if c.r.keys[k] > 0 {
				return got, fmt.Errorf("snapshot took away and gave back the key at %d", k.Depth)
			}
		}
	}
	return got, c.r.err
}

// agent is an encoder and what it tells of.
type agent struct {
	w     world
	e     *summary.Encoder
	epoch uint32
	keys  []prefix.ClusterKey
	// skip, if set, swallows a call: the oracle must notice.
	skip func(id uint32) bool
}

func (a *agent) restart() {
	a.epoch += 1000
	a.e = summary.NewEncoder(summary.Options{Key: a.keys[0], Blocks: a.w, Epoch: a.epoch, ReplayBytes: 4 << 10})
	if err := a.e.SetKeys(a.keys...); err != nil {
		panic(err)
	}
	a.w.listen(saboteur{a.e, a})
}

// saboteur hides a detachment from the encoder if the test asks for it.
type saboteur struct {
	*summary.Encoder
	a *agent
}

func (s saboteur) Detached(id uint32) {
	if s.a.skip == nil || !s.a.skip(id) {
		s.Encoder.Detached(id)
	}
}

// deltas returns the frames of a moment.
func (a *agent) deltas(now time.Time) (frames [][]byte) {
	for b := a.e.Delta(now); b != nil; b = a.e.Delta(now) {
		frames = append(frames, b)
	}
	return frames
}

// pull asks the encoder for what is missing.
func (c *coordinator) pull(e *summary.Encoder, snapshot bool) [][]byte {
	if epoch, seq, ok := c.d.Have(); ok && epoch == e.Epoch() && !snapshot {
		if frames, ok := e.Replay(seq); ok {
			return frames
		}
	}
	return e.Snapshot()
}

// send puts a frame on the line: lost, once, twice, or before the last one.
func (c *coordinator) send(rng *rand.Rand, b []byte) {
	switch n := len(c.queue); rng.IntN(10) {
	case 0:
	case 1:
		c.queue = append(c.queue, b, b)
	case 2:
		c.queue = append(c.queue, b)
		if n > 0 {
			c.queue[n-1], c.queue[n] = c.queue[n], c.queue[n-1]
		}
	default:
		c.queue = append(c.queue, b)
	}
}
