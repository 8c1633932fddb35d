package coordinator

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	"waypost/gossip/summary/summarytest"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
)

// A probe of the mesh that is under way ends by its own time-out: the library's
// shutdown does not wait for it.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}

const testModel = "Llama-3.1-8B"

var testKey = prefix.ClusterKey{1, 2, 3}

// one is a running coordinator that is a cluster of itself, without TLS.
type one struct {
	*Coordinator
	conn *grpc.ClientConn
	stop sync.Once
}

// Stop is the coordinator's, once.
func (o *one) Stop(ctx context.Context) (err error) {
	o.stop.Do(func() { err = o.Coordinator.Stop(ctx) })
	return err
}

// testLogger takes what coordinators of a test log; nil: nobody does.
var testLogger *slog.Logger

func startOne(tb testing.TB, change ...func(*Config)) *one {
	return startOneOf(tb, "c-1", nil, change...)
}

// startOneOf starts a coordinator that makes a cluster of itself, or joins that
// of another one.
func startOneOf(tb testing.TB, name string, join *one, change ...func(*Config)) *one {
	tb.Helper()
	dir := tb.TempDir()
	key := filepath.Join(dir, "prefix.key")
	if err := os.WriteFile(key, fmt.Appendf(nil, "%x\n", testKey[:]), 0o600); err != nil {
		tb.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Name, cfg.StateDir, cfg.RunDir, cfg.Prefix.KeyFile = name, filepath.Join(dir, "state"), "", key
	cfg.Mesh.Listen, cfg.Cluster.Listen, cfg.API.Listen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	if join != nil {
		cfg.Cluster.Join = []daemon.HostPort{daemon.HostPort(join.ClusterAddress())}
	}
	for _, fn := range change {
		fn(&cfg)
	}
	c, err := New(Options{Config: cfg, Bootstrap: join == nil, Version: "test", Process: rand.Uint64() | 1, Logger: testLogger})
	if err != nil {
		tb.Fatal(err)
	}
	if err := c.Start(); err != nil {
		tb.Fatal(err)
	}
	conn, err := grpc.NewClient("passthrough:///"+c.APIAddress(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		tb.Fatal(err)
	}
	o := &one{Coordinator: c, conn: conn}
	tb.Cleanup(func() {
		if err := conn.Close(); err != nil {
			tb.Error(err)
		}
		if err := o.Stop(tb.Context()); err != nil && tb.Context().Err() == nil {
			tb.Error(err)
		}
	})
	return o
}

// fakeAgent speaks on a lane as an agent with a number of workers does. It
// answers a pull with what pulled returns and puts what frame returns on each
// LOAD of the first worker.
type fakeAgent struct {
	dialer  *lane.Dialer
	workers int
	every   time.Duration                        // of LOAD; 0: 20 ms
	pulled  func(*waypostv1.PrefixPull) [][]byte // nil result: no answer
	frame   func() []byte
	host    string                       // its name; empty: gpu-01
	process uint64                       // mark of the agent; 0: 0xa1
	facts   func(*waypostv1.WorkerFacts) // changes the facts of a worker; nil: nothing
	// boundaries are those of its engines; nil: it tells none.
	boundaries func() []*waypostv1.EngineBoundary
	// accuracy is how right predictions about its workers were; nil: not told.
	accuracy func() *waypostv1.WorkerAccuracy
	state    func(i int, l *ledger.Load) // changes the report of a worker; nil: nothing
	ageMs    func() *float64             // of the oldest change not told; nil: the agent does not say
	// asks answers questions about texts; nil: they are not answered.
	asks func(*lane.Lane, *waypostv1.ConnectResponse)

	mu    sync.Mutex
	seq   uint64
	pulls []*waypostv1.PrefixPull
	// claims and marks are those it was sent; it echoes nothing.
	claims []*waypostv1.ClaimFrame
	marks  []*waypostv1.MarkFrame
	// outcomes are those it was told of.
	outcomes []*waypostv1.ObservedOutcome
	// policy is the newest that it was told.
	policy *waypostv1.PolicyPush
}

func (a *fakeAgent) start(tb testing.TB, c *one) {
	tb.Helper()
	a.connect(tb, c)
}

// noStall is a time that no machine stands still for: a lane on which nothing can
// be written for a while stays, and with it what is on its way.
const noStall = time.Hour

// connect opens lanes to coordinators.
func (a *fakeAgent) connect(tb testing.TB, to ...*one) {
	tb.Helper()
	var err error
	a.dialer, err = lane.NewDialer(lane.DialerOptions{Hello: a.hello, Load: a.load, Handler: a, LoadEvery: cmp.Or(a.every, 20*time.Millisecond), StallAfter: noStall})
	if err != nil {
		tb.Fatal(err)
	}
	var addresses []string
	for _, c := range to {
		addresses = append(addresses, c.ClusterAddress())
	}
	if err := a.dialer.SetAddresses(lane.FromConfig, addresses); err != nil {
		tb.Fatal(err)
	}
	a.dialer.Start()
	tb.Cleanup(a.dialer.Close)
}

func (a *fakeAgent) hello() *waypostv1.AgentHello {
	h := &waypostv1.AgentHello{Host: new(cmp.Or(a.host, "gpu-01")), AgentProcess: new(cmp.Or(a.process, 0xa1)), Version: new("test"), PrefixKeyIds: []string{testKey.ID()}, PrefixFormat: new(prefixFormats[0])}
	prior := ledger.PriorFor(ledger.Class{Engine: "vllm", Model: testModel})
	for i := range a.workers {
		h.Workers = append(h.Workers, &waypostv1.WorkerFacts{
			Index: new(uint32(i)), Engine: new(fmt.Sprintf("vllm-%d", 8000+i)), Rank: new(uint32(0)), Ranks: new(uint32(1)), Kind: new("vllm"), EngineProcess: new(uint64(100 + i)),
			Model: new(testModel), Url: new(fmt.Sprintf("http://127.0.0.1:%d", 8000+i)), BlockTokens: new(uint32(16)), PoolBlocks: new(uint32(20_000)), MaxModelTokens: new(uint32(65536)),
			MaxRunning: new(uint32(256)), StepTokens: new(uint32(prior.StepTokens)), Coverage: new("full"), StepModel: lane.StepModelOf(&prior.Model),
		})
		if a.facts != nil {
			a.facts(h.Workers[i])
		}
	}
	if a.boundaries != nil {
		h.Boundaries = a.boundaries()
	}
	return h
}

func (a *fakeAgent) load(*lane.Lane) *waypostv1.Load {
	a.mu.Lock()
	a.seq++
	l := &waypostv1.Load{AgentProcess: new(cmp.Or(a.process, 0xa1)), LoadSeq: new(a.seq)}
	a.mu.Unlock()
	for i := range a.workers {
		r := ledger.Load{EngineProcess: uint64(100 + i), State: ledger.StateReady, Coverage: "full"}
		if a.state != nil {
			a.state(i, &r)
		}
		w := lane.WorkerLoadOf(uint32(i), &r)
		if i == 0 && a.frame != nil {
			w.PrefixFrame = a.frame()
		}
		if a.ageMs != nil {
			w.PrefixAgeMs = a.ageMs()
		}
		if a.accuracy != nil {
			w.Accuracy = a.accuracy()
		}
		l.Workers = append(l.Workers, w)
	}
	return l
}

func (*fakeAgent) LaneUp(*lane.Lane)          {}
func (*fakeAgent) LaneDown(*lane.Lane, error) {}

func (a *fakeAgent) Frame(l *lane.Lane, f *waypostv1.ConnectResponse) {
	a.mu.Lock()
	if c := f.GetClaims(); c != nil {
		a.claims = append(a.claims, c)
	}
	if m := f.GetMarks(); m != nil {
		a.marks = append(a.marks, m)
	}
	if p := f.GetPolicy(); p != nil {
		a.policy = p
	}
	a.outcomes = append(a.outcomes, f.GetOutcomes().GetOutcomes()...)
	a.mu.Unlock()
	if a.asks != nil {
		a.asks(l, f)
	}
	p := f.GetPull()
	if p == nil || p.GetIndex() != 0 {
		return
	}
	a.mu.Lock()
	a.pulls = append(a.pulls, p)
	a.mu.Unlock()
	if a.pulled == nil {
		return
	}
	if frames := a.pulled(p); frames != nil {
		// A lane that is down is dialled again.
		_ = l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: &waypostv1.PrefixFrames{
			Index: new(uint32(0)), EngineProcess: new(uint64(100)), Frames: frames, PullId: p.PullId, Last: proto.Bool(true),
		}}})
	}
}

func (a *fakeAgent) counts() (loads uint64, pulls int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.seq, len(a.pulls)
}

// eventually waits for a condition that other goroutines bring about.
func eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatalf("never: %s", what)
		}
	}
}

// cache is a block table with its encoder, driven by a test.
type cache struct {
	mu      sync.Mutex
	forest  *summarytest.Forest
	encoder *summary.Encoder
	last    uint32
	content uint64
}

func newCache(epoch uint32) *cache {
	f := summarytest.NewForest(16, prefix.Domain{Model: testModel})
	c := &cache{forest: f, encoder: summary.NewEncoder(summary.Options{Key: testKey, Blocks: f, Epoch: epoch})}
	f.Listener = c.encoder
	return c
}

// grow adds blocks to the only prompt and returns its tokens.
func (c *cache) grow(blocks int) []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range blocks {
		c.content++
		c.last = c.forest.Attach(c.last, 0, c.content, true)
	}
	c.forest.StoreEnded(c.last)
	return c.forest.Path(c.last)
}

func (c *cache) delta() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.encoder.Delta(time.Now())
}

func (c *cache) snapshot() [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.encoder.Snapshot()
}
