package mesh

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Sketch is the newest small message of a member.
type Sketch struct {
	Name string
	Seq  uint64
	// Received is when it came here, less the time that it lay with a member who
	// handed it on; by this process's clock.
	Received time.Time
	Payload  []byte // must not be changed
}

// Wire form of a sketch: kind byte, version byte, u32 life of the origin, u64
// seq, name length byte, name, payload.
const (
	kindSketch    = 1
	sketchVersion = 1
	sketchHead    = 1 + 1 + 4 + 8 + 1
	maxNameBytes  = 128 // identity.CheckName's bound
)

// ErrSketchTooBig: a sketch must fit one packet.
var ErrSketchTooBig = errors.New("sketch does not fit one packet")

var errSketch = errors.New("malformed sketch")

type sketchFrame struct {
	name    string
	life    uint32
	seq     uint64
	payload []byte
}

func (f sketchFrame) encode() []byte {
	b := make([]byte, sketchHead, sketchHead+len(f.name)+len(f.payload))
	b[0], b[1] = kindSketch, sketchVersion
	binary.BigEndian.PutUint32(b[2:], f.life)
	binary.BigEndian.PutUint64(b[6:], f.seq)
	b[14] = byte(len(f.name))
	b = append(b, f.name...)
	return append(b, f.payload...)
}

// decodeSketch copies what it keeps: the library reuses its buffers.
func decodeSketch(b []byte) (sketchFrame, error) {
	if len(b) < sketchHead || b[0] != kindSketch || b[1] != sketchVersion {
		return sketchFrame{}, errSketch
	}
	n := int(b[14])
	if n == 0 || n > maxNameBytes || len(b) < sketchHead+n {
		return sketchFrame{}, errSketch
	}
	return sketchFrame{
		life: binary.BigEndian.Uint32(b[2:]), seq: binary.BigEndian.Uint64(b[6:]),
		name: string(b[sketchHead : sketchHead+n]), payload: append([]byte(nil), b[sketchHead+n:]...),
	}, nil
}

// sketchBroadcast is a queued sketch; a newer one of the same origin replaces it.
type sketchBroadcast struct {
	name string
	wire []byte
}

var _ memberlist.NamedBroadcast = sketchBroadcast{}

// Invalidates implements memberlist.Broadcast.
func (b sketchBroadcast) Invalidates(other memberlist.Broadcast) bool {
	o, ok := other.(memberlist.NamedBroadcast)
	return ok && o.Name() == b.name
}

// Message implements memberlist.Broadcast.
func (b sketchBroadcast) Message() []byte { return b.wire }

// Finished implements memberlist.Broadcast.
func (sketchBroadcast) Finished() {}

// Name implements memberlist.NamedBroadcast.
func (b sketchBroadcast) Name() string { return b.name }

// sketchStore keeps the newest sketch per origin. The order of sketches is that
// of their numbers within one life of the origin; which life is the present one
// the member list says. Sketches of a new life may arrive before its
// announcement, so two lives are kept until it is clear which one is over.
type sketchStore struct {
	limit int

	mu     sync.Mutex
	latest map[string][]storedSketch // one or two per origin
}

type storedSketch struct {
	life     uint32
	seq      uint64
	received time.Time // as in Sketch
	came     time.Time // to this process
	payload  []byte
}

func newSketchStore(limit int) *sketchStore {
	return &sketchStore{limit: limit, latest: map[string][]storedSketch{}}
}

// take keeps a sketch of some age if it is news. present is the origin's life by
// the member list; known is false when the list does not have it (yet).
func (s *sketchStore) take(f sketchFrame, age time.Duration, present uint32, known bool, now time.Time) (news bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fresh := storedSketch{f.life, f.seq, now.Add(-age), now, f.payload}
	kept, have := s.latest[f.name]
	if !have && len(s.latest) >= s.limit {
		return false
	}
	for i, k := range kept {
		if k.life == f.life {
			if f.seq <= k.seq {
				return false
			}
			kept[i] = fresh
			return true
		}
	}
	if len(kept) < 2 {
		s.latest[f.name] = append(kept, fresh)
		return true
	}
	// The one that is not of the present life makes room, else the older one.
	out := 0
	if known && kept[0].life == present || !(known && kept[1].life == present) && kept[1].came.Before(kept[0].came) {
		out = 1
	}
	kept[out] = fresh
	return true
}

// keep drops the sketches that are not wanted.
func (s *sketchStore) keep(wanted func(name string, life uint32, came time.Time) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, kept := range s.latest {
		kept = slices.DeleteFunc(kept, func(k storedSketch) bool { return !wanted(name, k.life, k.came) })
		if len(kept) == 0 {
			delete(s.latest, name)
		} else {
			s.latest[name] = kept
		}
	}
}

// all returns the sketches whose life is the present one.
func (s *sketchStore) all(life func(name string) (uint32, bool)) []Sketch {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Sketch
	for name, kept := range s.latest {
		present, ok := life(name)
		for _, k := range kept {
			if ok && k.life == present {
				out = append(out, Sketch{name, k.seq, k.received, k.payload})
			}
		}
	}
	return out
}

// Members that exchange their whole state over a stream hand over sketches, too:
// to one that joins all there are, else the newest ones, which make up for
// packets that were lost. In small fleets, where a message has few copies, these
// are all; in large ones hardly a member misses all copies.
const (
	maxStateBytes    = 1 << 20
	maxExchangeBytes = 16 << 10
)

// stateHead is what stands before each frame of a state: u16 length, u32 age in
// milliseconds.
const stateHead = 2 + 4

// state packs the newest sketches for another member, up to limit bytes. Each
// carries its age, so that going through other hands does not make it younger.
func (s *sketchStore) state(limit int, now time.Time) []byte {
	type named struct {
		name string
		storedSketch
	}
	var newest []named
	s.mu.Lock()
	for name, kept := range s.latest {
		for _, k := range kept {
			newest = append(newest, named{name, k})
		}
	}
	s.mu.Unlock()
	slices.SortFunc(newest, func(a, b named) int { return b.received.Compare(a.received) })
	var b []byte
	for _, k := range newest {
		frame := sketchFrame{k.name, k.life, k.seq, k.payload}.encode()
		if len(b)+stateHead+len(frame) > limit {
			break
		}
		age := min(max(now.Sub(k.received), 0)/time.Millisecond, math.MaxUint32)
		b = binary.BigEndian.AppendUint16(b, uint16(len(frame)))
		b = binary.BigEndian.AppendUint32(b, uint32(age))
		b = append(b, frame...)
	}
	return b
}

// unpackState calls take for each sketch of a packed state.
func unpackState(b []byte, take func(f sketchFrame, age time.Duration)) error {
	for len(b) > 0 {
		if len(b) < stateHead || len(b) < stateHead+int(binary.BigEndian.Uint16(b)) {
			return fmt.Errorf("%w: state cut short", errSketch)
		}
		end := stateHead + int(binary.BigEndian.Uint16(b))
		f, err := decodeSketch(b[stateHead:end])
		if err != nil {
			return err
		}
		take(f, time.Duration(binary.BigEndian.Uint32(b[2:]))*time.Millisecond)
		b = b[end:]
	}
	return nil
}
