package views

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	"waypost/gossip/summary/summarytest"
	waypostv1 "waypost/proto/waypost/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const worker = "gpu-01/vllm-8000/0"

var testKey = prefix.ClusterKey{1, 2, 3}

// session is a lane that keeps the pulls it is to send.
type session struct {
	host  string
	pulls chan *waypostv1.PrefixPull
}

func newSession() *session { return &session{"gpu-01", make(chan *waypostv1.PrefixPull, 64)} }

func (s *session) Host() string        { return s.host }
func (*session) Done() <-chan struct{} { return nil }
func (*session) Hello() *waypostv1.AgentHello {
	return &waypostv1.AgentHello{Workers: []*waypostv1.WorkerFacts{{Index: proto.Uint32(0)}}}
}

func (s *session) Send(f *waypostv1.ConnectResponse) error {
	s.pulls <- f.GetPull()
	return nil
}

func (s *session) next(t *testing.T) *waypostv1.PrefixPull {
	t.Helper()
	select {
	case p := <-s.pulls:
		return p
	case <-time.After(time.Minute):
		t.Fatal("no pull")
		return nil
	}
}

// answer sends frames as all of the answer to a pull.
func (r *rig) answer(s *session, p *waypostv1.PrefixPull, frames ...[]byte) {
	r.views.TakePulled(s, &waypostv1.PrefixFrames{Index: proto.Uint32(0), EngineProcess: proto.Uint64(100), Frames: frames, PullId: p.PullId, Last: proto.Bool(true)})
}

// peer is another coordinator with a copy; nil: it fails.
type peer struct{ copy func() [][]byte }

func (p *peer) CopyPeers() []string { return []string{"c-2"} }

func (p *peer) FetchCopy(_ context.Context, address, of string, process uint64) ([][]byte, time.Duration, error) {
	if p.copy == nil || address != "c-2" || of != worker || process != 100 {
		return nil, 0, errors.New("no such stream")
	}
	return p.copy(), 3 * time.Second, nil
}

// rig is the views of one worker, whose lane was up once.
type rig struct {
	fleet *fleet.Fleet
	index *prefixindex.Index
	views *Views
	lane  fleet.Lane

	mu      sync.Mutex
	refused []string
	lost    int
}

func newRig(t *testing.T, p *peer) *rig {
	t.Helper()
	r := &rig{index: prefixindex.New(prefixindex.Options{})}
	var err error
	if r.fleet, err = fleet.New(fleet.Options{Epoch: time.Now(), Process: 1}); err != nil {
		t.Fatal(err)
	}
	r.views, err = New(Options{
		Fleet: r.fleet, Index: r.index, PrefixKey: testKey, Peers: p,
		Lost: func(fleet.WorkerID, time.Time) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.lost++
		},
		Refused: func(kind string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.refused = append(r.refused, kind)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.lane = r.opened(t, "gpu-01")
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() { r.views.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		run.Wait()
	})
	return r
}

// opened is the lane of a host with one worker.
func (r *rig) opened(t *testing.T, host string) fleet.Lane {
	t.Helper()
	l, _, err := r.fleet.OpenLane(time.Now(), fleet.Hello{Host: host, AgentProcess: 0xa1, Session: 1, Workers: []fleet.Facts{{
		Engine: "vllm-8000", Ranks: 1, Kind: "vllm", EngineProcess: 100, Model: "m", URL: "http://127.0.0.1:8000",
		BlockTokens: 16, PoolBlocks: 10_000, MaxModelTokens: 65536, MaxRunning: 256, StepTokens: 2048, Coverage: "full",
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// up brings a lane up.
func (r *rig) up(s *session) {
	r.views.LaneUp(s, r.lane)
	r.views.Sync(s, true)
}

func (r *rig) info(t *testing.T) *fleet.WorkerInfo {
	t.Helper()
	w, err := r.fleet.Worker(time.Now(), worker)
	if err != nil {
		t.Fatal(err)
	}
	return &w
}

func (r *rig) view(t *testing.T) placement.ViewKind {
	t.Helper()
	kind, _, ok := r.fleet.ViewOf(r.info(t).ID)
	if !ok {
		t.Fatal("the worker is not known")
	}
	return kind
}

// newStream is the encoder of a cache of one prompt.
func newStream(key prefix.ClusterKey, epoch uint32, blocks int) *summary.Encoder {
	e, _ := growing(key, epoch, blocks)
	return e
}

// growing is newStream, whose next frames tell of one more prompt each.
func growing(key prefix.ClusterKey, epoch uint32, blocks int) (e *summary.Encoder, next func() []byte) {
	f := summarytest.NewForest(16, prefix.Domain{Model: "m"})
	e = summary.NewEncoder(summary.Options{Key: key, Blocks: f, Epoch: epoch})
	f.Listener = e
	now, content := time.Now(), uint64(0)
	next = func() []byte {
		last := uint32(0)
		for range blocks {
			content++
			last = f.Attach(last, 0, content, true)
		}
		f.StoreEnded(last)
		now = now.Add(time.Second)
		return e.Delta(now)
	}
	next()
	return e, next
}

// Where the digest of a frame stands: after version, kind, key id, epoch (of a
// delta two bytes), seq and age.
const (
	deltaEpochEnd    = 8
	snapshotEpochEnd = 10
)

// otherDigest changes the digest of a frame.
func otherDigest(frame []byte, at int) []byte {
	out := slices.Clone(frame)
	for range 2 {
		_, n := binary.Uvarint(out[at:])
		at += n
	}
	out[at] ^= 1
	return out
}

// What a peer sends and is wrong changes nothing, and is left to the agent; a
// good copy is a view before the agent tells what happened since.
func TestPeerCopies(t *testing.T) {
	stream := newStream(testKey, 1, 100)
	good := stream.Snapshot()
	for name, c := range map[string]struct {
		frames  [][]byte
		taken   bool
		refused int
	}{
		"good":           {good, true, 0},
		"none":           {nil, false, 0},
		"noise":          {[][]byte{{1, 2, 3}}, false, 1},
		"another key":    {newStream(prefix.ClusterKey{9}, 2, 10).Snapshot(), false, 1},
		"cut":            {[][]byte{good[0][:len(good[0])-3]}, false, 1},
		"another digest": {[][]byte{otherDigest(good[0], snapshotEpochEnd)}, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r, s := newRig(t, &peer{func() [][]byte { return c.frames }}), newSession()
			r.up(s)
			p := s.next(t)
			if p.GetReason() != "new" || (p.HaveSeq != nil) != c.taken {
				t.Errorf("the agent was asked %v", p)
			}
			if keys := r.index.Stats().Keys; (keys > 0) != c.taken {
				t.Errorf("%d keys by the copy", keys)
			}
			r.mu.Lock()
			if len(r.refused) != c.refused {
				t.Errorf("refused: %v", r.refused)
			}
			if r.lost != 0 {
				t.Error("the worker's stream lost what a peer sent wrong")
			}
			r.mu.Unlock()
			if at, _ := r.views.Stream(r.info(t)); c.taken && time.Since(at.ViewAt) < 3*time.Second {
				t.Errorf("the copy of 3 s ago is taken to be %s old", time.Since(at.ViewAt))
			}
			if c.taken {
				r.answer(s, p)
			} else {
				r.answer(s, p, good...)
			}
			// Only the agent says how much of the cache shows.
			load := &waypostv1.WorkerLoad{Index: proto.Uint32(0), EngineProcess: proto.Uint64(100), Coverage: proto.String("full")}
			if _, ok := r.views.TakeCoverage(s, load); !ok {
				t.Fatal("the lane has no worker")
			}
			r.views.TakeLoad(s, load)
			if view := r.view(t); view != placement.ViewLive {
				t.Errorf("the view is %s after the agent's answer", view)
			}
			st, ok := r.views.Stream(r.info(t))
			if !ok || st.Keys != stream.Stats().Keys || r.index.Stats().Keys != st.Keys || !st.InPlace || st.Epoch != 1 {
				t.Errorf("%+v, the agent has %+v", st, stream.Stats())
			}
			if len(st.Resyncs) != 1 || st.Resyncs["new"] != 1 {
				t.Errorf("the agent was asked for what the peer sent wrong: %v", st.Resyncs)
			}
		})
	}
}

// A copy that comes when its pull is over is not taken: a new lane asks anew.
func TestCopyForAPullThatIsOver(t *testing.T) {
	p := &peer{}
	r, first, second := newRig(t, p), newSession(), newSession()
	p.copy = func() [][]byte {
		r.views.LaneDown(first)
		r.up(second)
		return newStream(testKey, 1, 100).Snapshot()
	}
	r.up(first)
	if got := second.next(t); got.HaveSeq != nil || r.index.Stats().Keys != 0 {
		t.Errorf("%v asked, %d keys by a copy that nobody waits for", got, r.index.Stats().Keys)
	}
	if len(first.pulls) != 0 {
		t.Error("the lane that is gone was asked")
	}
}

// The end of a lane makes its views stale; that of one whose place was taken
// does nothing.
func TestLaneDownMakesViewsStale(t *testing.T) {
	r, former, s := newRig(t, &peer{}), newSession(), newSession()
	stream := newStream(testKey, 1, 10).Snapshot()
	r.up(former)
	r.answer(former, former.next(t), stream...)
	r.up(s)
	r.answer(s, s.next(t), stream...)
	load := &waypostv1.WorkerLoad{Index: proto.Uint32(0), EngineProcess: proto.Uint64(100), Coverage: proto.String("full")}
	r.views.TakeCoverage(s, load)
	r.views.TakeLoad(s, load)
	r.views.LaneDown(former)
	if view := r.view(t); view != placement.ViewLive {
		t.Errorf("the view is %s after the end of a former lane", view)
	}
	r.views.LaneDown(s)
	if view := r.view(t); view != placement.ViewStale {
		t.Errorf("the view is %s without a lane", view)
	}
}

// load takes a report with a frame, or without one.
func (r *rig) load(s *session, frame []byte) {
	load := &waypostv1.WorkerLoad{Index: proto.Uint32(0), EngineProcess: proto.Uint64(100), Coverage: proto.String("full"), PrefixAgeMs: proto.Float64(0), PrefixFrame: frame}
	r.views.TakeCoverage(s, load)
	r.views.TakeLoad(s, load)
}

// fresh says whether a report without a frame makes the view as old as itself.
func (r *rig) fresh(t *testing.T, s *session) bool {
	t.Helper()
	before, _ := r.views.Stream(r.info(t))
	r.load(s, nil)
	after, ok := r.views.Stream(r.info(t))
	return ok && after.ViewAt.After(before.ViewAt)
}

// A frame that is missing is asked for from where the stream stands. Until all of
// the answer is there the view is not fresh, whatever else fits.
func TestGapIsFilled(t *testing.T) {
	r, s := newRig(t, &peer{}), newSession()
	stream, next := growing(testKey, 1, 100)
	r.up(s)
	r.answer(s, s.next(t), stream.Snapshot()...)
	if !r.fresh(t, s) {
		t.Fatal("the view is not fresh after the snapshot")
	}
	second, third := next(), next()
	r.load(s, third)
	p := s.next(t)
	if p.GetReason() != "gap" || p.GetHaveSeq() != 1 || p.GetEpoch() != 1 {
		t.Errorf("asked %v", p)
	}
	if r.fresh(t, s) {
		t.Error("the view is fresh although a frame is missing")
	}
	before, _ := r.views.Stream(r.info(t))
	r.load(s, second) // late, by another way
	if after, _ := r.views.Stream(r.info(t)); after.ViewAt != before.ViewAt || r.fresh(t, s) {
		t.Error("the view is fresh before the answer")
	}
	r.answer(s, &waypostv1.PrefixPull{PullId: proto.Uint32(p.GetPullId() + 7)})
	if r.fresh(t, s) {
		t.Error("the view is fresh by the answer to another question")
	}
	r.answer(s, p, second, third)
	if !r.fresh(t, s) {
		t.Error("the view is not fresh after the answer")
	}
	if st, _ := r.views.Stream(r.info(t)); st.Seq != 3 || st.Keys != stream.Keys() {
		t.Errorf("%+v, the agent has %d keys", st, stream.Keys())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lost != 1 {
		t.Errorf("%d losses told, want 1", r.lost)
	}
}

// Where the digest differs only a snapshot helps; what was known stands until then.
func TestOtherDigestIsReadAnew(t *testing.T) {
	r, s := newRig(t, &peer{}), newSession()
	stream, next := growing(testKey, 1, 100)
	r.up(s)
	r.answer(s, s.next(t), stream.Snapshot()...)
	keys := r.index.Stats().Keys
	r.load(s, otherDigest(next(), deltaEpochEnd))
	p := s.next(t)
	if p.GetReason() != "digest" || p.HaveSeq != nil {
		t.Errorf("asked %v", p)
	}
	if r.fresh(t, s) || r.index.Stats().Keys < keys {
		t.Errorf("fresh, or fewer keys than before: %d of %d", r.index.Stats().Keys, keys)
	}
	r.answer(s, p, stream.Snapshot()...)
	if !r.fresh(t, s) || r.index.Stats().Keys != stream.Keys() {
		t.Errorf("%d keys, the agent has %d", r.index.Stats().Keys, stream.Keys())
	}
}

// An answer that leaves something out is no answer: it is asked again.
func TestAnswerThatLacksIsAskedAgain(t *testing.T) {
	r, s := newRig(t, &peer{}), newSession()
	stream, next := growing(testKey, 1, 100)
	r.up(s)
	r.answer(s, s.next(t)) // nothing at all
	p := s.next(t)
	if p.GetReason() != "missing" {
		t.Errorf("asked for %q after an empty answer", p.GetReason())
	}
	snapshot := stream.Snapshot()
	next()
	r.answer(s, p, append(snapshot, next())...) // a frame between is missing
	if p = s.next(t); p.GetReason() != "gap" || p.GetHaveSeq() != 1 {
		t.Errorf("asked %v", p)
	}
	if r.fresh(t, s) {
		t.Error("the view is fresh although a frame is missing")
	}
	frames, ok := stream.Replay(1)
	if !ok {
		t.Fatal("no replay")
	}
	r.answer(s, p, frames...)
	if !r.fresh(t, s) {
		t.Error("the view is not fresh when all is there")
	}
}

// A frame for another life of the engine is refused, and damage is told.
func TestFramesThatAreRefused(t *testing.T) {
	r, s := newRig(t, &peer{}), newSession()
	r.up(s)
	s.next(t)
	for _, process := range []uint64{101, 100} {
		r.views.TakeLoad(s, &waypostv1.WorkerLoad{Index: proto.Uint32(0), EngineProcess: &process, PrefixFrame: []byte{0xff, 0xff}})
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Equal(r.refused, []string{"fenced", "prefix"}) || r.lost != 1 {
		t.Errorf("refused %v, lost %d", r.refused, r.lost)
	}
}

// A host writes into the views of its own workers only, whatever index, engine
// life and pull it names: all of these are easily guessed.
func TestHostsWriteIntoTheirOwnViewsOnly(t *testing.T) {
	r, s := newRig(t, &peer{}), newSession()
	r.up(s)
	p := s.next(t)
	r.answer(s, p, newStream(testKey, 1, 100).Snapshot()...)
	victim := r.info(t)
	before, ok := r.views.Stream(victim)
	if !ok || before.Keys < 4 {
		t.Fatalf("%+v", before)
	}
	other := &session{"gpu-02", make(chan *waypostv1.PrefixPull, 64)}
	r.views.LaneUp(other, r.opened(t, other.host))
	r.views.Sync(other, true)
	r.views.Distrust(worker, false) // the pull that another host would like to answer
	p = s.next(t)

	forged := newStream(testKey, 1, 10) // the same stream, further on, with less in it
	for range 3 {
		forged.Cleared()
		forged.Delta(time.Now())
	}
	frames, _ := forged.Replay(1)
	frames = append(forged.Snapshot(), frames...)
	for index := range uint32(3) {
		for _, f := range frames {
			r.views.TakeLoad(other, &waypostv1.WorkerLoad{Index: &index, EngineProcess: proto.Uint64(100), PrefixFrame: f})
		}
		r.views.TakePulled(other, &waypostv1.PrefixFrames{Index: &index, EngineProcess: proto.Uint64(100), Frames: frames, PullId: p.PullId, Last: proto.Bool(true)})
	}
	after, ok := r.views.Stream(victim)
	if !ok || after.Keys != before.Keys || after.Seq != before.Seq || after.StreamBytes != before.StreamBytes || r.index.WorkerKeys(prefixindex.WorkerID(victim.ID)) != before.Keys {
		t.Errorf("%+v, before %+v", after, before)
	}
	hs := r.views.known("gpu-01")
	hs.mu.Lock()
	if st := hs.streams[0]; st.pull != p.GetPullId() || !st.distrusted {
		t.Error("another host answered the pull")
	}
	hs.mu.Unlock()
	own, err := r.fleet.Worker(time.Now(), "gpu-02/vllm-8000/0")
	if err != nil {
		t.Fatal(err)
	}
	if st, ok := r.views.Stream(&own); !ok || st.StreamBytes == 0 || !st.InPlace {
		t.Errorf("its own view: %+v", st)
	}
}

func TestVerificationsAreBounded(t *testing.T) {
	var v verifier
	for range verifyAtOnce {
		if !v.begin() {
			t.Fatal("there is room")
		}
	}
	if v.begin() {
		t.Error("more run than may")
	}
	v.end()
	if !v.begin() {
		t.Error("what ended makes no room")
	}
}

func TestOptionsThatLack(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("views without a fleet")
	}
}
