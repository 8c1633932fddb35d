package summary

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"

	"waypost/gossip/prefix"
)

const (
	// SketchVersion is the first byte of every sketch that is written. Version 1,
	// which is read as well, had two numbers before the age: the order of sketches
	// is the mesh's to keep.
	SketchVersion = 2
	// MaxSketchBytes bounds a sketch; what the mesh has room for in a packet of
	// 1,200 bytes is a little less.
	MaxSketchBytes = 1200
	// LeastSketchBytes is the size that sketches have in large fleets.
	LeastSketchBytes = 110
	// MaxSketchWorkers bounds the workers of a host in a sketch.
	MaxSketchWorkers = 64
	// maxWorkerName bounds the name of a worker within its host, in bytes.
	maxWorkerName = 64
)

// ErrSketch reports bytes that are no sketch, or one that cannot be written.
var ErrSketch = errors.New("malformed sketch")

// Sketch is what the mesh spreads about a host: one self-contained packet, of
// which the mesh hands on the newest. It serves when no lane is up, and decides
// nothing then but what is worth trying.
type Sketch struct {
	// Age is how old the oldest fact in it was when it was built.
	Age time.Duration
	// KeyID is the id of the cluster key of the roots, as
	// [prefix.ClusterKey.IDUint32] tells it.
	KeyID uint32
	// Workers are the workers of the host.
	Workers []WorkerSketch
}

// WorkerSketch is one worker in a sketch.
type WorkerSketch struct {
	// Name names the worker within its host: engine/rank.
	Name  string
	State SketchState
	Load  LoadClass
	// Roots are the hottest prefixes that the worker holds, hottest first.
	Roots []Root
}

// Root is the name of a prefix that much else begins with.
type Root struct {
	Key         prefix.Key
	DepthTokens uint32
}

// SketchState is the state word of a worker.
type SketchState uint8

// The states.
const (
	SketchUnknown SketchState = iota
	SketchReady
	SketchStarting
	SketchStalled
	SketchLost
	SketchDraining
	SketchFaulty

	sketchStates = iota
)

var sketchWords = [sketchStates]string{"unknown", "ready", "starting", "stalled", "lost", "draining", "faulty"}

// String names the state.
func (s SketchState) String() string {
	if int(s) < len(sketchWords) {
		return sketchWords[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// LoadClass is a waiting time in powers of two: 0 is unknown, 1 below 1 ms, and
// c from 2^(c-2) to below 2^(c-1) ms.
type LoadClass uint8

const maxLoadClass = 32

// LoadClassOf gives the class of a waiting time in ms. A negative one and NaN
// are unknown.
func LoadClassOf(waitMs float64) LoadClass {
	switch {
	case waitMs >= math.MaxUint32:
		return maxLoadClass
	case waitMs >= 0:
		return LoadClass(bits.Len32(uint32(waitMs))) + 1
	}
	return 0
}

// BelowMs is the upper bound of the class in ms; false if the load is unknown.
func (c LoadClass) BelowMs() (waitMs float64, ok bool) {
	if c == 0 {
		return 0, false
	}
	return math.Ldexp(1, int(c)-1), true
}

// sketchDepth is the bound of a root's depth code.
const sketchDepth = MaxDepthTokens<<1 | 1

// AppendSketch writes a sketch of at most limit bytes: all workers with their
// states, then as many roots as fit, the hottest of every worker first. Only
// more workers than fit MaxSketchBytes make it longer than limit; what does not
// fit that either is an error that wraps [ErrSketch].
//
//	sketch := version u8 = 2 | key id 4 bytes | age_ms uv | workers uv | worker* | root*
//	worker := length of name u8 | name | state u8 | load class u8
//	root   := worker uv | length code of depth uv (see the frames) | key u64
func AppendSketch(dst []byte, s *Sketch, limit int) ([]byte, error) {
	begin := len(dst)
	dst = append(dst, SketchVersion)
	dst = binary.LittleEndian.AppendUint32(dst, s.KeyID)
	dst = binary.AppendUvarint(dst, wholeMs(s.Age))
	if len(s.Workers) > MaxSketchWorkers {
		return dst[:begin], fmt.Errorf("%w: workers: %d, at most %d", ErrSketch, len(s.Workers), MaxSketchWorkers)
	}
	dst = binary.AppendUvarint(dst, uint64(len(s.Workers)))
	for i := range s.Workers {
		w := &s.Workers[i]
		if len(w.Name) == 0 || len(w.Name) > maxWorkerName {
			return dst[:begin], fmt.Errorf("%w: worker %d: name of %d bytes, want 1 to %d", ErrSketch, i, len(w.Name), maxWorkerName)
		}
		if w.State >= sketchStates || w.Load > maxLoadClass {
			return dst[:begin], fmt.Errorf("%w: worker %q: state %d or load class %d", ErrSketch, w.Name, w.State, w.Load)
		}
		dst = append(append(append(dst, byte(len(w.Name))), w.Name...), byte(w.State), byte(w.Load))
	}
	if len(dst)-begin > MaxSketchBytes {
		return dst[:begin], fmt.Errorf("%w: %d workers with their names take %d bytes, at most %d", ErrSketch, len(s.Workers), len(dst)-begin, MaxSketchBytes)
	}
	return appendRoots(dst, begin+min(limit, MaxSketchBytes), s.Workers), nil
}

// appendRoots writes roots in turn up to an end.
func appendRoots(dst []byte, end int, workers []WorkerSketch) []byte {
	for turn := 0; ; turn++ {
		any := false
		for i := range workers {
			if turn >= len(workers[i].Roots) {
				continue
			}
			r := workers[i].Roots[turn]
			if r.DepthTokens == 0 || r.DepthTokens > MaxDepthTokens || r.Key == 0 {
				continue
			}
			any = true
			before := len(dst)
			dst = binary.AppendUvarint(dst, uint64(i))
			dst = appendLength(dst, r.DepthTokens)
			dst = binary.LittleEndian.AppendUint64(dst, uint64(r.Key))
			if len(dst) > end {
				return dst[:before]
			}
		}
		if !any {
			return dst
		}
	}
}

// ParseSketch reads a sketch. The error wraps [ErrSketch].
func ParseSketch(b []byte) (Sketch, error) {
	var s Sketch
	if len(b) > MaxSketchBytes {
		return s, fmt.Errorf("%w: %d bytes, at most %d", ErrSketch, len(b), MaxSketchBytes)
	}
	r := reader{b: b}
	version := r.uint8("version")
	if r.err == nil && version != 1 && version != SketchVersion {
		return s, fmt.Errorf("%w: version %d, this side reads versions 1 and %d", ErrSketch, version, SketchVersion)
	}
	s.KeyID = r.uint32("key id")
	if version == 1 {
		r.uvarint("session")
		r.uvarint("seq")
	}
	h := header{ageMs: r.uvarint("age")}
	s.Age = h.age()
	n := r.bounded("workers", MaxSketchWorkers)
	for i := range n {
		w := r.worker()
		if slices.ContainsFunc(s.Workers, func(o WorkerSketch) bool { return o.Name == w.Name }) {
			r.fail("worker", fmt.Sprintf("%d has the name of another one", i))
		}
		if r.err != nil {
			break
		}
		s.Workers = append(s.Workers, w)
	}
	for len(r.b) > 0 && r.err == nil {
		i := r.bounded("root", uint64(max(n, 1)-1))
		root := Root{DepthTokens: lengthOf(r.bounded("depth", sketchDepth), &r, "depth")}
		lo, hi := r.uint32("key"), r.uint32("key")
		root.Key = prefix.Key(lo) | prefix.Key(hi)<<32
		if r.err == nil && (n == 0 || root.DepthTokens == 0 || root.Key == 0) {
			r.fail("root", "without a worker, a depth or a key")
		}
		if r.err == nil {
			s.Workers[i].Roots = append(s.Workers[i].Roots, root)
		}
	}
	if r.err != nil {
		return Sketch{}, fmt.Errorf("%w: %w", ErrSketch, r.err)
	}
	return s, nil
}

// worker reads one worker of a sketch.
func (r *reader) worker() (w WorkerSketch) {
	n := int(r.uint8("name"))
	if n == 0 || n > maxWorkerName || n > len(r.b) {
		r.fail("name", "empty, too long or cut short")
		return w
	}
	w.Name = string(r.b[:n])
	r.b = r.b[n:]
	w.State, w.Load = SketchState(r.uint8("state")), LoadClass(r.uint8("load class"))
	if w.State >= sketchStates || w.Load > maxLoadClass {
		r.fail("state", fmt.Sprintf("%d or load class %d is none", w.State, w.Load))
	}
	return w
}

const (
	// gossipBytesPerSec is what a node of the mesh sends at most with its default
	// settings: measured with packets of 1,400 bytes, the default, three
	// of them each 200 ms at the best; those of this mesh are of 1,200.
	gossipBytesPerSec = 22_000
	// sketchShare is the part of it that all sketches together may use.
	sketchShare = 0.5
	// leastRhythm is the shortest time between two sketches of a host.
	leastRhythm = time.Second
	// targetRhythm is what small fleets fill the sketch up to.
	targetRhythm = 2 * time.Second
)

// copies is how often each node of the mesh passes a message on: four times the
// decimal logarithm of the number of members, rounded up.
func copies(members int) float64 {
	return 4 * math.Ceil(math.Log10(float64(max(members, 1)+1)))
}

// SketchRhythm is the time between two sketches of a host, such that the
// sketches of all members, passed on by every node, use half of what a node can
// send. It is a second at least.
func SketchRhythm(members, sketchBytes int) time.Duration {
	perSec := gossipBytesPerSec * sketchShare
	s := float64(max(members, 1)) * copies(members) * float64(max(sketchBytes, 1)) / perSec
	return max(leastRhythm, time.Duration(s*float64(time.Second)))
}

// SketchLimit is how many bytes a sketch may fill: in small fleets as many as
// keep the rhythm at about 2 s, in large ones little, for the rhythm's sake.
func SketchLimit(members int) int {
	perSec := gossipBytesPerSec * sketchShare
	n := targetRhythm.Seconds() * perSec / (float64(max(members, 1)) * copies(members))
	return min(max(int(n), LeastSketchBytes), MaxSketchBytes)
}
