package bench

import (
	"fmt"
	"time"

	"waypost/agent/blocktable"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// benchModel is the served model of all simulated engines.
const benchModel = "bench"

// benchKey is the cluster key of all simulated parts.
var benchKey = prefix.ClusterKey{0: 1, 15: 2}

func benchKeyer() *prefix.Keyer { return prefix.NewKeyer(benchKey, prefix.Domain{Model: benchModel}) }

// epochStart is virtual time 0.
var epochStart = time.Unix(1_700_000_000, 0)

func virtual(ms float64) time.Time {
	return epochStart.Add(time.Duration(ms * float64(time.Millisecond)))
}

// agent is the production side of one worker's host: its block table and the
// encoder that listens to it.
type agent struct {
	table   *blocktable.Table
	encoder *summary.Encoder
}

func newAgent(blocks int, epoch uint32) *agent {
	t := blocktable.New(blocktable.Options{Model: benchModel, MaxBlocks: blocks + blocks/8, ExpectBlocks: blocks, PoolBlocks: blocks, Seed: uint64(epoch)})
	e := summary.NewEncoder(summary.Options{Key: benchKey, Blocks: t, Epoch: epoch})
	t.Listen(e)
	return &agent{table: t, encoder: e}
}

// apply mirrors a tape, batch by batch as an engine publishes it, and returns the
// next frame of the stream.
func (a *agent) apply(t *tape, now float64) []byte {
	from := 0
	for _, to := range t.batches {
		a.table.ApplyAll(t.events[from:to])
		from = to
	}
	return a.encoder.Delta(virtual(now))
}

// receiver is the production side of one worker at a coordinator.
type receiver struct{ decoder *summary.Decoder }

func newReceiver(x *prefixindex.Index, w int) *receiver {
	return &receiver{decoder: summary.NewDecoder(x.WorkerSink(prefixindex.WorkerID(w)))}
}

// take applies a frame that must fit.
func (r *receiver) take(frame []byte) error {
	switch got, err := r.decoder.Apply(frame); {
	case err != nil:
		return err
	case got != summary.Applied && got != summary.Snapshotting:
		return fmt.Errorf("frame of %d bytes: %v, although nothing was lost", len(frame), got)
	}
	return nil
}

// Bytes that a frame costs in the protobuf messages of a lane: the field's tag
// and length.
const (
	loadFieldTag   = 2 // WorkerLoad.prefix_frame, field 23
	framesFieldTag = 1 // PrefixFrames.frames, field 3
)

// loadShare is the bytes of a frame in a LOAD message; 0 for none.
func loadShare(frame []byte) int {
	if frame == nil {
		return 0
	}
	return loadFieldTag + varintLen(len(frame)) + len(frame)
}

// framesShare is the bytes of frames in PrefixFrames messages.
func framesShare(frames [][]byte) int {
	n := 0
	for _, f := range frames {
		n += framesFieldTag + varintLen(len(f)) + len(f)
	}
	return n
}

func varintLen(n int) int {
	l := 1
	for ; n >= 1<<7; n >>= 7 {
		l++
	}
	return l
}
