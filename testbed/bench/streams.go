package bench

import (
	"fmt"
	"math"
	"runtime"
	"time"

	"waypost/coordinator/prefixindex"
	"waypost/gossip/prefix"
	"waypost/testbed/workload"
)

// streamOptions say how one workload's streams are measured.
type streamOptions struct {
	name       string
	source     string // where the requests come from
	workers    int
	blocks     int
	durationMs float64
	warmUp     float64
	requests   []workload.Request
}

// Stream is what a workload costs on the wire and at the agents, and what is
// lost by it.
type Stream struct {
	Workload, Source string
	Workers          int
	Shape            Shape

	// SnapshotBits are per resident block.
	SnapshotBits float64
	// StreamBytes are per second and worker, with the share of the lane's
	// message; RawBytes those of the same changes as raw events with hashes of
	// 8 bytes, and RawWideBytes of 32.
	StreamBytes, RawBytes, RawWideBytes float64
	// AgentNs is processor time per block event, block table and encoder.
	AgentNs float64
	// Recovery is the mean of the bytes after a gap of 10 s, RecoveryMost the
	// most.
	Recovery     float64
	RecoveryMost int

	// Requests that were compared, and pairs of a request and a worker of which
	// truth or estimate is more than nothing.
	Requests, Pairs int
	// Summary is what the index says, Exact the exact list of the same age, and
	// Bloom a filter of 10 bits per block of the same age.
	Summary, Exact, Bloom Deviation
	// BloomBytes are per second and worker for the changes of a filter.
	BloomBytes float64
}

// Regret is the tokens per request beyond an exact list of the same age.
func (s *Stream) Regret() float64 { return s.Summary.Regret - s.Exact.Regret }

// GrossShare is the share of pairs more than 512 tokens off an exact list of the
// same age.
func (s *Stream) GrossShare() float64 { return float64(s.Summary.Gross) / float64(max(1, s.Pairs)) }

// Deviation is how an estimate differs from the truth.
type Deviation struct {
	// Regret is tokens per request beyond the cost of the best worker.
	Regret float64
	// Gross counts pairs more than 512 tokens off the exact list of the same
	// age, Over and Under those more than a block above or below it.
	Gross, Over, Under int
	// Absolute is blocks per pair off the truth.
	Absolute float64
}

// grossTokens is a gross error: more than a checkpoint's distance.
const grossTokens = prefix.ChunkTokens

const recoverySeconds = 10

// streamBench runs one workload with the production chain beside it.
type streamBench struct {
	opt       streamOptions
	out       Stream
	sim       *closed
	agents    []*agent
	receivers []*receiver
	index     *prefixindex.Index
	listed    *masks // the exact lists as of the latest tick
	blooms    []*bloom
	raw       rawEvents

	probe   prefix.Probe
	keyer   *prefix.Keyer
	matches []prefixindex.Match
	lengths [3][]int // blocks per worker: stream, exact list, Bloom
	lost    []uint64 // seq before the gap, per worker

	changes               [][]change
	agentTime             time.Duration
	events                int
	snapBits              float64
	snaps, replays, ticks int
	fault                 error
}

// change is a block that appeared at a worker or vanished.
type change struct {
	hash uint64
	held bool
}

func benchStreams(o streamOptions) (Stream, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b := newStreamBench(o)
	b.out.Shape = b.sim.run(o.requests)
	if b.fault != nil {
		return Stream{}, fmt.Errorf("%s: %w", o.name, b.fault)
	}
	b.finish()
	return b.out, nil
}

func newStreamBench(o streamOptions) *streamBench {
	b := &streamBench{opt: o, keyer: benchKeyer(), listed: newMasks(o.workers * o.blocks), index: prefixindex.New(prefixindex.Options{Seed: 1})}
	b.out.Workload, b.out.Source, b.out.Workers = o.name, o.source, o.workers
	b.sim = newClosed(closedOptions{
		workers: o.workers, blocks: o.blocks, durationMs: o.durationMs, warmUp: o.warmUp, tickMs: 1000,
		onTick: b.tick, onArrival: b.arrive,
	})
	b.changes = make([][]change, o.workers)
	b.lost = make([]uint64, o.workers)
	for w := range o.workers {
		b.agents = append(b.agents, newAgent(o.blocks, uint32(w+1)))
		b.receivers = append(b.receivers, newReceiver(b.index, w))
		b.blooms = append(b.blooms, newBloom(o.blocks))
		b.watch(w)
	}
	for i := range b.lengths {
		b.lengths[i] = make([]int, o.workers)
	}
	return b
}

// watch notes what appears at and vanishes from a worker, beside the truth.
func (b *streamBench) watch(w int) {
	e := b.sim.engines[w]
	appeared, vanished := e.appeared, e.vanished
	e.appeared = func(hash uint64) {
		appeared(hash)
		b.changes[w] = append(b.changes[w], change{hash, true})
	}
	e.vanished = func(hash uint64) {
		vanished(hash)
		b.changes[w] = append(b.changes[w], change{hash, false})
	}
}

// tick lets every worker report: its stream, and the references beside it.
func (b *streamBench) tick(now float64, counted bool) {
	if counted {
		b.ticks++
	}
	for w, e := range b.sim.engines {
		b.report(w, &e.tape, now, counted)
		b.reportReferences(w, &e.tape, counted)
	}
	if counted && b.ticks%recoverySeconds == 0 {
		b.sample()
	}
}

func (b *streamBench) report(w int, t *tape, now float64, counted bool) {
	began := threadCPU()
	frame := b.agents[w].apply(t, now)
	took := threadCPU() - began
	if counted {
		b.agentTime += took
		b.events += t.blocks
		b.out.StreamBytes += float64(loadShare(frame))
	}
	if b.fault == nil && frame != nil {
		b.fault = b.first(w, frame)
	}
}

// first applies a frame; a stream begins with a snapshot, as at a coordinator.
func (b *streamBench) first(w int, frame []byte) error {
	r := b.receivers[w]
	if _, _, ok := r.decoder.Have(); ok {
		return r.take(frame)
	}
	for _, f := range b.agents[w].encoder.Snapshot() {
		if err := r.take(f); err != nil {
			return err
		}
	}
	return nil
}

func (b *streamBench) reportReferences(w int, t *tape, counted bool) {
	for _, c := range b.changes[w] {
		if c.held {
			b.listed.set(c.hash, w)
			b.blooms[w].add(c.hash)
		} else {
			b.listed.clear(c.hash, w)
			b.blooms[w].remove(c.hash)
		}
	}
	b.changes[w] = b.changes[w][:0]
	size := b.blooms[w].send()
	if !counted {
		return
	}
	b.out.BloomBytes += float64(size)
	narrow, wide := b.raw.size(t)
	b.out.RawBytes += float64(narrow)
	b.out.RawWideBytes += float64(wide)
}

// sample measures what a snapshot costs, and a replay of the last 10 s.
func (b *streamBench) sample() {
	for w, a := range b.agents {
		b.snapBits += float64(8*framesShare(a.encoder.Snapshot())) / float64(max(1, a.table.Len()))
		b.snaps++
		if b.lost[w] != 0 {
			if frames, ok := a.encoder.Replay(b.lost[w]); ok {
				n := framesShare(frames)
				b.out.Recovery += float64(n)
				b.out.RecoveryMost = max(b.out.RecoveryMost, n)
				b.replays++
			} else if b.fault == nil {
				b.fault = fmt.Errorf("worker %d: no replay of %d s", w, recoverySeconds)
			}
		}
		b.lost[w] = a.encoder.Seq()
	}
}

// arrive compares what is known of a request with the truth.
func (b *streamBench) arrive(j *job, a *arrival) {
	if !a.counted {
		return
	}
	b.out.Requests++
	chain := j.hashes[:most(j.prompt)]
	b.estimate(j, len(chain))
	b.listed.matches(chain, b.lengths[1])
	for w, f := range b.blooms {
		b.lengths[2][w] = f.match(chain)
	}
	best := cost(a, a.truth, j.prompt, cheapest(a.queued, a.truth, j.prompt))
	for i, d := range []*Deviation{&b.out.Summary, &b.out.Exact, &b.out.Bloom} {
		d.Regret += float64(cost(a, a.truth, j.prompt, cheapest(a.queued, b.lengths[i], j.prompt)) - best)
	}
	for w, truth := range a.truth {
		if truth == 0 && b.lengths[0][w] == 0 {
			continue
		}
		b.out.Pairs++
		exact := b.lengths[1][w]
		b.out.Summary.count(b.lengths[0][w], exact, truth)
		b.out.Exact.count(exact, exact, truth)
		b.out.Bloom.count(b.lengths[2][w], exact, truth)
	}
}

// estimate asks the index, as a coordinator would, and rounds down to what the
// engine can reuse.
func (b *streamBench) estimate(j *job, most int) {
	b.probe.ResetTokens(j.tokens[:j.prompt], b.keyer)
	b.matches = b.index.Match(&b.probe, b.matches[:0])
	clear(b.lengths[0])
	for _, m := range b.matches {
		b.lengths[0][m.Worker] = min(int(m.Tokens)/blockTokens, most)
	}
}

// cost is the tokens that worker w computes before a request's first token.
func cost(a *arrival, match []int, prompt, w int) int {
	return a.queued[w] + prompt - match[w]*blockTokens
}

func (d *Deviation) count(estimate, exact, truth int) {
	d.Absolute += math.Abs(float64(estimate - truth))
	off := estimate - exact
	if max(off, -off)*blockTokens > grossTokens {
		d.Gross++
	}
	switch {
	case off > 1:
		d.Over++
	case off < -1:
		d.Under++
	}
}

// finish turns sums into means.
func (b *streamBench) finish() {
	o := &b.out
	perWorkerSecond := float64(b.ticks * b.opt.workers)
	for _, v := range []*float64{&o.StreamBytes, &o.RawBytes, &o.RawWideBytes, &o.BloomBytes} {
		*v /= perWorkerSecond
	}
	o.AgentNs = float64(b.agentTime.Nanoseconds()) / float64(b.events)
	o.SnapshotBits = b.snapBits / float64(b.snaps)
	o.Recovery /= float64(max(1, b.replays))
	for _, d := range []*Deviation{&o.Summary, &o.Exact, &o.Bloom} {
		d.Regret /= float64(max(1, o.Requests))
		d.Absolute /= float64(max(1, o.Pairs))
	}
}
