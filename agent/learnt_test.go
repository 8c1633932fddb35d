package agent

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"waypost/agent/engine"
	"waypost/agent/queue"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
)

func TestMain(m *testing.M) {
	// The tests of lying engines wait more than they compute.
	if err := flag.Set("test.parallel", "64"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

var testFacts = engine.Facts{Model: "m", Version: "0.32.0", BlockTokens: 16, PoolBlocks: 1000, MaxRunning: 8, StepTokens: 8192, StartMark: 7}

func testRank(restore *learnt) *rank {
	r := newRank(0, "vllm", "vllm-1", "gpu-01 http://127.0.0.1:1", 0, []prefix.ClusterKey{{1}}, 1000)
	r.agentProcess = 0xa1
	if restore != nil {
		r.restore = func(f engine.Facts, process uint64) (queue.State, bool) { return restore.of(r.local(), f, process) }
	}
	return r
}

// slowed is a rank that has learnt from marks that its engine is slow.
func slowed(t *testing.T) *rank {
	t.Helper()
	r := testRank(nil)
	r.setFacts(testFacts)
	prior := r.stepModel()
	steps := ledger.NewSteps(prior, testFacts.StepTokens, 0)
	slowMs := 3 * steps.PrefillMs(0, 4000)
	now := time.Now().Add(-time.Minute)
	for seq := uint64(1); seq <= 20; seq++ {
		o := ledger.Offer{Claim: ledger.Claim{Seq: seq, EngineProcess: r.process, PromptTokens: 4000, UncachedTokens: 4000, OutputTokens: 1}}
		if _, err := r.estimate.Claims(now, &ledger.ClaimFrame{Coordinator: 1, Agent: 0xa1, Prev: seq - 1, Offers: []ledger.Offer{o}}); err != nil {
			t.Fatal(err)
		}
		now = now.Add(time.Duration(slowMs * float64(time.Millisecond)))
		for _, what := range []ledger.Mark{ledger.MarkFirst, ledger.MarkDone} {
			if _, err := r.estimate.Marks(now, &ledger.MarkFrame{Coordinator: 1, Marks: []ledger.Marked{{Seq: seq, What: what}}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if r.stepModel() == prior {
		t.Fatal("nothing was learnt: the test proves nothing")
	}
	return r
}

// What was learnt is of the worker it was learnt of: the same engine life, or
// another one of the same model and version.
func TestLearntIsOfItsWorker(t *testing.T) {
	dir := t.TempDir()
	old := slowed(t)
	w, ok := old.export()
	if !ok {
		t.Fatal("nothing to keep")
	}
	if err := newLearnt(dir).write(map[string]learntWorker{old.local(): w}); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*engine.Facts)
		kept   bool
	}{
		"same life":                    {func(*engine.Facts) {}, true},
		"same life, version not told":  {func(f *engine.Facts) { f.Version = "" }, true},
		"another life":                 {func(f *engine.Facts) { f.StartMark = 8 }, true},
		"another life, newer engine":   {func(f *engine.Facts) { f.StartMark, f.Version = 8, "0.33.0" }, false},
		"another model":                {func(f *engine.Facts) { f.Model = "other" }, false},
		"another model, another life":  {func(f *engine.Facts) { f.Model, f.StartMark = "other", 8 }, false},
		"a start that is not told":     {func(f *engine.Facts) { f.StartMark = 0 }, true},
		"no start and another version": {func(f *engine.Facts) { f.StartMark, f.Version = 0, "1" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLearnt(dir)
			if err := l.read(); err != nil {
				t.Fatal(err)
			}
			facts := testFacts
			c.change(&facts)
			r := testRank(l)
			r.setFacts(facts)
			if learnt := r.stepModel().Source == ledger.SourceLearnt; learnt != c.kept {
				t.Errorf("model %+v: learnt %v, want %v", r.stepModel(), learnt, c.kept)
			}
		})
	}
}

// A file that cannot be used is told with what is wrong with it and changes
// nothing; the next one written takes its place at once.
func TestBadLearntFile(t *testing.T) {
	good, _ := slowed(t).export()
	dir := t.TempDir()
	path := filepath.Join(dir, learntFile)
	for name, c := range map[string]struct{ content, want string }{
		"no JSON":       {"{", "unexpected end"},
		"empty":         {"", "unexpected end"},
		"newer version": {`{"version":2}`, "version 2, this agent reads 1"},
		"bad mark":      {`{"version":1,"workers":{"e/0":{"process":"xyz"}}}`, `workers["e/0"].process: "xyz"`},
		"too big":       {strings.Repeat(" ", maxLearntBytes+1), "more than 33554432 bytes"},
		"wrong type":    {`{"version":1,"workers":[1]}`, "cannot unmarshal"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
				t.Fatal(err)
			}
			l := newLearnt(dir)
			if err := l.read(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
			if len(l.workers) != 0 {
				t.Errorf("workers %v", l.workers)
			}
			if err := l.write(map[string]learntWorker{"vllm-1/0": good}); err != nil {
				t.Fatal(err)
			}
			if err := newLearnt(dir).read(); err != nil {
				t.Error(err)
			}
		})
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v %v", entries, err)
	}
	if err := newLearnt(t.TempDir()).read(); err != nil {
		t.Errorf("no file: %v", err)
	}
}

// A state that no learning leads to is refused and counted; the worker starts
// from the prior.
func TestImpossibleStateIsRefused(t *testing.T) {
	l := newLearnt(t.TempDir())
	w, _ := slowed(t).export()
	w.State.Speeds.LnFactor = 1e9
	l.workers["vllm-1/0"] = w
	r := testRank(l)
	r.setFacts(testFacts)
	if r.stepModel().Source != ledger.SourcePrior || r.faults["learnt_refused"] != 1 {
		t.Errorf("model %+v, faults %v", r.stepModel(), r.faults)
	}
}

// A rank learns of each lane once, whichever comes first: the lane, the rank or
// the engine's facts.
func TestRankKnowsItsLanes(t *testing.T) {
	one, two := &lane.Lane{}, &lane.Lane{}
	r := testRank(nil)
	r.laneUp(one, 11)
	r.laneUp(one, 11)
	r.setFacts(testFacts)
	r.laneUp(two, 12)
	offer := func(coordinator uint64) {
		o := ledger.Offer{Claim: ledger.Claim{Seq: 1, EngineProcess: r.process, PromptTokens: 100, UncachedTokens: 100}}
		due, err := r.takeClaims(&ledger.ClaimFrame{Coordinator: coordinator, Agent: 0xa1, Offers: []ledger.Offer{o}})
		if err != nil || !due {
			t.Fatalf("claim of %d: due %v, %v", coordinator, due, err)
		}
		if _, err := r.takeMarks(&ledger.MarkFrame{Coordinator: coordinator, Marks: []ledger.Marked{{Seq: 1, What: ledger.MarkGone}}}); err != nil {
			t.Fatal(err)
		}
	}
	offer(11)
	offer(12)
	echoed := func(after time.Duration) map[uint64]uint64 {
		out := map[uint64]uint64{}
		r.report(time.Now().Add(after - time.Minute)) // ended claims leave first
		for _, e := range r.report(time.Now().Add(after)).load.Echo {
			out[e.Coordinator] = e.Upto
		}
		return out
	}
	r.laneDown(two)
	r.laneDown(two)
	// A coordinator without lane and claims is forgotten after two minutes, one
	// with a lane never.
	if e := echoed(10 * time.Minute); e[11] != 1 || len(e) != 1 {
		t.Errorf("echoes %v, want 11's alone", e)
	}
	r.laneDown(one)
	if e := echoed(30 * time.Minute); len(e) != 0 {
		t.Errorf("echoes %v without any lane", e)
	}
}

// A coordinator speaks for itself and for workers that are here; anything else
// is refused and counted.
func TestFramesOfCoordinatorsAreChecked(t *testing.T) {
	key := filepath.Join(t.TempDir(), "prefix.key")
	if err := os.WriteFile(key, []byte(strings.Repeat("01", 16)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Name, cfg.StateDir, cfg.RunDir, cfg.Prefix.KeyFile, cfg.GPU.Enabled, cfg.Metrics.Listen = "gpu-01", t.TempDir(), "", key, "off", ""
	cfg.Discover.Enabled = false
	cfg.Mesh.Listen = "127.0.0.1:0"
	registry := prometheus.NewRegistry()
	a, err := New(Options{Config: cfg, Process: 0xa1, Registerer: registry, Gatherer: registry})
	if err != nil {
		t.Fatal(err)
	}
	defer a.cancel()
	r := a.newRank(EngineConfig{Kind: "vllm", URL: "http://127.0.0.1:1"}, "vllm-1", 0)
	r.setFacts(testFacts)
	l := &lane.Lane{} // of a coordinator with mark 0
	offer := &waypostv1.Claim{Seq: new(uint64(1)), EngineProcess: &r.process, PromptTokens: new(uint32(10)), UncachedTokens: new(uint32(10))}
	frame := func(coordinator uint64, index uint32) *waypostv1.ConnectResponse {
		return &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Claims{Claims: &waypostv1.ClaimFrame{
			Coordinator: &coordinator, AgentProcess: &a.process, Index: &index, Claims: []*waypostv1.Claim{offer},
		}}}
	}
	a.lanes.Frame(l, frame(5, 0)) // another coordinator's
	a.lanes.Frame(l, frame(0, 9)) // no such worker
	a.lanes.Frame(l, frame(0, 0)) // a mark that none has
	a.lanes.Frame(l, &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Marks{Marks: &waypostv1.MarkFrame{Coordinator: new(uint64(5))}}})
	if open, kept := r.estimate.OpenClaims(); open+kept != 0 {
		t.Errorf("%d claims open, %d kept", open, kept)
	}
	refused := map[string]float64{}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "waypost_lane_frames_refused_total" {
				refused[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	if refused["claims"] != 3 || refused["marks"] != 1 {
		t.Errorf("refused %v, want 3 of claims and 1 of marks", refused)
	}
}

// A disk that hangs keeps nobody waiting who asks what was learnt: the worker
// that comes up meanwhile asks under its lock, which its load reports need.
func TestLearntWaitsForNoDisk(t *testing.T) {
	old := slowed(t)
	w, _ := old.export()
	l := newLearnt(t.TempDir())
	writing, goOn := make(chan struct{}), make(chan struct{})
	l.replace = func(file string, data []byte) error {
		close(writing)
		<-goOn
		return daemon.ReplaceFile(file, data)
	}
	written := make(chan error)
	go func() { written <- l.write(map[string]learntWorker{old.local(): w}) }()
	<-writing
	asked := make(chan ledger.StepModel)
	go func() {
		r := testRank(l)
		r.setFacts(testFacts)
		asked <- r.stepModel()
	}()
	select {
	case model := <-asked:
		if model != old.stepModel() {
			t.Error("what is being written is not known")
		}
	case <-time.After(30 * time.Second):
		t.Fatal("a worker waits for the disk")
	}
	close(goOn)
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	again := newLearnt(filepath.Dir(l.file))
	if err := again.read(); err != nil || len(again.workers) != 1 {
		t.Errorf("read %d workers, %v", len(again.workers), err)
	}
}
