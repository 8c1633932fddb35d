package agent

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/lane"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

const (
	// pullsWaiting bounds the pulls of one lane that wait for their answer: a
	// coordinator has fewer under way. What does not fit is asked again.
	pullsWaiting = 256
	// pieceWithin is how long a lane may take to make room for a piece of an
	// answer.
	pieceWithin = 5 * time.Second
)

// keyIDs are the ids of the cluster keys that prefix streams serve.
func (a *Agent) keyIDs() []string {
	ids := make([]string, 0, len(a.prefixKeys))
	for _, k := range a.prefixKeys {
		ids = append(ids, k.ID())
	}
	return ids
}

// nextEpoch is the epoch of a new prefix stream. Deltas have only half of it:
// whoever follows the rank's former stream must not take the new one for that, and
// its first frames for known ones. It is never 0, which stands for none.
func (r *rank) nextEpoch() uint32 {
	if r.encoder == nil {
		return rand.Uint32() | 1
	}
	return max(r.encoder.Epoch()+1, 1)
}

// newEncoder begins a prefix stream.
func (r *rank) newEncoder(t *blocktable.Table) *summary.Encoder {
	e := summary.NewEncoder(summary.Options{Key: r.key, Blocks: t, Epoch: r.nextEpoch()})
	if len(r.rotated) > 0 {
		if err := e.SetKeys(append([]prefix.ClusterKey{r.key}, r.rotated...)...); err != nil {
			// The keys were read as one or two that differ.
			r.faults["keys_refused"]++
		}
	}
	r.told = frameAges{}
	return e
}

// agedFrames is the number of frames of which it is known how old what they tell
// is.
const agedFrames = 64

// frameAges knows how old the changes are that a reader of a prefix stream has
// not been told.
type frameAges struct {
	// dirty is when the oldest change since the latest frame happened; zero: there
	// was none.
	dirty  time.Time
	frames [agedFrames]agedFrame
}

// agedFrame is when the oldest change happened that a frame tells.
type agedFrame struct {
	epoch  uint32
	seq    uint64
	oldest time.Time
}

// changed notes a change of the cache.
func (f *frameAges) changed(b *engine.Batch) {
	at := b.Received.Add(-b.Age)
	if b.Replayed || b.Received.IsZero() {
		at = time.Now() // when it happened is not known; it is news here
	}
	if f.dirty.IsZero() || at.Before(f.dirty) {
		f.dirty = at
	}
}

// built notes a frame that tells all changes so far.
func (f *frameAges) built(epoch uint32, seq uint64, now time.Time) {
	if f.dirty.IsZero() || f.dirty.After(now) {
		f.dirty = now
	}
	f.frames[seq%agedFrames] = agedFrame{epoch, seq, f.dirty}
	f.dirty = time.Time{}
}

// untoldMs is the age in ms of the oldest change that frames after a position
// tell, or none does; nil: unknown.
func (f *frameAges) untoldMs(at position, latest uint64, now time.Time) *float64 {
	since := f.dirty
	if at.seq < latest {
		next := f.frames[(at.seq+1)%agedFrames]
		if next.epoch != at.epoch || next.seq != at.seq+1 {
			return nil
		}
		since = next.oldest
	}
	if since.IsZero() {
		return new(0.0)
	}
	return new(max(0, float64(now.Sub(since))/float64(time.Millisecond)))
}

// nextDelta builds the next frame of the stream. While a new mirror is built,
// what happens is not told.
func (r *rank) nextDelta(now time.Time) {
	since := r.told.dirty
	if r.encoder.Delta(now) != nil {
		r.told.built(r.encoder.Epoch(), r.encoder.Seq(), now)
		if r.beside != nil {
			r.told.dirty = since
		}
	}
}

// nextFrame returns the next frame of a rank's stream that the lane was not
// told, and the age of the oldest change that the lane does not know after it.
// One frame rides on each LOAD; a lane that fell behind catches up at the pace
// of LOAD, and what left the ring is asked for by the coordinator.
func (h *lanes) nextFrame(r *rank, told map[uint32]position, now time.Time) (frame []byte, untoldMs *float64) {
	if told == nil {
		return nil, nil
	}
	h.mu.Lock()
	at, ok := told[r.index]
	h.mu.Unlock()
	frame, at, untoldMs = r.frameAfter(at, ok, now)
	h.mu.Lock()
	told[r.index] = at
	h.mu.Unlock()
	return frame, untoldMs
}

// frameAfter returns the frame after a position, the position after it, and the
// age of the oldest change that is not told there. A position that is not of
// this stream is taken for one before the latest frame.
func (r *rank) frameAfter(at position, known bool, now time.Time) (frame []byte, next position, untoldMs *float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.encoder == nil {
		return nil, position{}, nil
	}
	epoch, seq := r.encoder.Epoch(), r.encoder.Seq()
	if !known || at.epoch != epoch || at.seq > seq {
		at = position{epoch, seq - min(seq, 1)}
	}
	if at.seq < seq {
		if frames, ok := r.encoder.Replay(at.seq); ok && len(frames) > 0 {
			frame, at.seq = frames[0], at.seq+1
		} else {
			at.seq = seq
		}
	}
	return frame, at, r.told.untoldMs(at, seq, now)
}

// startAnswers answers the pulls of a lane beside it, one at a time, until it is
// down. The caller holds h.mu.
func (h *lanes) startAnswers(l *lane.Lane) {
	pulls := make(chan *waypostv1.PrefixPull, pullsWaiting)
	h.pulls[l] = pulls
	h.a.tasks.Go(func() {
		for {
			select {
			case p := <-pulls:
				h.answerPull(l, p)
			case <-l.Done():
				return
			case <-h.a.ctx.Done():
				return
			}
		}
	})
}

// queuePull takes in a pull: reading goes on while it waits for its answer.
func (h *lanes) queuePull(l *lane.Lane, p *waypostv1.PrefixPull) {
	h.mu.Lock()
	pulls := h.pulls[l]
	h.mu.Unlock()
	select {
	case pulls <- p:
	default:
		h.a.log.Debug("pull dropped: too many wait for their answer", "coordinator", name(l), "index", p.GetIndex())
	}
}

// answerPull sends the frames a coordinator lacks, or a snapshot.
func (h *lanes) answerPull(l *lane.Lane, p *waypostv1.PrefixPull) {
	r := h.a.rank(p.GetIndex())
	if r == nil {
		return
	}
	h.resync(p, r)
	var frames [][]byte
	var process uint64
	ok := false
	if p.HaveSeq != nil {
		frames, process, ok = r.framesAfter(p.GetEpoch(), p.GetHaveSeq())
	}
	if !ok {
		frames, process, _, _ = r.snapshot()
	}
	h.send(l, r.index, process, frames, p.GetPullId())
}

// pieceBytes is the length up to which frames of an answer share a message. A
// LOAD that is due goes before the next message, and waits for one at most.
const pieceBytes = 32 << 10

// send writes prefix frames in pieces. An answer without frames says that
// nothing is missing.
func (h *lanes) send(l *lane.Lane, index uint32, process uint64, frames [][]byte, pullID uint32) {
	for {
		n, size := 0, 0
		for n < len(frames) && (n == 0 || size+len(frames[n]) <= pieceBytes) {
			size += len(frames[n])
			n++
		}
		msg := &waypostv1.PrefixFrames{Index: &index, EngineProcess: &process, PullId: &pullID, Frames: frames[:n], Last: proto.Bool(n == len(frames))}
		frames = frames[n:]
		ctx, cancel := context.WithTimeout(h.a.ctx, pieceWithin)
		err := l.SendWait(ctx, &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: msg}})
		cancel()
		if err != nil || len(frames) == 0 {
			// A lane that is down or stuck: the coordinator asks again.
			return
		}
	}
}
