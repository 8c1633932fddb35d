package placement

import (
	"hash/maphash"
	"math"

	"waypost/gossip/ledger"
)

// Board holds the workers of a pool laid out for a bounded search: what a
// lower bound of a worker's cost needs stands side by side and is kept up to
// date one worker at a time. The zero value is an empty board.
//
// It is not safe for concurrent use, except that any number of Decide calls
// may run while nothing changes it.
type Board struct {
	rows []row
	// ends, less now, are at most the starts of a prefill, less the decode part of
	// the worker's own steps. They alone put most rows beyond a bound, and stand
	// apart so that few lines of memory are read for that.
	ends    []float64
	cold    []coldRow
	workers []*Worker
	at      []int32 // by slot: position + 1; 0: not here
	classes []stepClass
	classAt map[classKey]int32
	freed   []int32
	errors  errorSum
	pulling int // rows with a connector
	outputs outputSum
	roles   int // workers that serve a part of a request only
	// groups are the rows taken blockRows at a time, alike what makes twins of
	// them.
	groups []rowGroup
	alike  []alikeRows
	// names are the hashes of the names after firstMix. Rows that have twins stand before the
	// others, so that whole groups of them are alike: idle counts them.
	names []uint64
	idle  int
	// largestBlock is at least the largest KV block of all workers, in tokens.
	largestBlock int32
}

// row is what the first pass over all workers reads: times are on the
// coordinator's clock, sums are lower bounds.
type row struct {
	// decodeMs is the decode part of a step.
	decodeMs float64
	// live is a lower bound of the live requests.
	live float64
	// gapMs is a lower bound of a new request's gap.
	gapMs float64
	// seenMs is when the worker was last heard of, or since when it is away.
	seenMs    float64
	class     int32
	maxTokens int32 // a prompt must be shorter
	id        WorkerID
	block     int32 // tokens per KV block, at least 1
	reason    Reason
	flags     rowFlags
	unknown   unknownFacts
}

// rowGroup is the least of each number of some rows: if even a row made of these
// costs too much, none of them needs a look.
type rowGroup struct {
	endMs, decodeMs, live, gapMs, seenMs float64
	class, maxTokens                     int32
	// block is the size of all rows' KV blocks, 1 if they differ.
	block int32
	// plain says that all rows are of the class, heard of, without a reason
	// against them and with all facts known.
	plain bool
	// even says that the rows' KV blocks are of one size and no cache is unseen.
	even bool
}

// alikeRows is what the rows of a group have in common.
type alikeRows struct {
	// twin is that of all rows, 0: they are not alike; view marks what is known
	// of their caches, 0: that differs. idleMs and loadMs are from when on nothing
	// waits anywhere, and the oldest load report.
	twin, view     uint64
	idleMs, loadMs float64
}

// regroup makes the group of a row anew.
func (b *Board) regroup(i int) {
	k := i / blockRows
	from := k * blockRows
	if from >= len(b.rows) {
		b.groups, b.alike = b.groups[:k], b.alike[:k]
		return
	}
	if k == len(b.groups) {
		b.groups, b.alike = append(b.groups, rowGroup{}), append(b.alike, alikeRows{})
	}
	part := b.rows[from:min(from+blockRows, len(b.rows))]
	r := &part[0]
	c := &b.cold[from]
	g := rowGroup{b.ends[from], r.decodeMs, r.live, r.gapMs, r.seenMs, r.class, r.maxTokens, r.block, true, true}
	a := alikeRows{c.twin, c.mark, c.idleMs, c.loadMs}
	for i := range part {
		r := &part[i]
		g.endMs, g.decodeMs, g.live = min(g.endMs, b.ends[from+i]), min(g.decodeMs, r.decodeMs), min(g.live, r.live)
		g.gapMs, g.seenMs, g.maxTokens = min(g.gapMs, r.gapMs), min(g.seenMs, r.seenMs), min(g.maxTokens, r.maxTokens)
		g.plain = g.plain && r.class == g.class && r.reason == ReasonNone && r.unknown == 0 && r.flags&rowAway == 0
		c := &b.cold[from+i]
		if c.twin != a.twin || math.IsNaN(c.idleMs) || math.IsNaN(c.loadMs) {
			a.twin = 0
		}
		if c.mark != a.view {
			a.view = 0
		}
		if r.block != g.block {
			g.block, g.even = 1, false
		}
		g.even = g.even && r.flags&rowBlind == 0
		a.idleMs, a.loadMs = max(a.idleMs, c.idleMs), min(a.loadMs, c.loadMs)
	}
	b.groups[k], b.alike[k] = g, a
}

// coldRow is read for few workers only.
type coldRow struct {
	// twin is equal for workers that cost the same while they have nothing to
	// do; 0: it has no twin.
	twin   uint64
	idleMs float64 // from when on nothing waits
	loadMs float64
	view   View
	mark   uint64 // the view's and the host tier's
}

// mark is equal for equal views, and never 0.
func (v *View) mark() uint64 {
	key := rendezvous(uint64(v.Kind), math.Float64bits(v.AtMs))
	return rendezvous(rendezvous(key, math.Float64bits(v.Trust)), math.Float64bits(v.EvictionAgeMs)) | 1
}

// holdingMark is equal for workers that see and read back alike what they hold.
func (w *Worker) holdingMark() uint64 {
	mark := w.View.mark()
	if h := w.Host; h != nil {
		mark = rendezvous(rendezvous(mark, math.Float64bits(h.BytesPerToken)), math.Float64bits(h.BytesPerMs)) | 1
	}
	return mark
}

type rowFlags uint8

const (
	rowAway rowFlags = 1 << iota
	rowBarred
	rowBlind
	rowPulls
)

// unknownFacts are the facts of a worker for which the mean of the others is
// taken.
type unknownFacts uint8

const (
	unknownQueue unknownFacts = 1 << iota
	unknownLive
	unknownGap
	unknownRoom
)

// unknowns are the facts that are not known of a worker.
func unknowns(w *Worker) (u unknownFacts) {
	if !w.QueueKnown {
		u |= unknownQueue
	}
	if math.IsNaN(w.Live) {
		u |= unknownLive
	}
	if math.IsNaN(w.Decoding) || math.IsNaN(w.ContextTokens) {
		u |= unknownGap
	}
	if !(w.PoolBlocks > 0 && w.BlockTokens > 0 && !math.IsNaN(w.HeldBlocks)) && !(w.MaxRunning > 0 && !math.IsNaN(w.Live)) {
		u |= unknownRoom
	}
	return u
}

// stepClass is a step model that rows share: what a prefill costs by it is
// computed once per decision.
type stepClass struct {
	steps ledger.Steps
	rows  int
}

type classKey struct {
	model  ledger.StepModel
	budget int
}

// Len is the number of workers.
func (b *Board) Len() int { return len(b.workers) }

// Has reports whether a slot's worker is here.
func (b *Board) Has(id WorkerID) bool { return b.position(id) >= 0 }

// Workers are the workers, in no order that means anything. The slice is valid
// until the board changes and must not be changed.
func (b *Board) Workers() []*Worker { return b.workers }

// MeanOutputTokens is the mean of the mean answers that workers report; NaN:
// none does.
func (b *Board) MeanOutputTokens() float64 {
	if b.outputs.known == 0 {
		return math.NaN()
	}
	return float64(b.outputs.milli) / 1000 / float64(b.outputs.known)
}

// outputSum sums mean answers in whole thousandths of a token, so that the
// order of changes leaves no trace.
type outputSum struct {
	milli int64
	known int
}

func (o *outputSum) add(w *Worker, times int64) {
	if w.MeanOutputTokens >= 1 {
		o.milli += times * int64(min(w.MeanOutputTokens, MaxOutputTokens)*1000)
		o.known += int(times)
	}
}

// position is where a worker stands; -1: nowhere.
func (b *Board) position(id WorkerID) int {
	if int(id) >= len(b.at) {
		return -1
	}
	return int(b.at[id]) - 1
}

// Set adds a worker, or replaces the one in its slot.
func (b *Board) Set(w *Worker) {
	i := b.position(w.ID)
	if i < 0 {
		if grow := int(w.ID) + 1 - len(b.at); grow > 0 {
			b.at = append(b.at, make([]int32, grow)...)
		}
		i = len(b.workers)
		b.at[w.ID] = int32(i) + 1
		b.rows, b.cold, b.workers, b.names = append(b.rows, row{}), append(b.cold, coldRow{}), append(b.workers, w), append(b.names, 0)
		b.ends = append(b.ends, 0)
		b.rows[i].class = b.classOf(&w.Steps)
	} else {
		b.forget(i)
		if old := &b.classes[b.rows[i].class].steps; old.BudgetTokens() != w.Steps.BudgetTokens() || old.Model() != w.Steps.Model() {
			b.release(b.rows[i].class)
			b.rows[i].class = b.classOf(&w.Steps)
		}
	}
	b.workers[i] = w
	b.fill(i, w)
	switch idle := b.cold[i].twin != 0; {
	case idle && i >= b.idle:
		b.swap(i, b.idle)
		b.idle++
	case !idle && i < b.idle:
		b.idle--
		b.swap(i, b.idle)
	default:
		b.regroup(i)
	}
}

// swap changes the places of two rows.
func (b *Board) swap(i, j int) {
	if i != j {
		b.rows[i], b.rows[j] = b.rows[j], b.rows[i]
		b.ends[i], b.ends[j] = b.ends[j], b.ends[i]
		b.cold[i], b.cold[j] = b.cold[j], b.cold[i]
		b.workers[i], b.workers[j] = b.workers[j], b.workers[i]
		b.names[i], b.names[j] = b.names[j], b.names[i]
		b.at[b.workers[i].ID], b.at[b.workers[j].ID] = int32(i)+1, int32(j)+1
	}
	b.regroup(i)
	if i/blockRows != j/blockRows {
		b.regroup(j)
	}
}

// Remove takes a worker out; one that is not there is no mistake.
func (b *Board) Remove(id WorkerID) {
	i := b.position(id)
	if i < 0 {
		return
	}
	b.forget(i)
	b.release(b.rows[i].class)
	if i < b.idle {
		b.idle--
		b.swap(i, b.idle)
		i = b.idle
	}
	last := len(b.workers) - 1
	b.swap(i, last)
	b.at[id] = 0
	b.workers[last] = nil
	b.rows, b.cold, b.workers, b.names = b.rows[:last], b.cold[:last], b.workers[:last], b.names[:last]
	b.ends = b.ends[:last]
	b.regroup(last)
}

// forget takes a row out of the sums; its class stays counted.
func (b *Board) forget(i int) {
	b.errors.add(b.workers[i], -1)
	b.outputs.add(b.workers[i], -1)
	if b.workers[i].Role != RoleWhole {
		b.roles--
	}
	if b.rows[i].flags&rowPulls != 0 {
		b.pulling--
	}
}

// fill writes the row of a worker.
func (b *Board) fill(i int, w *Worker) {
	m := w.Steps.Model()
	r := row{
		decodeMs: w.Steps.DecodeMs(), live: w.OpenClaims, seenMs: w.LoadAtMs, maxTokens: math.MaxInt32,
		class: b.rows[i].class, id: w.ID, block: int32(max(w.BlockTokens, 1)), unknown: unknowns(w),
	}
	// A request that joins the open step saves that step's base and decode part.
	b.ends[i] = w.Waiting.F
	if w.Waiting.K > 0 {
		b.ends[i] -= m.P0Ms + r.decodeMs
	}
	if !math.IsNaN(w.Live) {
		r.live = w.Live
	}
	r.gapMs = m.DecodeMs(positive(w.Decoding)+1, positive(w.ContextTokens), float64(w.PoolBlocks)*float64(w.BlockTokens))
	if r.unknown&unknownGap != 0 {
		r.gapMs = 0
	}
	if !math.IsNaN(w.AwaySinceMs) {
		r.flags, r.seenMs = rowAway, w.AwaySinceMs
	}
	if math.IsNaN(r.seenMs) {
		r.seenMs = math.Inf(-1)
	}
	if w.MaxModelTokens > 0 {
		r.maxTokens = int32(min(w.MaxModelTokens, math.MaxInt32))
	}
	if r.reason = w.Barred; r.reason != ReasonNone {
		r.flags |= rowBarred
	} else {
		r.reason = w.Doubted
	}
	if w.View.Kind == ViewBlind {
		r.flags |= rowBlind
	}
	if w.Transfer != nil && w.Transfer.Connector != "" {
		r.flags |= rowPulls
		b.pulling++
	}
	b.names[i] = firstMix(w.hash())
	c := coldRow{idleMs: w.Waiting.F, loadMs: w.LoadAtMs, view: w.View, mark: w.holdingMark()}
	// Workers with live requests differ in their contexts anyway.
	if r.live == 0 && r.unknown == 0 && r.reason == ReasonNone && r.flags&(rowAway|rowPulls) == 0 {
		c.twin = twinOf(w, r.class)
	}
	b.errors.add(w, 1)
	b.outputs.add(w, 1)
	if w.Role != RoleWhole {
		b.roles++
	}
	b.largestBlock = max(b.largestBlock, r.block)
	b.rows[i], b.cold[i] = r, c
}

// twinSeed makes the hash of twins.
var twinSeed = maphash.MakeSeed()

// twinOf hashes all facts that the price of a request without reuse depends
// on while nothing waits and the report is fresh.
func twinOf(w *Worker, class int32) uint64 {
	return maphash.Comparable(twinSeed, struct {
		class                                 int32
		pool, block, running                  int
		decode, decoding, context, live, held float64
		gap, claims, errorMs                  float64
		errorKnown, blind                     bool
	}{
		class, w.PoolBlocks, w.BlockTokens, w.MaxRunning,
		w.Steps.DecodeMs(), w.Decoding, w.ContextTokens, w.Live, known(w.HeldBlocks),
		known(w.GapMs), w.OpenClaims, known(w.ErrorMs),
		!math.IsNaN(w.ErrorMs), w.View.Kind == ViewBlind,
	}) | 1
}

// known is v, or a number no fact has if v is unknown: a NaN equals nothing.
func known(v float64) float64 {
	if math.IsNaN(v) {
		return -1
	}
	return v
}

// classOf is the class of a step model, counted.
func (b *Board) classOf(s *ledger.Steps) int32 {
	key := classKey{s.Model(), s.BudgetTokens()}
	if i, ok := b.classAt[key]; ok {
		b.classes[i].rows++
		return i
	}
	if b.classAt == nil {
		b.classAt = map[classKey]int32{}
	}
	// The decode part differs from row to row and is added there.
	class := stepClass{steps: ledger.NewSteps(key.model, key.budget, 0), rows: 1}
	i := int32(len(b.classes))
	if n := len(b.freed); n > 0 {
		i, b.freed = b.freed[n-1], b.freed[:n-1]
		b.classes[i] = class
	} else {
		b.classes = append(b.classes, class)
	}
	b.classAt[key] = i
	return i
}

// release counts a row of a class out.
func (b *Board) release(i int32) {
	c := &b.classes[i]
	if c.rows--; c.rows == 0 {
		delete(b.classAt, classKey{c.steps.Model(), c.steps.BudgetTokens()})
		b.freed = append(b.freed, i)
	}
}
