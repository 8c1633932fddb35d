package agent

import (
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/lane"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

var (
	newKey = prefix.ClusterKey{1, 2, 3}
	oldKey = prefix.ClusterKey{4, 5, 6}
)

// newAgent is an agent that is wired, without engines, with some cluster keys.
func newAgent(t *testing.T, keys ...prefix.ClusterKey) *Agent {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "prefix.key")
	text := ""
	for _, k := range keys {
		text += fmt.Sprintf("%x\n", k[:])
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Name, cfg.StateDir, cfg.RunDir, cfg.Prefix.KeyFile, cfg.Mesh.Listen, cfg.GPU.Enabled = "gpu-01", dir, "", file, "127.0.0.1:0", "off"
	cfg.Discover.Enabled = false
	a, err := New(Options{Config: cfg, Version: "test", Process: 0xa1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		a.cancel()
		a.dialer.Close()
		a.tasks.Wait()
	})
	return a
}

// addRank adds a worker whose engine is known.
func (a *Agent) addRank() *rank {
	r := a.newRank(EngineConfig{Kind: "vllm", URL: "http://127.0.0.1:8000"}, "vllm-8000", 0)
	r.setFacts(engine.Facts{Model: "m", StartMark: 7, BlockTokens: 16, PoolBlocks: 1 << 20, StepTokens: 2048})
	r.setCoverage(engine.CoverageFull, "")
	r.setHealth(true, "")
	return r
}

// The memory of the mirrors is the host's: an engine of many ranks gets no more of
// it than as many engines, and what an engine gives up serves the others.
func TestMirrorsShareTheMemory(t *testing.T) {
	a := newAgent(t, newKey)
	a.cfg.Limits.Memory = mirrorBlockBytes * 64
	first := a.addRank()
	cached := func(r *rank) int { return r.report(time.Now()).cachedBlocks }
	for number := 1; number < 4; number++ {
		a.newRank(EngineConfig{Kind: "vllm", URL: "http://127.0.0.1:8000"}, "vllm-8000", number)
	}
	first.apply(engine.Batch{Events: []blocktable.Event{store(1, 100)}, Received: time.Now()})
	if n := cached(first); n != 16 {
		t.Errorf("%d blocks mirrored for one of four ranks, want 16", n)
	}
	a.forget(&watched{ranks: a.ranks()[1:]})
	first.apply(engine.Batch{Events: []blocktable.Event{store(2, 100)}, Received: time.Now()})
	if n := cached(first); n != 64 {
		t.Errorf("%d blocks mirrored for the only rank, want 64", n)
	}
}

// store is one prompt of whole blocks that shares nothing with another one.
func store(seed uint32, blocks int) blocktable.Event {
	e := blocktable.Event{Op: blocktable.OpStore, BlockTokens: 16}
	for b := range blocks {
		e.Hashes = append(e.Hashes, uint64(seed)<<20|uint64(b)<<1|1)
		for i := range 16 {
			e.Tokens = append(e.Tokens, seed*7919+uint32(b*16+i))
		}
	}
	return e
}

// coordinator takes what an agent sends.
type coordinator struct {
	t      *testing.T
	server *lane.Server

	mu      sync.Mutex
	session *lane.Session
	loads   int
	hosts   int // host reports
	answers map[uint32][]*waypostv1.PrefixFrames
	sizes   []int
	ended   chan uint32
}

func startCoordinator(t *testing.T) (c *coordinator, address string) {
	t.Helper()
	c = &coordinator{t: t, answers: map[uint32][]*waypostv1.PrefixFrames{}, ended: make(chan uint32, 256)}
	var err error
	c.server, err = lane.NewServer(lane.ServerOptions{
		Hello: func() *waypostv1.CoordinatorHello {
			return &waypostv1.CoordinatorHello{Name: new("c-1"), CoordinatorProcess: new(uint64(1))}
		},
		Handler: c, InsecureLoopback: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(c.server.GRPCOptions()...)
	c.server.Register(g)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = g.Serve(l) // ends with Stop
	}()
	t.Cleanup(func() { c.server.Close(); g.Stop(); <-done })
	return c, l.Addr().String()
}

// LaneUp implements lane.CoordinatorHandler.
func (c *coordinator) LaneUp(s *lane.Session) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
	return nil
}

// LaneDown implements lane.CoordinatorHandler.
func (c *coordinator) LaneDown(*lane.Session, error) {}

// Frame implements lane.CoordinatorHandler.
func (c *coordinator) Frame(_ *lane.Session, f *waypostv1.ConnectRequest, _ time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.GetLoad() != nil {
		c.loads++
	}
	if f.GetHost() != nil {
		c.hosts++
	}
	if p := f.GetPrefixes(); p != nil {
		size := 0
		for _, frame := range p.GetFrames() {
			size += len(frame)
		}
		c.sizes = append(c.sizes, size)
		c.answers[p.GetPullId()] = append(c.answers[p.GetPullId()], p)
		if p.GetLast() {
			c.ended <- p.GetPullId()
		}
	}
}

// pull asks and waits for the whole answer. A lane that is opened anew takes the
// question or part of the answer with it: as a coordinator does, it asks again, under
// another number.
func (c *coordinator) pull(id uint32, epoch *uint32, have *uint64) [][]byte {
	c.t.Helper()
	for try := range uint32(12) {
		if frames, whole := c.pullOnce(id<<8|try, epoch, have); whole {
			return frames
		}
	}
	c.t.Fatalf("pull %d was not answered", id)
	return nil
}

func (c *coordinator) pullOnce(id uint32, epoch *uint32, have *uint64) (frames [][]byte, whole bool) {
	c.t.Helper()
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	// What cannot be sent gets no answer.
	_ = s.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Pull{Pull: &waypostv1.PrefixPull{PullId: &id, Index: new(uint32(0)), Epoch: epoch, HaveSeq: have, Reason: new("new")}}})
	late := time.After(10 * time.Second)
	for {
		select {
		case got := <-c.ended:
			if got != id {
				continue
			}
		case <-late:
			return nil, false
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for i, p := range c.answers[id] {
			if p.GetLast() != (i == len(c.answers[id])-1) {
				c.t.Error("a piece after the last one")
			}
			frames = append(frames, p.GetFrames()...)
		}
		return frames, true
	}
}

// sink counts keys.
type sink map[summary.IndexKey]int

func (s sink) Begin()                                                      {}
func (s sink) End()                                                        {}
func (s sink) AddCheckpoint(k, _ summary.IndexKey, _ uint32)               { s[k]++ }
func (s sink) AddPoint(k, _ summary.IndexKey, _ uint32, _ bool)            { s[k]++ }
func (s sink) RemoveCheckpoint(k, _ summary.IndexKey, _ uint32)            { delete(s, k) }
func (s sink) RemovePoint(k, _ summary.IndexKey, _ uint32, _ bool)         { delete(s, k) }
func (s sink) SetBranch(_, _ summary.IndexKey, _ uint32)                   {}
func (s sink) SetExtent(_, _ summary.IndexKey, _ uint32, _ summary.Extent) {}
func (s sink) Reset()                                                      { clear(s) }

// A large snapshot comes in pieces that a LOAD need not wait long for, a replay
// in one, and an answer without frames says that nothing is missing.
func TestPullsAreAnsweredInPieces(t *testing.T) {
	a := newAgent(t, newKey)
	r := a.addRank()
	now := time.Now()
	var batch engine.Batch
	const prompts = 9000
	for i := range uint32(prompts) {
		batch.Events = append(batch.Events, store(i+1, 2))
	}
	batch.Received = now
	r.apply(batch)
	r.tick(now)
	c, address := startCoordinator(t)
	if err := a.dialer.SetAddresses(lane.FromConfig, []string{address}); err != nil {
		t.Fatal(err)
	}
	a.dialer.Start()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		c.mu.Lock()
		up := c.loads > 0
		c.mu.Unlock()
		if up {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no lane")
		}
	}
	s := sink{}
	d := summary.NewDecoder(s)
	frames := c.pull(1, nil, nil)
	for _, f := range frames {
		if _, err := d.Apply(f); err != nil {
			t.Fatal(err)
		}
	}
	epoch, seq, ok := d.Have()
	if !ok || len(s) < prompts-10 {
		t.Errorf("%d keys, position known: %v", len(s), ok)
	}
	c.mu.Lock()
	sizes := slices.Clone(c.sizes)
	c.mu.Unlock()
	if len(sizes) < 3 || slices.Max(sizes) > 2*pieceBytes {
		t.Errorf("pieces of %v bytes", sizes)
	}
	if frames := c.pull(2, &epoch, &seq); len(frames) != 0 {
		t.Errorf("%d frames although nothing is missing", len(frames))
	}
	r.apply(engine.Batch{Events: []blocktable.Event{store(1<<20, 40)}, Received: now})
	r.tick(now.Add(time.Second))
	frames = c.pull(3, &epoch, &seq)
	if len(frames) != 1 || len(frames[0]) > 200 {
		t.Fatalf("a replay of %d frames", len(frames))
	}
	if res, err := d.Apply(frames[0]); err != nil || res != summary.Applied {
		t.Errorf("%v %v", res, err)
	}
	wrong := epoch + 1
	if frames := c.pull(4, &wrong, &seq); len(frames) < 2 {
		t.Errorf("%d frames for another epoch, want a snapshot", len(frames))
	}
}

// The reader of a lane never waits for an answer, however many are asked for.
func TestPullsDoNotHoldUpTheReader(t *testing.T) {
	a := newAgent(t, newKey)
	a.addRank()
	l := &lane.Lane{}
	a.lanes.pulls[l] = make(chan *waypostv1.PrefixPull, pullsWaiting) // nobody answers
	for i := range uint32(4 * pullsWaiting) {
		a.lanes.Frame(l, &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Pull{Pull: &waypostv1.PrefixPull{PullId: &i, Index: new(uint32(0))}}})
	}
	if n := len(a.lanes.pulls[l]); n != pullsWaiting {
		t.Errorf("%d pulls wait, the bound is %d", n, pullsWaiting)
	}
}

// What a report does not tell yet has an age: of changes that wait for a frame,
// and of frames that wait for a report.
func TestUntoldChangesHaveAnAge(t *testing.T) {
	a := newAgent(t, newKey)
	r := a.addRank()
	t0 := time.Now()
	at := func(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }
	change := func(seed uint32, ms, age int) {
		r.apply(engine.Batch{Events: []blocktable.Event{store(seed, 40)}, Received: at(ms), Age: time.Duration(age) * time.Millisecond})
	}
	var pos position
	known := false
	look := func(ms int, wantFrame bool, wantMs float64) {
		t.Helper()
		frame, next, untold := r.frameAfter(pos, known, at(ms))
		pos, known = next, true
		if (frame != nil) != wantFrame {
			t.Errorf("at %d ms: frame %v, want %v", ms, frame != nil, wantFrame)
		}
		if untold == nil || *untold != wantMs {
			t.Errorf("at %d ms: untold changes are %v ms old, want %v", ms, untold, wantMs)
		}
	}
	look(0, false, 0)
	change(1, 100, 50)
	change(2, 150, 0)
	look(300, false, 250)
	r.tick(at(1000))
	look(1000, true, 0)
	look(1200, false, 0)
	change(3, 1500, 0)
	r.tick(at(2100))
	change(4, 2200, 0)
	r.tick(at(3300))
	change(5, 3400, 0)
	look(3500, true, 1300) // frame 3 waits, which tells of 2,200 ms
	look(3500, true, 100)
	look(3600, false, 200)
	r.tick(at(4400))
	look(4500, true, 0)

	// While a mirror is built beside, the stream tells nothing of what happens.
	r.startBeside(engine.ResetCause("gap"))
	change(6, 5000, 0)
	r.tick(at(5500))
	look(6000, true, 1000)
	r.finishBeside()
	r.tick(at(6500))
	look(6500, true, 0)

	// A reader too far behind is told that its age is not known.
	for i := range 3 * agedFrames {
		r.tick(at(8000 + 2000*i))
	}
	epoch, seq := r.seq()
	if _, _, untold := r.frameAfter(position{epoch, seq - 2*agedFrames}, true, at(1e6)); untold != nil {
		t.Errorf("%v ms although its age is not known", *untold)
	}
}

// While the cluster key is changed a host offers both, and who has either of
// them follows its stream.
func TestTwoKeysAreOffered(t *testing.T) {
	a := newAgent(t, newKey, oldKey)
	if got := a.lanes.hello().GetPrefixKeyIds(); !slices.Equal(got, []string{newKey.ID(), oldKey.ID()}) {
		t.Errorf("hello offers %v", got)
	}
	r := a.addRank()
	t0 := time.Now()
	r.tick(t0) // the stream serves both from the next frame on
	r.apply(engine.Batch{Events: []blocktable.Event{store(1, 100)}, Received: t0})
	r.tick(t0.Add(2 * time.Second))
	frames, _, _, _ := r.snapshot()
	for _, k := range []prefix.ClusterKey{newKey, oldKey} {
		s := sink{}
		d := summary.NewDecoder(s)
		d.RequireKey(k)
		for _, f := range frames {
			if res, err := d.Apply(f); err != nil || res != summary.Applied {
				t.Errorf("key %s: %v %v", k.ID(), res, err)
			}
		}
		if len(s) < 4 || d.KeyID() != k.IDUint32() {
			t.Errorf("key %s: %d keys", k.ID(), len(s))
		}
	}
}

// A stream that begins anew in the same engine life, as after a mirror is built
// beside the old one, is told apart from the former by every frame of it, whatever
// was followed before.
func TestNewStreamsAreToldFromTheirFormer(t *testing.T) {
	a := newAgent(t, newKey)
	r := a.addRank()
	now := time.Now()
	d := summary.NewDecoder(sink{})
	follow := func() {
		t.Helper()
		frames, _, _, _ := r.snapshot()
		for _, f := range frames {
			if res, err := d.Apply(f); err != nil || res != summary.Applied {
				t.Fatalf("%v %v", res, err)
			}
		}
	}
	tick := func(seed uint32) (frame []byte) {
		now = now.Add(time.Second)
		r.apply(engine.Batch{Events: []blocktable.Event{store(seed, 40)}, Received: now})
		r.tick(now)
		epoch, seq := r.seq()
		frames, _, ok := r.framesAfter(epoch, seq-1)
		if !ok || len(frames) != 1 {
			t.Fatalf("%d frames, %v", len(frames), ok)
		}
		return frames[0]
	}
	for i := range uint32(100) { // ahead of what comes next
		tick(i + 1)
	}
	follow()
	for i := range uint32(3) {
		before, _ := r.seq()
		r.startBeside(engine.ResetCause("gap"))
		r.finishBeside()
		if res, err := d.Apply(tick(1000 + i)); err != nil || res != summary.Gap || !d.Anew() {
			t.Errorf("round %d: the first frame of a new stream: %v, %v, anew %v", i, res, err, d.Anew())
		}
		if after, _ := r.seq(); after != before+1 {
			t.Errorf("round %d: epoch %d after %d", i, after, before)
		}
		follow()
	}
	r.encoder = summary.NewEncoder(summary.Options{Key: r.key, Blocks: r.table, Epoch: math.MaxUint32})
	if got := r.nextEpoch(); got != 1 {
		t.Errorf("after the last epoch comes %d", got)
	}
}

// One LOAD carries the frames of all workers of the host, and how old what it
// leaves out is.
func TestLoadCarriesTheFramesOfAllWorkers(t *testing.T) {
	a := newAgent(t, newKey)
	l := &lane.Lane{}
	a.lanes.told[l] = map[uint32]position{}
	now := time.Now()
	for i := range uint32(8) {
		r := a.addRank()
		r.apply(engine.Batch{Events: []blocktable.Event{store(i+1, 40)}, Received: now})
		r.tick(now)
	}
	for round, want := range []bool{true, false} {
		load := a.lanes.load(l)
		if len(load.GetWorkers()) != 8 {
			t.Fatalf("%d workers", len(load.GetWorkers()))
		}
		for _, w := range load.GetWorkers() {
			if (len(w.GetPrefixFrame()) > 0) != want || w.PrefixAgeMs == nil || w.GetPrefixAgeMs() != 0 {
				t.Errorf("round %d, worker %d: %d bytes, age %v", round, w.GetIndex(), len(w.GetPrefixFrame()), w.PrefixAgeMs)
			}
		}
	}
	a.rank(3).apply(engine.Batch{Events: []blocktable.Event{store(99, 40)}, Received: now.Add(-time.Second)})
	for _, w := range a.lanes.load(l).GetWorkers() {
		if old := w.GetPrefixAgeMs() >= 1000; old != (w.GetIndex() == 3) {
			t.Errorf("worker %d: untold changes are %v ms old", w.GetIndex(), w.GetPrefixAgeMs())
		}
	}
}

// Between the LOADs of the period, a lane hears of those workers only that have
// news which it has not heard.
func TestLoadOfWorkersWithNews(t *testing.T) {
	a := newAgent(t, newKey)
	first, second := &lane.Lane{}, &lane.Lane{}
	a.lanes.toldNews[first], a.lanes.toldNews[second] = map[uint32]uint64{}, map[uint32]uint64{}
	for range 4 {
		a.addRank()
	}
	told := func(load *waypostv1.Load) (out []uint32) {
		for _, w := range load.GetWorkers() {
			out = append(out, w.GetIndex())
		}
		return out
	}
	expect := func(what string, got *waypostv1.Load, want ...uint32) {
		t.Helper()
		if !slices.Equal(told(got), want) {
			t.Errorf("%s: told of %v, want %v", what, told(got), want)
		}
	}
	expect("nothing new", a.lanes.loadNews(first))
	a.lanes.tellNews(a.rank(1), a.rank(3))
	expect("two", a.lanes.loadNews(first), 1, 3)
	expect("the same again", a.lanes.loadNews(first))
	a.lanes.tellNews(a.rank(2))
	expect("one more, to another lane", a.lanes.loadNews(second), 1, 2, 3)
	expect("one more", a.lanes.loadNews(first), 2)
	a.lanes.tellNews(a.rank(0))
	expect("all", a.lanes.load(first), 0, 1, 2, 3)
	expect("told with all", a.lanes.loadNews(first))
	if a.lanes.loadNews(first) != nil {
		t.Error("a LOAD of nobody")
	}
}
