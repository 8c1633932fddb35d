package summary

import (
	"errors"
	"fmt"
	"time"

	"waypost/gossip/prefix"
)

const (
	// DefaultHeartbeat is how long an unchanged stream stays silent.
	DefaultHeartbeat = time.Second
	// DefaultReplayBytes bounds the frames kept for a replay.
	DefaultReplayBytes = 64 << 10
	// DefaultBudgetBytesPerSec is five times what a busy worker needs.
	DefaultBudgetBytesPerSec = 1000
)

// Options configure an [Encoder].
type Options struct {
	// Key is the cluster key that prefix keys are made with.
	Key prefix.ClusterKey
	// Blocks is the table that the encoder listens to.
	Blocks Blocks
	// Keyed says that Blocks tells prefix keys under Key in place of chain
	// values: whoever made them knows no others. Such a stream serves that one
	// key.
	Keyed bool
	// Epoch marks the numbering of runs in this stream. It must differ from the
	// epoch of the former encoder of the same rank; a process mark or a random
	// number will do. It rises when the encoder renumbers.
	Epoch uint32
	// Heartbeat is how long an unchanged stream stays silent; 0: DefaultHeartbeat.
	Heartbeat time.Duration
	// ReplayBytes bounds the frames kept for a replay; 0: DefaultReplayBytes.
	ReplayBytes int
	// BudgetBytesPerSec is the rate above which the stream tells less, later; 0:
	// DefaultBudgetBytesPerSec, negative: none. It yields to correctness: forks,
	// deletes and clears are never left out.
	BudgetBytesPerSec int
}

// Encoder turns the changes of one block table into one stream of frames, the
// same for all coordinators. It implements [TierListener]. It is not safe for
// concurrent use; whoever drives the table drives it too.
type Encoder struct {
	forest
	keyed     bool
	told      []told // one per cluster key, the primary first
	wanted    []prefix.ClusterKey
	heartbeat time.Duration
	epoch     uint32
	seq       uint64
	clear     bool      // everything was forgotten since the last delta
	broken    bool      // an operation did not fit what was told
	last      time.Time // of the latest frame
	replay    ring
	budget    budget
	body      []byte // of the frame being built
	work      int    // that it costs to apply
	at        uint32 // run of the latest operation
	before    uint32 // of the one before
	stats     Stats
	heat      []uint64 // of runs, and
	order     []uint32 // runs, while HotRoots ranks them
}

// told is what the stream has told under one cluster key.
type told struct {
	key    prefix.ClusterKey
	id     uint32
	tree   tree
	keyers []domainKeyer // by domain
}

// domainKeyer is the keyer of one generation of a domain.
type domainKeyer struct {
	keyer      *prefix.Keyer
	generation uint32
}

var _ TierListener = (*Encoder)(nil)

// NewEncoder returns the encoder of an empty table.
func NewEncoder(o Options) *Encoder {
	if o.Heartbeat <= 0 {
		o.Heartbeat = DefaultHeartbeat
	}
	if o.ReplayBytes <= 0 {
		o.ReplayBytes = DefaultReplayBytes
	}
	if o.BudgetBytesPerSec == 0 {
		o.BudgetBytesPerSec = DefaultBudgetBytesPerSec
	}
	return &Encoder{
		forest:    newForest(o.Blocks),
		keyed:     o.Keyed,
		told:      []told{{key: o.Key, id: o.Key.IDUint32()}},
		wanted:    []prefix.ClusterKey{o.Key},
		heartbeat: o.Heartbeat,
		epoch:     o.Epoch,
		replay:    ring{limit: o.ReplayBytes},
		budget:    budget{bytesPerSec: float64(o.BudgetBytesPerSec)},
	}
}

// ErrKeys reports a list of cluster keys that a stream cannot serve.
var ErrKeys = errors.New("a stream serves one cluster key, or two during a rotation")

// SetKeys makes the stream serve other cluster keys, from the frame after the
// next delta on: two during a rotation, one before and after. The stream goes on
// for who follows a key that stays. The error wraps [ErrKeys].
func (e *Encoder) SetKeys(keys ...prefix.ClusterKey) error {
	if e.keyed && (len(keys) != 1 || keys[0] != e.told[0].key) {
		return fmt.Errorf("%w: of this one prefixes are known by one key only", ErrKeys)
	}
	if len(keys) == 0 || len(keys) > maxClusterKeys || len(keys) == 2 && keys[0] == keys[1] {
		return fmt.Errorf("%w: got %d, or one twice", ErrKeys, len(keys))
	}
	e.wanted = append(e.wanted[:0], keys...)
	return nil
}

// Epoch is the epoch of the stream.
func (e *Encoder) Epoch() uint32 { return e.epoch }

// Seq is the number of the latest frame; 0: none yet.
func (e *Encoder) Seq() uint64 { return e.seq }

// Keys is the number of keys that the stream tells.
func (e *Encoder) Keys() int { return e.told[0].tree.keys }

// EachKey calls do for every key that the stream tells under its primary
// cluster key, a key told twice twice. branch marks points at which runs fork.
func (e *Encoder) EachKey(do func(k HeldKey, x Extent, branch bool)) { e.told[0].tree.eachKey(do) }

// Stats counts what an encoder did since it was made.
type Stats struct {
	Frames, Bytes uint64
	// Extends … Tiers count operations.
	Extends, Forks, Trims, Deletes, Usables, Tiers, Clears uint64
	// Compactions counts renumberings, each of which began a new epoch.
	Compactions uint64
	// Restarts counts new epochs because the table broke its contract.
	Restarts uint64
	// Runs, Keys and Slots are present numbers; Slots is the highest run number
	// in use and one.
	Runs, Keys, Slots int
	// Pressure is how much the budget holds back now: 0 nothing, 1 half of the
	// runs that nothing ever continued, 2 and 3 intervals of 2 and 5 s as well.
	Pressure int
}

// Stats returns the counters.
func (e *Encoder) Stats() Stats {
	s := e.stats
	t := &e.told[0].tree
	s.Runs, s.Keys, s.Slots, s.Pressure = t.live, t.keys, t.slots(), int(e.budget.level)
	return s
}

// Collisions is the number of keys that the stream tells more than once at
// present: chance, or several copies of one prefix.
func (e *Encoder) Collisions() int { return e.told[0].tree.collisions() }

// Collisions is Encoder.Collisions at the other end.
func (d *Decoder) Collisions() int { return d.tree.collisions() }

func (t *tree) collisions() (n int) {
	seen := make(map[IndexKey]struct{}, t.keys)
	for _, m := range t.all(nil) {
		if _, dup := seen[m.key]; dup {
			n++
		}
		seen[m.key] = struct{}{}
	}
	return n
}

// Cleared implements Listener.
func (e *Encoder) Cleared() {
	e.clear = e.clear || e.told[0].tree.live > 0
	e.forest.cleared()
}

// Delta returns the next frame of the stream: all changes since the former one,
// or as many as a frame may hold. It returns nil if there is nothing to tell:
// no change, and a frame within the heartbeat, or a longer interval under
// pressure. The caller sends the frame to all coordinators and must not change it.
func (e *Encoder) Delta(now time.Time) []byte {
	if e.seq > 0 && !e.clear && now.Sub(e.last) < e.budget.interval() {
		return nil
	}
	age := e.settle(now)
	cleared := e.clear
	whole := e.build()
	changed := cleared || len(e.body) > 0
	if !changed && e.seq > 0 && now.Sub(e.last) < e.heartbeat {
		e.renew(whole)
		return nil
	}
	if changed && e.seq > 0 {
		age = max(age, now.Sub(e.last)) // the change came at some time since
	}
	e.seq++
	h := e.header(kindDelta)
	h.ageMs = wholeMs(age)
	if cleared {
		h.flags = flagClear
	}
	b := append(appendHeader(make([]byte, 0, headerMax+len(e.body)), h), e.body...)
	e.replay.push(e.seq, b)
	e.stats.Frames++
	e.stats.Bytes += uint64(len(b))
	if e.budget.spend(now, e.last, len(b)) {
		e.uncut()
	}
	e.last = now
	e.renew(whole)
	return b
}

// renew begins what the frames after this one carry: another set of cluster
// keys, another numbering.
func (e *Encoder) renew(whole bool) {
	if whole {
		e.rekey()
	}
	if t := &e.told[0].tree; t.slots() > mostSlots(t.live) {
		e.compact()
	}
}

func (e *Encoder) header(kind frameKind) header {
	h := header{kind: kind, keys: len(e.told), epoch: e.epoch, seq: e.seq}
	for i := range e.told {
		h.keyIDs[i], h.digests[i] = e.told[i].id, e.told[i].tree.digest
	}
	return h
}

// Snapshot returns frames that together equal the stream up to its latest
// delta, whose seq they carry; at least one frame, each at most MaxFrameBytes.
// What was used last comes first.
func (e *Encoder) Snapshot() [][]byte {
	trees := make([]*tree, len(e.told))
	for i := range e.told {
		trees[i] = &e.told[i].tree
	}
	heat := make([]uint64, trees[0].slots())
	for i := range e.runs {
		if r := &e.runs[i]; r.number != 0 {
			heat[r.number] = r.touched
		}
	}
	return snapshotFrames(e.header(kindSnapshot), trees, heat)
}

// Replay returns the frames after haveSeq, oldest first; none if haveSeq is the
// latest. It reports false if they are no longer kept or haveSeq is not of this
// stream; then only a snapshot helps. haveSeq belongs to the present epoch.
func (e *Encoder) Replay(haveSeq uint64) ([][]byte, bool) {
	if haveSeq > e.seq {
		return nil, false
	}
	return e.replay.after(haveSeq, e.seq)
}
