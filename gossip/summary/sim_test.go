package summary_test

import (
	"bufio"
	"bytes"
	"container/heap"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/gossip/summary"
)

// This file replays the Mooncake conversation trace against simulated engines
// that work as vLLM does: blocks of 16 tokens, a request's blocks freed tail
// first into a least-recently-used queue, prompts computed in steps of 2,048
// tokens at 20,000 tokens/s in order of arrival, one token of an answer every
// 25 ms, answers cached. A router sends each request to the worker with the
// least queued and new prefill tokens. Engine events feed real block tables.

const (
	simBlock       = 16
	simBlocks      = 32768
	simPerID       = 512 / simBlock
	simStepTokens  = 2048
	simTokenPerSec = 20_000
	simDecode      = 25 * time.Millisecond
	simSpeedup     = 9  // of the trace's time, for 16 workers
	simWorkers     = 16 // the sample plays on fewer, at the same load for each
)

// request is one line of the trace.
type request struct {
	Timestamp int64   `json:"timestamp"` // ms
	Input     int     `json:"input_length"`
	Output    int     `json:"output_length"`
	IDs       []int64 `json:"hash_ids"`
}

// conversationTrace reads the whole trace if it is at hand, else the sample, and
// says which.
func conversationTrace(tb testing.TB) (reqs []request, name string, workers int) {
	tb.Helper()
	name, workers = "testdata/mooncake_conversation_head.jsonl", 2
	if dir := sharedDir(tb); dir != "" {
		if whole := filepath.Join(dir, "traces", "mooncake_fast25_conversation.jsonl"); fileExists(whole) {
			name, workers = whole, simWorkers
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		tb.Fatal(err)
	}
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		var r request
		if err := json.Unmarshal(sc.Bytes(), &r); err != nil {
			tb.Fatal(err)
		}
		reqs = append(reqs, r)
	}
	return reqs, filepath.Base(name), workers
}

// sharedDir finds the folder of whole recordings: WAYPOST_SHARED, or shared
// beside the repository.
func sharedDir(tb testing.TB) string {
	if d := os.Getenv("WAYPOST_SHARED"); d != "" {
		return d
	}
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	for ; filepath.Dir(dir) != dir; dir = filepath.Dir(dir) {
		if fileExists(filepath.Join(dir, "go.mod")) {
			return filepath.Join(filepath.Dir(dir), "shared")
		}
	}
	return ""
}

func fileExists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// simEvent is something that happens at a time.
type simEvent struct {
	at time.Duration
	n  int // order of events at one time
	do func(now time.Duration)
}

type simQueue []simEvent

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].n < q[j].n
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simQueue) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}

// simulation is one run over a trace.
type simulation struct {
	queue   simQueue
	events  int
	now     time.Duration
	workers []*simWorker
	share   map[int64]int // how many blocks the children of an id have in common
	rng     *rand.Rand
	answers uint64
}

func (s *simulation) at(t time.Duration, do func(now time.Duration)) {
	s.events++
	heap.Push(&s.queue, simEvent{t, s.events, do})
}

// simWorker is one engine and its agent.
type simWorker struct {
	s         *simulation
	blocks    map[uint64]*simCached
	oldest    simCached // ring of free blocks, next to evict first
	queued    int       // prefill tokens that wait or run
	busyUntil time.Duration
	emit      func(e *blocktable.Event) // to whom events go
	stored    int
	evicted   int
}

// simCached is one block of an engine.
type simCached struct {
	hash       uint64
	users      int
	prev, next *simCached // among the free ones
}

// blocksOf names the blocks of a prompt. Ids are names of whole prefixes;
// siblings have some leading blocks in common, so that prompts part anywhere.
func (s *simulation) blocksOf(r *request) []uint64 {
	var out []uint64
	parent := int64(-1)
	for _, id := range r.IDs {
		common, ok := s.share[parent]
		if !ok {
			common = s.rng.IntN(simPerID)
			s.share[parent] = common
		}
		for j := range simPerID {
			owner := uint64(id)<<1 + 1
			if j < common {
				owner = uint64(parent+1) << 1
			}
			out = append(out, (owner*simPerID+uint64(j))*0x9e3779b97f4a7c15|1)
		}
		parent = id
	}
	return out[:min(len(out), r.Input/simBlock)]
}

func simTokens(dst []uint32, hash uint64) []uint32 {
	for range simBlock {
		hash ^= hash << 13
		hash ^= hash >> 7
		hash ^= hash << 17
		dst = append(dst, uint32(hash>>45))
	}
	return dst
}

func (w *simWorker) match(blocks []uint64) int {
	for i, h := range blocks {
		if w.blocks[h] == nil {
			return i
		}
	}
	return len(blocks)
}

// hold takes a block out of the free ring.
func (w *simWorker) hold(b *simCached) {
	if b.users++; b.users == 1 && b.next != nil {
		b.prev.next, b.next.prev = b.next, b.prev
		b.prev, b.next = nil, nil
	}
}

func (w *simWorker) release(b *simCached) {
	if b.users--; b.users == 0 {
		last := w.oldest.prev
		b.prev, b.next = last, &w.oldest
		last.next, w.oldest.prev = b, b
	}
}

// store makes room for blocks and announces them as one event.
func (w *simWorker) store(after uint64, hashes []uint64) []*simCached {
	e := blocktable.Event{Op: blocktable.OpStore, Spec: blocktable.SpecFull, BlockTokens: simBlock, Parent: after, HasParent: after != 0}
	var held []*simCached
	for _, h := range hashes {
		b := w.blocks[h]
		if b == nil {
			for len(w.blocks) >= simBlocks && w.oldest.next != &w.oldest {
				w.evict()
			}
			b = &simCached{hash: h}
			w.blocks[h] = b
			w.stored++
			e.Hashes = append(e.Hashes, h)
			e.Tokens = simTokens(e.Tokens, h)
		} else if len(e.Hashes) == 0 {
			e.Parent, e.HasParent = h, true
		}
		w.hold(b)
		held = append(held, b)
	}
	if len(e.Hashes) > 0 {
		w.emit(&e)
	}
	return held
}

func (w *simWorker) evict() {
	b := w.oldest.next
	b.prev.next, b.next.prev = b.next, b.prev
	delete(w.blocks, b.hash)
	w.evicted++
	w.emit(&blocktable.Event{Op: blocktable.OpRemove, Hashes: []uint64{b.hash}})
}

// serve plays one request on a worker.
func (w *simWorker) serve(now time.Duration, r *request, blocks []uint64) {
	w.queued += (len(blocks) - w.match(blocks)) * simBlock
	w.s.at(max(now, w.busyUntil), func(now time.Duration) { w.prefill(now, r, blocks) })
	w.busyUntil = max(now, w.busyUntil) + time.Duration(len(blocks)-w.match(blocks))*simBlock*time.Second/simTokenPerSec
}

func (w *simWorker) prefill(now time.Duration, r *request, blocks []uint64) {
	hit := w.match(blocks)
	var held []*simCached
	for _, h := range blocks[:hit] {
		w.hold(w.blocks[h])
		held = append(held, w.blocks[h])
	}
	var step func(now time.Duration)
	done := hit
	step = func(now time.Duration) {
		n := min(simStepTokens/simBlock, len(blocks)-done)
		if n > 0 {
			after := uint64(0)
			if done > 0 {
				after = blocks[done-1]
			}
			held = append(held, w.store(after, blocks[done:done+n])...)
			done += n
			w.queued -= min(w.queued, n*simBlock)
		}
		if done < len(blocks) {
			next := min(simStepTokens, (len(blocks)-done)*simBlock)
			w.s.at(now+time.Duration(next)*time.Second/simTokenPerSec, step)
			return
		}
		w.decode(now, r, held)
	}
	first := min(simStepTokens, (len(blocks)-hit)*simBlock)
	w.s.at(now+time.Duration(first)*time.Second/simTokenPerSec, step)
}

func (w *simWorker) decode(now time.Duration, r *request, held []*simCached) {
	left := (r.Input%simBlock + r.Output) / simBlock
	inBlock := r.Input % simBlock
	var grow func(now time.Duration)
	grow = func(now time.Duration) {
		if left == 0 {
			for i := len(held) - 1; i >= 0; i-- {
				w.release(held[i])
			}
			return
		}
		left--
		w.s.answers++
		after := uint64(0)
		if len(held) > 0 {
			after = held[len(held)-1].hash
		}
		held = append(held, w.store(after, []uint64{(w.s.answers | 1<<63) * 0x9e3779b97f4a7c15})...)
		w.s.at(now+simBlock*simDecode, grow)
	}
	w.s.at(now+time.Duration(simBlock-inBlock)*simDecode, grow)
}

// simulate plays a trace. each is called once a second of virtual time.
func simulate(reqs []request, workers int, emit func(worker int) func(*blocktable.Event), each func(now time.Duration, s *simulation)) {
	playTrace(newSimulation(), reqs, workers, emit, each)
}

func newSimulation() *simulation {
	return &simulation{share: map[int64]int{}, rng: rand.New(rand.NewPCG(7, 8))}
}

func playTrace(s *simulation, reqs []request, workers int, emit func(worker int) func(*blocktable.Event), each func(now time.Duration, s *simulation)) {
	for i := range workers {
		w := &simWorker{s: s, blocks: map[uint64]*simCached{}, emit: emit(i)}
		w.oldest.prev, w.oldest.next = &w.oldest, &w.oldest
		s.workers = append(s.workers, w)
	}
	scale := float64(simSpeedup) * float64(workers) / simWorkers
	var last time.Duration
	for i := range reqs {
		r := &reqs[i]
		// The trace tells time in steps of 3 s.
		at := time.Duration((float64(r.Timestamp) + s.rng.Float64()*3000) / scale * float64(time.Millisecond))
		last = max(last, at)
		s.at(at, func(now time.Duration) {
			blocks := s.blocksOf(r)
			var best *simWorker
			least := 0
			for _, w := range s.workers {
				if cost := w.queued + (len(blocks)-w.match(blocks))*simBlock; best == nil || cost < least {
					best, least = w, cost
				}
			}
			best.serve(now, r, blocks)
		})
	}
	for t := time.Second; t <= last; t += time.Second {
		s.at(t, func(now time.Duration) { each(now, s) })
	}
	for len(s.queue) > 0 {
		e := heap.Pop(&s.queue).(simEvent)
		if e.at > last {
			break
		}
		s.now = e.at
		e.do(e.at)
	}
}

// streamFigures is what the streams of all workers come to.
type streamFigures struct {
	bytesPerSec, framesPerSec float64 // per worker
	storedPerSec              float64
	snapshotBits              float64 // per block held
	replayBytes               float64 // of 10 s
	runs, blocksPerRun        float64
	ops                       summary.Stats
	seconds                   float64
	decoderBytes              float64 // of heap per block held
}

// discard is a sink that keeps nothing.
type discard struct{ calls int }

func (d *discard) Begin()                                                           {}
func (d *discard) End()                                                             {}
func (d *discard) AddCheckpoint(k, parent summary.IndexKey, depth uint32)           { d.calls++ }
func (d *discard) AddPoint(k, at summary.IndexKey, depth uint32, branch bool)       { d.calls++ }
func (d *discard) RemoveCheckpoint(k, parent summary.IndexKey, depth uint32)        { d.calls++ }
func (d *discard) RemovePoint(k, at summary.IndexKey, depth uint32, branch bool)    { d.calls++ }
func (d *discard) SetBranch(k, at summary.IndexKey, depth uint32)                   { d.calls++ }
func (d *discard) SetExtent(k, at summary.IndexKey, depth uint32, x summary.Extent) { d.calls++ }
func (d *discard) Reset()                                                           { d.calls++ }

// measureStreams plays a trace with a block table and an encoder per worker and
// measures after the first 30 %.
func measureStreams(tb testing.TB, reqs []request, workers int, key func(w int) summary.Options) streamFigures {
	tb.Helper()
	var tables []*blocktable.Table
	var encoders []*summary.Encoder
	var decoders []*summary.Decoder
	begin := make([]summary.Stats, workers)
	var storedBefore int
	var f streamFigures
	var from, total time.Duration
	scale := float64(simSpeedup) * float64(workers) / simWorkers
	total = time.Duration(float64(reqs[len(reqs)-1].Timestamp)/scale) * time.Millisecond
	snapshots, replays := 0, 0
	emit := func(int) func(*blocktable.Event) {
		t := blocktable.New(blocktable.Options{Model: "m", MaxBlocks: simBlocks, ExpectBlocks: simBlocks})
		o := key(len(tables))
		o.Blocks = t
		e := summary.NewEncoder(o)
		t.Listen(e)
		d := summary.NewDecoder(&discard{})
		mustApply(tb, d, e.Snapshot())
		tables, encoders, decoders = append(tables, t), append(encoders, e), append(decoders, d)
		return t.Apply
	}
	simulate(reqs, workers, emit, func(now time.Duration, s *simulation) {
		measuring := now >= total*3/10
		if measuring && from == 0 {
			from = now
			for i, e := range encoders {
				begin[i] = e.Stats()
				storedBefore += s.workers[i].stored
			}
		}
		f.seconds = (now - from).Seconds()
		f.storedPerSec = -float64(storedBefore)
		for i, e := range encoders {
			if b := e.Delta(start.Add(now)); b != nil {
				mustApply(tb, decoders[i], [][]byte{b})
			}
			f.storedPerSec += float64(s.workers[i].stored)
			if !measuring || int(now/time.Second)%20 != 0 {
				continue
			}
			size := 0
			for _, b := range e.Snapshot() {
				size += len(b)
			}
			f.snapshotBits += float64(size) * 8 / float64(tables[i].Len())
			f.decoderBytes += float64(decoders[i].MemoryBytes()) / float64(tables[i].Len())
			f.runs += float64(e.Stats().Runs)
			f.blocksPerRun += float64(tables[i].Len()) / float64(e.Stats().Runs)
			snapshots++
			if frames, ok := e.Replay(e.Seq() - 10); ok {
				for _, b := range frames {
					f.replayBytes += float64(len(b))
				}
				replays++
			}
		}
	})
	per := f.seconds * float64(workers)
	f.storedPerSec /= per
	f.snapshotBits /= float64(snapshots)
	f.runs /= float64(snapshots)
	f.decoderBytes /= float64(snapshots)
	f.blocksPerRun /= float64(snapshots)
	f.replayBytes /= float64(replays)
	for i, e := range encoders {
		s := e.Stats()
		f.bytesPerSec += float64(s.Bytes-begin[i].Bytes) / per
		f.framesPerSec += float64(s.Frames-begin[i].Frames) / per
		f.ops.Extends += s.Extends - begin[i].Extends
		f.ops.Forks += s.Forks - begin[i].Forks
		f.ops.Trims += s.Trims - begin[i].Trims
		f.ops.Deletes += s.Deletes - begin[i].Deletes
		f.ops.Compactions += s.Compactions - begin[i].Compactions
	}
	return f
}

func mustApply(tb testing.TB, d *summary.Decoder, frames [][]byte) {
	for i, b := range frames {
		got, err := d.Apply(b)
		if err != nil || got != summary.Applied && got != summary.Snapshotting {
			tb.Fatalf("frame %d of %d: %v, %v", i, len(frames), got, err)
		}
	}
}

// tape is what one engine announced, and when.
type tape struct {
	events []blocktable.Event
	at     []time.Duration
	blocks int // block events
}

// recordTape records the events of the first worker.
func recordTape(reqs []request, workers int) *tape {
	t := &tape{}
	s := newSimulation()
	playTrace(s, reqs, workers, func(i int) func(*blocktable.Event) {
		if i != 0 {
			return func(*blocktable.Event) {}
		}
		return func(e *blocktable.Event) {
			t.events, t.at = append(t.events, *e), append(t.at, s.now)
			t.blocks += len(e.Hashes)
		}
	}, func(time.Duration, *simulation) {})
	return t
}
