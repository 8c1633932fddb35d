package summary

import (
	"time"

	"waypost/gossip/prefix"
)

const (
	// DefaultHeartbeat is how long an unchanged stream stays silent.
	DefaultHeartbeat = time.Second
	// DefaultReplayBytes bounds the frames kept for a replay.
	DefaultReplayBytes = 64 << 10
)

// Options configure an [Encoder].
type Options struct {
	// Key is the cluster key that prefix keys are made with.
	Key prefix.ClusterKey
	// Blocks is the table that the encoder listens to.
	Blocks Blocks
	// Epoch marks the life of this stream. It must differ from the epoch of the
	// former encoder of the same rank; a process mark or a random number will do.
	Epoch uint32
	// Heartbeat is how long an unchanged stream stays silent; 0: DefaultHeartbeat.
	Heartbeat time.Duration
	// ReplayBytes bounds the frames kept for a replay; 0: DefaultReplayBytes.
	ReplayBytes int
}

// Encoder turns the changes of one block table into one stream of frames. It
// implements [Listener]. It is not safe for concurrent use; whoever drives the
// table drives it too.
type Encoder struct {
	ends
	heartbeat time.Duration
	keyID     uint32
	epoch     uint32
	seq       uint64
	clear     bool // everything was forgotten since the last delta
	last      time.Time
	replay    ring
}

var _ Listener = (*Encoder)(nil)

// NewEncoder returns the encoder of an empty table.
func NewEncoder(o Options) *Encoder {
	if o.Heartbeat <= 0 {
		o.Heartbeat = DefaultHeartbeat
	}
	if o.ReplayBytes <= 0 {
		o.ReplayBytes = DefaultReplayBytes
	}
	return &Encoder{
		ends:      ends{key: o.Key, blocks: o.Blocks, set: newAnnouncedSet()},
		heartbeat: o.Heartbeat,
		keyID:     o.Key.IDUint32(),
		epoch:     o.Epoch,
		replay:    ring{limit: o.ReplayBytes},
	}
}

// Epoch is the epoch of the stream.
func (e *Encoder) Epoch() uint32 { return e.epoch }

// Seq is the number of the latest frame; 0: none yet.
func (e *Encoder) Seq() uint64 { return e.seq }

// Keys is the number of keys that the stream tells.
func (e *Encoder) Keys() int { return e.set.onWire }

// Cleared implements Listener.
func (e *Encoder) Cleared() {
	e.clear = e.clear || e.seq > 0
	e.ends.cleared()
}

// maxDeltaEntries keeps a delta below MaxFrameBytes.
const maxDeltaEntries = (MaxFrameBytes - 64) / entryMax

// Delta returns the next frame of the stream: all changes since the former one,
// or as many as a frame may hold. It returns nil if there is nothing to tell:
// no change, and a frame within the heartbeat. The caller sends the frame to
// all coordinators and must not change it.
func (e *Encoder) Delta(now time.Time) []byte {
	age := e.settle(now)
	removes, adds := e.set.take(maxDeltaEntries)
	changed := e.clear || len(removes)+len(adds) > 0
	if !changed && e.seq > 0 && now.Sub(e.last) < e.heartbeat {
		return nil
	}
	if changed && e.seq > 0 {
		age = max(age, now.Sub(e.last)) // the change came at some time since
	}
	e.seq++
	h := e.header(kindDelta)
	h.ageMs = wholeMs(age)
	if e.clear {
		h.flags = flagClear
	}
	e.clear = false
	e.last = now
	b := make([]byte, 0, 32+len(removes)*keyBytes+len(adds)*entryMax)
	b = appendEntries(appendKeys(appendHeader(b, h), removes), adds)
	e.replay.push(e.seq, b)
	return b
}

func (e *Encoder) header(kind frameKind) header {
	return header{kind: kind, keyID: e.keyID, epoch: e.epoch, seq: e.seq, digest: e.set.digest}
}

// snapshotEntries is the number of entries per snapshot frame.
const snapshotEntries = maxDeltaEntries

// Snapshot returns frames that together equal the stream up to its latest
// delta, whose seq they carry; at least one frame, each at most MaxFrameBytes.
func (e *Encoder) Snapshot() [][]byte {
	entries := e.set.told()
	var frames [][]byte
	for first := true; first || len(entries) > 0; first = false {
		n := min(len(entries), snapshotEntries)
		h := e.header(kindSnapshot)
		h.part = uint64(len(frames))
		if n == len(entries) {
			h.flags = flagLast
		}
		b := appendHeader(make([]byte, 0, 32+n*entryMax), h)
		frames = append(frames, appendEntries(b, entries[:n]))
		entries = entries[n:]
	}
	return frames
}

// Replay returns the frames after haveSeq, oldest first; none if haveSeq is the
// latest. It reports false if they are no longer kept or haveSeq is not of this
// stream; then only a snapshot helps.
func (e *Encoder) Replay(haveSeq uint64) ([][]byte, bool) {
	if haveSeq > e.seq {
		return nil, false
	}
	return e.replay.after(haveSeq, e.seq)
}

// ring keeps the latest frames within a limit of bytes.
type ring struct {
	limit  int
	bytes  int
	first  uint64 // seq of frames[0]
	frames [][]byte
}

func (r *ring) push(seq uint64, b []byte) {
	if len(r.frames) == 0 {
		r.first = seq
	}
	r.frames = append(r.frames, b)
	r.bytes += len(b)
	drop := 0
	for ; r.bytes > r.limit; drop++ {
		r.bytes -= len(r.frames[drop])
		r.frames[drop] = nil
	}
	r.frames = r.frames[drop:]
	r.first += uint64(drop)
}

// after returns the frames after have up to latest.
func (r *ring) after(have, latest uint64) ([][]byte, bool) {
	if have == latest {
		return nil, true
	}
	if len(r.frames) == 0 || have+1 < r.first {
		return nil, false
	}
	return append([][]byte(nil), r.frames[have+1-r.first:]...), true
}
