package summary_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	"waypost/gossip/summary/summarytest"
)

var (
	testKey = prefix.ClusterKey{1, 2, 3}
	domains = []prefix.Domain{{Model: "m"}, {Model: "m", Adapter: "a"}, {Model: "m", Salt: "s"}}
	start   = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
)

// listed is a key as a sink holds it.
type listed struct {
	Depth uint32
	End   bool
}

// recorder is a sink that keeps its keys and fails when the contract breaks.
type recorder struct {
	t       interface{ Fatalf(string, ...any) }
	keys    map[prefix.Key]listed
	removed map[prefix.Key]bool // since it was last emptied
}

func newRecorder(t interface{ Fatalf(string, ...any) }) *recorder {
	return &recorder{t: t, keys: map[prefix.Key]listed{}, removed: map[prefix.Key]bool{}}
}

func (r *recorder) add(k prefix.Key, l listed) {
	if old, dup := r.keys[k]; dup {
		r.t.Fatalf("key %x added twice: %v, %v", k, old, l)
	}
	r.keys[k] = l
}

func (r *recorder) Add(k prefix.Key, depth uint32)         { r.add(k, listed{depth, true}) }
func (r *recorder) AddResident(k prefix.Key, depth uint32) { r.add(k, listed{depth, false}) }

func (r *recorder) SetEnd(k prefix.Key, end bool) {
	l, ok := r.keys[k]
	if !ok || l.End == end {
		r.t.Fatalf("key %x: end set to %v on %v, %v", k, end, l, ok)
	}
	r.keys[k] = listed{l.Depth, end}
}

func (r *recorder) Remove(k prefix.Key) {
	if _, ok := r.keys[k]; !ok {
		r.t.Fatalf("key %x removed but not held", k)
	}
	delete(r.keys, k)
	r.removed[k] = true
}

func (r *recorder) Reset() {
	for k := range r.keys {
		r.removed[k] = true
	}
	clear(r.keys)
}

// plainSink hides that the recorder is a summary.ResidentSink.
type plainSink struct{ r *recorder }

func (p plainSink) Add(k prefix.Key, depth uint32) { p.r.Add(k, depth) }
func (p plainSink) Remove(k prefix.Key)            { p.r.Remove(k) }
func (p plainSink) Reset()                         { p.r.Reset() }

// wanted is what must be listed of a forest, and what may be, by definition:
// computed from token paths, in ignorance of how the encoder works.
func wanted(f *summarytest.Forest) (must, may map[prefix.Key]listed) {
	must, may = map[prefix.Key]listed{}, map[prefix.Key]listed{}
	for _, id := range f.IDs() {
		path := f.Path(id)
		keyer := prefix.NewKeyer(testKey, f.Domain(id))
		from := len(path) - f.BlockTokens
		for depth := from + 1; depth <= len(path); depth++ {
			atEnd := depth == len(path)
			checkpoint := depth%prefix.ChunkTokens == 0
			if !checkpoint && !atEnd || !checkpoint && !f.Usable(id) {
				continue
			}
			k := keyer.Key(chainOf(path[:depth]), uint32(depth))
			l := listed{uint32(depth), atEnd && f.Usable(id) || may[k].End}
			may[k] = l
			if checkpoint || isEnd(f, id) {
				must[k] = l
			}
		}
	}
	return must, may
}

// isEnd says whether the end of a usable block must be known: it is the last
// usable one of its prefix, a fork, or comes before a checkpoint within a block.
func isEnd(f *summarytest.Forest, id uint32) bool {
	children := f.Children(id)
	usable := 0
	for _, c := range children {
		if f.Usable(c) {
			usable++
		}
		n := len(f.Path(c))
		inside := (n - 1) / prefix.ChunkTokens * prefix.ChunkTokens
		if inside > n-f.BlockTokens {
			return true
		}
	}
	return usable == 0 || len(children) >= 2
}

func chainOf(tokens []uint32) prefix.Chain {
	var c prefix.Chain
	for len(tokens) >= prefix.ChunkTokens {
		c = prefix.Next(c, tokens[:prefix.ChunkTokens])
		tokens = tokens[prefix.ChunkTokens:]
	}
	if len(tokens) > 0 {
		c = prefix.Point(c, tokens)
	}
	return c
}

func drawForest(t *rapid.T) *summarytest.Forest {
	size := rapid.SampledFrom([]int{16, 32, 48, 64, 272, 512, 528, 1056}).Draw(t, "block tokens")
	f := summarytest.NewForest(size, domains...)
	f.Hybrid = rapid.Bool().Draw(t, "hybrid")
	return f
}

func drawInt(t *rapid.T) func(n int) int {
	return func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "n") }
}

// TestListsWhatIsHeld compares what a coordinator gets with the definition,
// after every change.
func TestListsWhatIsHeld(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := drawForest(t)
		e := summary.NewEncoder(summary.Options{Key: testKey, Blocks: f, Epoch: 1})
		f.Listener = e
		r := newRecorder(t)
		d := summary.NewDecoder(r)
		applyAll(t, d, e.Snapshot())
		now := start
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			f.Step(drawInt(t))
			if rapid.Bool().Draw(t, "delta between") {
				now = now.Add(time.Second)
				applyAll(t, d, deltas(e, now))
				_, may := wanted(f)
				checkListed(t, r.keys, nil, may)
				continue
			}
			for range 2 { // no end is held longer than six seconds
				now = now.Add(6 * time.Second)
				applyAll(t, d, deltas(e, now))
			}
			must, may := wanted(f)
			checkListed(t, r.keys, must, may)
		}
	})
}

func checkListed(t *rapid.T, got, must, may map[prefix.Key]listed) {
	t.Helper()
	for k, l := range must {
		if got[k] != l {
			t.Fatalf("key %x: %v, want %v", k, got[k], l)
		}
	}
	for k, l := range got {
		if may[k] != l {
			t.Fatalf("key %x: %v, but the blocks say %v", k, l, may[k])
		}
	}
}

// deltas returns the frames of a moment.
func deltas(e *summary.Encoder, now time.Time) (frames [][]byte) {
	for b := e.Delta(now); b != nil; b = e.Delta(now) {
		frames = append(frames, b)
	}
	return frames
}

func applyAll(t interface{ Fatalf(string, ...any) }, d *summary.Decoder, frames [][]byte) {
	for i, b := range frames {
		got, err := d.Apply(b)
		if err != nil || got != summary.Applied && got != summary.Snapshotting {
			t.Fatalf("frame %d of %d: %v, %v", i, len(frames), got, err)
		}
	}
}

// coordinator is a decoder behind a bad line.
type coordinator struct {
	r     *recorder
	d     *summary.Decoder
	queue [][]byte
}

func (c *coordinator) restart(t *rapid.T) {
	c.r = newRecorder(t)
	c.d = summary.NewDecoder(c.r)
	c.d.RequireKey(testKey)
}

// take applies one frame and checks that a snapshot blinds nobody.
func (c *coordinator) take(t *rapid.T, b []byte) summary.Result {
	clear(c.r.removed)
	epoch, seq, ok := c.d.Have()
	got, err := c.d.Apply(b)
	isSnapshot := b[1]&15 == 2
	if err != nil {
		t.Fatalf("good frame refused: %v", err)
	}
	newEpoch, newSeq, newOK := c.d.Have()
	switch got {
	case summary.Applied:
		if !isSnapshot && (!ok || epoch != newEpoch || newSeq != seq+1) {
			t.Fatalf("went from seq %d to %d", seq, newSeq)
		}
		if !newOK {
			t.Fatalf("applied, but Have is not sure")
		}
	case summary.DigestMismatch:
		t.Fatalf("digest mismatch on an honest stream")
	default:
		if len(c.r.removed) > 0 || newSeq != seq || newEpoch != epoch {
			t.Fatalf("%v changed something", got)
		}
	}
	if isSnapshot {
		for k := range c.r.removed {
			if l, back := c.r.keys[k]; back {
				t.Fatalf("snapshot took away and gave back %x %v", k, l)
			}
		}
	}
	return got
}

// pull asks the encoder for what is missing.
func (c *coordinator) pull(e *summary.Encoder, snapshot bool) [][]byte {
	if epoch, seq, ok := c.d.Have(); ok && epoch == e.Epoch() && !snapshot {
		if frames, ok := e.Replay(seq); ok {
			return frames
		}
	}
	return e.Snapshot()
}

// TestBadLines loses, repeats and reorders frames, restarts each end, and
// checks that two coordinators always come to hold exactly what the agent
// tells, key by key.
func TestBadLines(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := drawForest(t)
		epoch := uint32(1)
		newEncoder := func() *summary.Encoder {
			return summary.NewEncoder(summary.Options{Key: testKey, Blocks: f, Epoch: epoch, ReplayBytes: 4 << 10})
		}
		e := newEncoder()
		f.Listener = e
		coordinators := []*coordinator{{}, {}}
		for _, c := range coordinators {
			c.restart(t)
		}
		now := start
		intn := drawInt(t)
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			switch op := intn(20); {
			case op < 8:
				f.Step(intn)
			case op < 14:
				now = now.Add(time.Duration(intn(3000)) * time.Millisecond)
				for _, b := range deltas(e, now) {
					for _, c := range coordinators {
						c.send(intn, b)
					}
				}
			case op < 18:
				c := coordinators[intn(2)]
				for n := intn(4); n > 0 && len(c.queue) > 0; n-- {
					b := c.queue[0]
					c.queue = c.queue[1:]
					if got := c.take(t, b); got == summary.Gap && intn(2) == 0 {
						c.queue = append(c.queue, c.pull(e, intn(4) == 0)...)
					}
				}
			case op < 19:
				coordinators[intn(2)].restart(t)
			default:
				epoch++
				e = newEncoder()
				f.Relisten(e)
			}
		}
		for _, c := range coordinators {
			for _, b := range c.queue {
				c.take(t, b)
			}
			c.queue = nil
		}
		for range 3 {
			now = now.Add(10 * time.Second)
			for _, b := range deltas(e, now) {
				for _, c := range coordinators {
					c.take(t, b)
				}
			}
			for _, c := range coordinators {
				for _, b := range c.pull(e, false) {
					c.take(t, b)
				}
			}
		}
		must, may := wanted(f)
		for i, c := range coordinators {
			if gotEpoch, seq, ok := c.d.Have(); !ok || gotEpoch != epoch || seq != e.Seq() {
				t.Fatalf("coordinator %d has epoch %d seq %d %v, the agent epoch %d seq %d", i, gotEpoch, seq, ok, epoch, e.Seq())
			}
			if c.d.Keys() != e.Keys() || len(c.r.keys) != e.Keys() {
				t.Fatalf("coordinator %d holds %d keys, its sink %d, the agent tells %d", i, c.d.Keys(), len(c.r.keys), e.Keys())
			}
			checkListed(t, c.r.keys, must, may)
		}
		if diff := cmp.Diff(coordinators[0].r.keys, coordinators[1].r.keys); diff != "" {
			t.Fatalf("coordinators differ: %s", diff)
		}
	})
}

// send puts a frame on the line: lost, once, twice, or before the last one.
func (c *coordinator) send(intn func(int) int, b []byte) {
	switch n := len(c.queue); intn(10) {
	case 0:
	case 1:
		c.queue = append(c.queue, b, b)
	case 2:
		c.queue = append(c.queue, b)
		if n > 0 {
			c.queue[n-1], c.queue[n] = c.queue[n], c.queue[n-1]
		}
	default:
		c.queue = append(c.queue, b)
	}
}

// TestPlainSinkHearsOfEndsOnly compares a sink without the resident methods
// with one that has them.
func TestPlainSinkHearsOfEndsOnly(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	f := summarytest.NewForest(48, domains...)
	f.Hybrid = true
	e := summary.NewEncoder(summary.Options{Key: testKey, Blocks: f, Epoch: 7})
	f.Listener = e
	full, plain := newRecorder(t), newRecorder(t)
	sinks := []*summary.Decoder{summary.NewDecoder(full), summary.NewDecoder(plainSink{plain})}
	residents := 0
	for i := range 300 {
		f.Step(rng.IntN)
		frames := deltas(e, start.Add(time.Duration(i)*time.Second))
		if i%50 == 0 {
			frames = e.Snapshot()
			e2 := summary.NewEncoder(summary.Options{Key: testKey, Blocks: f, Epoch: uint32(i + 8)})
			f.Relisten(e2)
			e = e2
			frames = append(frames, e.Snapshot()...)
		}
		for _, d := range sinks {
			for _, b := range frames {
				if _, err := d.Apply(b); err != nil {
					t.Fatal(err)
				}
			}
		}
		want := map[prefix.Key]listed{}
		for k, l := range full.keys {
			if l.End {
				want[k] = l
			} else {
				residents++
			}
		}
		if diff := cmp.Diff(want, plain.keys); diff != "" {
			t.Fatalf("step %d: %s", i, diff)
		}
	}
	if residents == 0 {
		t.Fatal("the test never listed a resident key")
	}
}

func ExampleResult() {
	fmt.Println(summary.Applied, summary.Gap, summary.DigestMismatch, summary.Result(0))
	// Output: applied gap digest mismatch no result
}
