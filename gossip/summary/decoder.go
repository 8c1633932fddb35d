package summary

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"waypost/gossip/prefix"
)

// Sink is where a decoder writes the keys of one rank. Each key is added once
// until it is removed.
type Sink interface {
	// Add tells that the prefix named k, depthTokens long, is held and that a
	// match may end there.
	Add(k prefix.Key, depthTokens uint32)
	// Remove takes back an Add, or an AddResident.
	Remove(k prefix.Key)
	// Reset takes back all of them.
	Reset()
}

// ResidentSink is a Sink that wants to know as well of checkpoints at which no
// match may end although everything up to there is held: the engine's blocks
// end elsewhere, or a window group lacks them. They lead a search to the ends
// behind them. A plain Sink is told ends only.
type ResidentSink interface {
	Sink
	// AddResident tells that a prefix is held at which no match may end.
	AddResident(k prefix.Key, depthTokens uint32)
	// SetEnd changes whether a match may end at an added key.
	SetEnd(k prefix.Key, end bool)
}

// Result is what became of a frame.
type Result uint8

// The results of Decoder.Apply.
const (
	// Applied: the sink now equals the stream at the frame's seq.
	Applied Result = iota + 1
	// Duplicate: the frame was known already; nothing changed.
	Duplicate
	// Gap: frames are missing before this one, or its stream is a new one.
	// Nothing changed; ask for a replay from Have, or for a snapshot.
	Gap
	// Snapshotting: a part of a snapshot was taken; the sink changes when the
	// last one comes.
	Snapshotting
	// DigestMismatch: both sides disagree about the set. A delta was applied
	// nevertheless, a snapshot was not; ask for a snapshot.
	DigestMismatch
)

// String names the result.
func (r Result) String() string {
	switch r {
	case Applied:
		return "applied"
	case Duplicate:
		return "duplicate"
	case Gap:
		return "gap"
	case Snapshotting:
		return "snapshotting"
	case DigestMismatch:
		return "digest mismatch"
	}
	return "no result"
}

// Decoder applies the stream of one rank to a sink: each frame once and in
// order. Its memory is at most about 16 times the bytes of the frames that
// built its set, and MaxKeys bounds the set. It is not safe for concurrent use.
type Decoder struct {
	sink      Sink
	residents ResidentSink // nil: ends only
	keyID     uint32
	checkKey  bool

	have    bool // set equals the stream at (epoch, seq)
	epoch   uint32
	seq     uint64
	former  uint32 // epoch before this one
	streams int    // epochs seen, counted up to 2
	set     keySet
	age     time.Duration

	building *building
}

// building is a snapshot of which parts are missing.
type building struct {
	epoch  uint32
	seq    uint64
	digest uint32
	parts  uint64
	set    keySet
}

// NewDecoder returns a decoder that has seen nothing.
func NewDecoder(s Sink) *Decoder {
	d := &Decoder{sink: s, set: newKeySet()}
	d.residents, _ = s.(ResidentSink)
	return d
}

// RequireKey makes the decoder refuse frames made with another cluster key.
func (d *Decoder) RequireKey(k prefix.ClusterKey) {
	d.keyID, d.checkKey = k.IDUint32(), true
}

// Have tells which frame of which stream the sink equals. It reports false
// before the first snapshot and after a digest mismatch: then only a snapshot
// helps, and what the sink holds is the best known meanwhile.
func (d *Decoder) Have() (epoch uint32, seq uint64, ok bool) {
	return d.epoch, d.seq, d.have
}

// Keys is the number of keys held, those of the sink.
func (d *Decoder) Keys() int { return len(d.set.keys) }

// Age is how old the oldest fact in the latest applied frame was when the frame
// was built.
func (d *Decoder) Age() time.Duration { return d.age }

// Apply takes the next frame. An error wraps [ErrFrame] or [ErrKeyID]; then
// nothing changed.
func (d *Decoder) Apply(b []byte) (Result, error) {
	f, err := parse(b)
	if err != nil {
		return 0, err
	}
	if d.checkKey && f.keyID != d.keyID {
		return 0, fmt.Errorf("%w: frame of key id %08x, this side has %08x", ErrKeyID, byteOrder(f.keyID), byteOrder(d.keyID))
	}
	if d.streams > 1 && f.epoch == d.former && f.epoch != d.epoch {
		return Duplicate, nil
	}
	if f.kind == kindSnapshot {
		return d.applySnapshot(&f)
	}
	return d.applyDelta(&f)
}

// byteOrder turns an id as read from a frame into the number whose hex digits
// are the id as people see it.
func byteOrder(id uint32) uint32 {
	return id>>24 | id>>8&0xff00 | id<<8&0xff0000 | id<<24
}

func (d *Decoder) applyDelta(f *frame) (Result, error) {
	switch {
	case !d.have || f.epoch != d.epoch || f.seq > d.seq+1:
		return Gap, nil
	case f.seq <= d.seq:
		return Duplicate, nil
	}
	if f.flags&flagClear != 0 {
		d.set.reset()
		d.sink.Reset()
	}
	f.eachRemove(func(k prefix.Key) {
		if e, ok := d.set.remove(k); ok {
			d.sinkRemove(e)
		}
	})
	f.eachAdd(func(e entry) {
		if len(d.set.keys) < MaxKeys && d.set.add(e) {
			d.sinkAdd(e)
		}
	})
	d.seq, d.age = f.seq, f.age()
	if d.set.digest != f.digest {
		d.have = false
		return DigestMismatch, nil
	}
	return Applied, nil
}

func (d *Decoder) applySnapshot(f *frame) (Result, error) {
	if d.have && f.epoch == d.epoch && f.seq <= d.seq {
		d.building = nil
		return Duplicate, nil
	}
	if f.part == 0 {
		d.building = &building{epoch: f.epoch, seq: f.seq, digest: f.digest, set: newKeySet()}
	}
	n := d.building
	if n == nil || n.epoch != f.epoch || n.seq != f.seq || n.digest != f.digest || n.parts != f.part {
		d.building = nil
		return Gap, nil
	}
	n.parts++
	if len(n.set.keys)+f.addCount > MaxKeys {
		d.building = nil
		return 0, fmt.Errorf("%w: snapshot: more than %d keys", ErrFrame, MaxKeys)
	}
	f.eachAdd(func(e entry) { n.set.add(e) })
	if f.flags&flagLast == 0 {
		return Snapshotting, nil
	}
	d.building = nil
	if n.set.digest != n.digest {
		return DigestMismatch, nil
	}
	d.swap(n.set)
	if d.streams == 0 || f.epoch != d.epoch {
		d.former, d.streams = d.epoch, min(d.streams+1, 2)
	}
	d.have, d.epoch, d.seq = true, f.epoch, f.seq
	d.age = f.age()
	return Applied, nil
}

// swap turns the old set into the new one at the sink by the difference only,
// additions first: what both hold is never missing.
func (d *Decoder) swap(to keySet) {
	var adds, removes []entry
	for k, v := range to.keys {
		old, ok := d.set.keys[k]
		switch {
		case !ok:
			adds = append(adds, v.entry(k))
		case old.end != v.end:
			d.sinkSetEnd(v.entry(k))
		}
	}
	for k, v := range d.set.keys {
		if _, ok := to.keys[k]; !ok {
			removes = append(removes, v.entry(k))
		}
	}
	slices.SortFunc(adds, compareEntries)
	slices.SortFunc(removes, func(a, b entry) int { return cmp.Compare(b.depth, a.depth) })
	for _, e := range adds {
		d.sinkAdd(e)
	}
	for _, e := range removes {
		d.sinkRemove(e)
	}
	d.set = to
}

func (d *Decoder) sinkAdd(e entry) {
	switch {
	case e.end:
		d.sink.Add(e.key, e.depth)
	case d.residents != nil:
		d.residents.AddResident(e.key, e.depth)
	}
}

func (d *Decoder) sinkRemove(e entry) {
	if e.end || d.residents != nil {
		d.sink.Remove(e.key)
	}
}

func (d *Decoder) sinkSetEnd(e entry) {
	switch {
	case d.residents != nil:
		d.residents.SetEnd(e.key, e.end)
	case e.end:
		d.sink.Add(e.key, e.depth)
	default:
		d.sink.Remove(e.key)
	}
}

// keySet is a set of entries with its digest.
type keySet struct {
	keys   map[prefix.Key]keyValue
	digest uint32
}

type keyValue struct {
	depth uint32
	end   bool
}

func (v keyValue) entry(k prefix.Key) entry { return entry{key: k, depth: v.depth, end: v.end} }

func newKeySet() keySet { return keySet{keys: map[prefix.Key]keyValue{}} }

// add reports false if the key is there already.
func (s *keySet) add(e entry) bool {
	if _, dup := s.keys[e.key]; dup {
		return false
	}
	s.keys[e.key] = keyValue{e.depth, e.end}
	s.digest += e.mix()
	return true
}

// remove reports false if the key is not there.
func (s *keySet) remove(k prefix.Key) (entry, bool) {
	v, ok := s.keys[k]
	if !ok {
		return entry{}, false
	}
	delete(s.keys, k)
	s.digest -= v.entry(k).mix()
	return v.entry(k), true
}

func (s *keySet) reset() {
	clear(s.keys)
	s.digest = 0
}
