package fleet

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

const worker0 = "gpu-00/vllm-8000/0"

func TestReportAges(t *testing.T) {
	r := newRig(t, 1)
	l := idle(1000)
	l.QueueMs, l.AgeMs = ptr(500.0), ptr(40.0)
	r.load(1000, "gpu-00", l, func(p *Report) { p.SentMonoNs = 9_000_000_000 })
	if s := r.snapshot(worker0); s.LoadAtMs != 960 || s.Waiting.QueueMs(1000) != 500 {
		t.Errorf("facts at %v, queue %v, want 960 and 500", s.LoadAtMs, s.Waiting.QueueMs(1000))
	}
	// Held up 300 ms on the way: older by that, and drained by that.
	r.load(1500, "gpu-00", l, func(p *Report) { p.SentMonoNs = 9_200_000_000 })
	if s := r.snapshot(worker0); s.LoadAtMs != 1160 || s.Waiting.QueueMs(1500) != 200 {
		t.Errorf("facts at %v, queue %v, want 1160 and 200", s.LoadAtMs, s.Waiting.QueueMs(1500))
	}
	id, process, _ := r.f.LookupWorker(worker0)
	r.f.SetView(at(1600), id, process, placement.ViewLive, 100*time.Millisecond)
	if s := r.snapshot(worker0); s.View.AtMs != 1600-100-300 {
		t.Errorf("view at %v, want 1200: its age and the lane's lateness", s.View.AtMs)
	}
}

// Another agent's clock has nothing to do with the former one's.
func TestLatenessStartsAnewWithTheLane(t *testing.T) {
	r := newRig(t, 1)
	sent := func(ns uint64) func(*Report) { return func(p *Report) { p.SentMonoNs = ns } }
	r.load(1000, "gpu-00", idle(1000), sent(9e9))
	r.f.CloseLane(at(2000), "gpu-00", r.lanes["gpu-00"])
	r.open(100_000, hello("gpu-00", 1))
	r.load(101_000, "gpu-00", idle(1000), sent(50e9)) // 59 s behind the former
	if got := r.snapshot(worker0).LoadAtMs; got != 101_000 {
		t.Errorf("facts at %v, want 101,000", got)
	}
}

// A report that another agent of the host made before the lane was taken over
// says nothing of this one's workers.
func TestReportOfAnotherAgent(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(1000)
	busy := idle(1000)
	busy.QueueMs = ptr(700.0)
	report := Report{AgentProcess: 0xb, LoadSeq: 99, Workers: []WorkerLoad{{Load: busy}}}
	if _, err := r.f.Load(at(1100), "gpu-00", r.lanes["gpu-00"], report); !errors.Is(err, ErrStaleLane) {
		t.Errorf("error %v", err)
	}
	if got := r.snapshot(worker0).Waiting.QueueMs(1100); got != 0 {
		t.Errorf("queue %v after a report of another agent", got)
	}
	r.load(1200, "gpu-00", busy) // numbers of its own go on
	if got := r.snapshot(worker0).Waiting.QueueMs(1200); got != 700 {
		t.Errorf("queue %v, want 700", got)
	}
}

func TestReportsInOrder(t *testing.T) {
	r := newRig(t, 1)
	r.load(1000, "gpu-00", idle(1000), func(p *Report) { p.LoadSeq = 10 })
	late := idle(1000)
	late.QueueMs = ptr(700.0)
	for _, seq := range []uint64{9, 10} {
		r.load(1100, "gpu-00", late, func(p *Report) { p.LoadSeq = seq })
	}
	if got := r.snapshot(worker0).Waiting.QueueMs(1100); got != 0 || r.f.Counts().OldReports != 2 {
		t.Errorf("queue %v after reports that were not newer, counts %+v", got, r.f.Counts())
	}
}

func TestBadReportChangesNothing(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(0)
	for field, change := range map[string]func(*Report){
		"workers[1]: bad load report: queueMs": func(p *Report) {
			p.Workers[0].QueueMs = ptr(50.0)
			p.Workers = append(p.Workers, WorkerLoad{Index: 1, Load: ledger.Load{QueueMs: ptr(math.NaN())}})
		},
		"cordons":    func(p *Report) { p.Cordons = make([]string, 5000) },
		"cordons[0]": func(p *Report) { p.Cordons = []string{strings.Repeat("x", 600)} },
		"workers":    func(p *Report) { p.Workers = make([]WorkerLoad, 300) },
	} {
		report := Report{AgentProcess: 0xa, LoadSeq: 1e6, Workers: []WorkerLoad{{Load: idle(1000)}}}
		change(&report)
		_, err := r.f.Load(at(100), "gpu-00", r.lanes["gpu-00"], report)
		if !errors.Is(err, ErrReport) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
	if s := r.snapshot(worker0); s.Waiting.QueueMs(100) != 0 {
		t.Error("a bad report was taken in part")
	}
	r.load(200, "gpu-00", idle(1000)) // its seq was not used up either
	if r.snapshot(worker0).LoadAtMs != 200 {
		t.Error("reports after a bad one are refused")
	}
}

// Facts that a report does not tell are unknown in the snapshot, not zero.
func TestMissingIsUnknown(t *testing.T) {
	r := newRig(t, 1)
	r.load(100, "gpu-00", ledger.Load{EngineProcess: 1000, State: ledger.StateReady})
	s := r.snapshot(worker0)
	for name, v := range map[string]float64{
		"decoding": s.Decoding, "context": s.ContextTokens, "live": s.Live, "held": s.HeldBlocks,
		"gap": s.GapMs, "mean output": s.MeanOutputTokens, "finish": s.FinishPerSec, "error": s.ErrorMs,
		"eviction age": s.View.EvictionAgeMs, "trust": s.View.Trust, "view": s.View.AtMs,
	} {
		if !math.IsNaN(v) {
			t.Errorf("%s = %v", name, v)
		}
	}
	info, _ := r.f.Worker(at(100), worker0)
	if s.QueueKnown || !math.IsNaN(info.WaitMs) {
		t.Errorf("queue known %v, wait %v", s.QueueKnown, info.WaitMs)
	}
	// The claim here is a lower bound beside the unknown rest.
	r.claim(200, "a", worker0, 300)
	if s = r.snapshot(worker0); !math.IsNaN(s.Live) || s.OpenClaims != 1 || s.Waiting.QueueMs(200) != 300 {
		t.Errorf("live %v, open claims %v, queue %v", s.Live, s.OpenClaims, s.Waiting.QueueMs(200))
	}
}

func TestStates(t *testing.T) {
	for _, test := range []struct {
		change  func(*ledger.Load)
		word    string
		barred  placement.Reason
		doubted placement.Reason
	}{
		{func(*ledger.Load) {}, "ready", 0, 0},
		{func(l *ledger.Load) { l.State = ledger.StateStarting }, "starting", 0, placement.ReasonStarting},
		{func(l *ledger.Load) { l.State = ledger.StateSleeping }, "sleeping", 0, placement.ReasonSleeping},
		{func(l *ledger.Load) { l.State = ledger.StateStalled }, "stalled", 0, placement.ReasonStalled},
		{func(l *ledger.Load) { l.State = ledger.StateLost }, "lost", placement.ReasonLost, 0},
		{func(l *ledger.Load) { l.State = "stopping" }, "stopping", 0, placement.ReasonNotReady},
		{func(l *ledger.Load) { l.GPUVerdict = "exclude: xid_79" }, "excluded:gpu_fault", 0, placement.ReasonGPUFault},
		{func(l *ledger.Load) { l.GPUVerdict = "price: thermal_throttle" }, "ready", 0, 0},
		{func(l *ledger.Load) { l.GPUVerdict = "ok" }, "ready", 0, 0},
	} {
		r := newRig(t, 1)
		if got := r.state(0, worker0); got != "starting" {
			t.Errorf("state %q before the first report", got)
		}
		l := idle(1000)
		test.change(&l)
		r.load(100, "gpu-00", l)
		s := r.snapshot(worker0)
		if got := r.state(100, worker0); got != test.word || s.Barred != test.barred || s.Doubted != test.doubted {
			t.Errorf("state %q, barred %q, doubted %q; want %q, %q, %q", got, s.Barred, s.Doubted, test.word, test.barred, test.doubted)
		}
	}
}

// A lost engine gives its claims back at once.
func TestLostEngineEndsItsClaims(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(0)
	for _, id := range []string{"a", "b", "c"} {
		r.claim(100, id, worker0, 100)
	}
	gone := idle(1000)
	gone.State, gone.StateReason = ledger.StateLost, "process 4121 exited (signal 9)"
	changes := r.load(200, "gpu-00", gone)
	if len(changes.Ended) != 3 || changes.Ended[0].How != EndWorkerLost || r.f.OpenClaims() != 0 {
		t.Errorf("ended %v, %d open", changes.Ended, r.f.OpenClaims())
	}
	if len(changes.States) != 1 || changes.States[0].To != "lost" || changes.States[0].Why != gone.StateReason {
		t.Errorf("states %+v", changes.States)
	}
}

func cordons(selectors ...string) func(Identity) Assignment {
	return func(i Identity) Assignment {
		a := Assignment{Pool: i.Model}
		for _, s := range selectors {
			if s == i.Host || s == i.Name {
				a.Cordoned, a.Why = true, "fan swap, by anna"
			}
		}
		return a
	}
}

// The newer of the coordinator's own intent and what the host was told holds,
// on both sides of a partition.
func TestCordons(t *testing.T) {
	r := newRig(t, 2)
	told := func(ms float64, version uint64, selectors ...string) {
		t.Helper()
		r.load(ms, "gpu-00", idle(1000), func(p *Report) { p.PolicyVersion, p.Cordons = version, selectors })
	}
	check := func(what string, want string) {
		t.Helper()
		if got := r.state(0, worker0); got != want {
			t.Errorf("%s: %s is %s, want %s", what, worker0, got, want)
		}
		if got := r.state(0, "gpu-01/vllm-8000/0"); got == "cordoned" {
			t.Errorf("%s: the other host is cordoned as well", what)
		}
	}
	r.f.SetIntent(at(0), Intent{Version: 5, Assign: cordons()})
	told(100, 5)
	check("nothing wanted", "ready")
	r.f.SetIntent(at(200), Intent{Version: 6, Assign: cordons("gpu-00")})
	check("cordoned here, the host not told yet", "cordoned")
	told(300, 5)
	check("an older word of the host", "cordoned")
	if s := r.snapshot(worker0); s.BarredWhy != "fan swap, by anna" {
		t.Errorf("why %q", s.BarredWhy)
	}
	_, process, _ := r.f.LookupWorker(worker0)
	_, _, _, err := r.f.Claim(at(310), NewClaim{
		Key: RequestKey{ID: "x"}, Attempt: 1, Placement: "pl_x", Worker: 0,
		Claim: ledger.Claim{EngineProcess: process, PromptTokens: 1, UncachedTokens: 1},
	})
	if !errors.Is(err, ErrBarred) {
		t.Errorf("a claim decided before the cordon: %v", err)
	}
	// The other side took it back at 7; here nothing is known of that.
	told(400, 7)
	check("taken back by a newer policy", "ready")
	told(500, 8, "gpu-00/vllm-8000")
	check("its engine cordoned by a newer policy", "cordoned")
	told(600, 9, "GPU-00000000")
	check("its GPU cordoned by a newer policy", "cordoned")
	told(700, 10, "gpu-00/vllm-9999", "gpu-01")
	check("others cordoned by a newer policy", "ready")
	r.f.SetIntent(at(800), Intent{Version: 11, Assign: cordons(worker0)})
	check("cordoned here, newest", "cordoned")
	r.f.SetIntent(at(900), Intent{Version: 12, Assign: cordons()})
	check("taken back here", "ready")
	told(1000, 12, "gpu-00")
	check("of equal versions the own intent is the authority", "ready")
}

// What a host wants for itself holds with no word of a leader, for that host
// alone, until it wants it no more.
func TestHostWishesToBeDrained(t *testing.T) {
	r := newRig(t, 2)
	wish := DrainWish{ID: "1", Reason: "fans"}
	r.load(100, "gpu-00", idle(1000), func(p *Report) { p.Wish = wish })
	if got, other := r.state(110, worker0), r.state(110, "gpu-01/vllm-8000/0"); got != "cordoned" || other == "cordoned" {
		t.Errorf("states %s and %s, want cordoned and the other host's as it was", got, other)
	}
	if s := r.snapshot(worker0); s.BarredWhy != "by the host itself (drain --local): fans" {
		t.Errorf("why %q", s.BarredWhy)
	}
	if got := r.f.DrainWishes(); len(got) != 1 || got["gpu-00"] != wish {
		t.Errorf("wishes %v", got)
	}
	r.load(200, "gpu-00", idle(1000))
	if got := r.state(210, worker0); got != "ready" || len(r.f.DrainWishes()) != 0 {
		t.Errorf("after it is taken back: %s, wishes %v", got, r.f.DrainWishes())
	}
}

func TestCordonsSurviveALostLane(t *testing.T) {
	r := newRig(t, 1)
	r.load(100, "gpu-00", idle(1000), func(p *Report) { p.PolicyVersion, p.Cordons = 3, []string{"gpu-00"} })
	r.f.CloseLane(at(200), "gpu-00", r.lanes["gpu-00"])
	if got := r.state(300, worker0); got != "cordoned" {
		t.Errorf("state %q", got)
	}
}

// On the side of a partition that knows an older policy a drained host stays so
// over a restart of its agent, which has heard of nothing newer yet.
func TestCordonsSurviveTheAgent(t *testing.T) {
	r := newRig(t, 1)
	r.f.SetIntent(at(0), Intent{Version: 2, Assign: cordons()})
	r.load(100, "gpu-00", idle(1000), func(p *Report) { p.PolicyVersion, p.Cordons = 3, []string{"gpu-00"} })
	r.f.CloseLane(at(200), "gpu-00", r.lanes["gpu-00"])
	next := hello("gpu-00", 1)
	next.AgentProcess = 0xb
	r.open(300, next)
	r.seq = 0
	told := func(ms float64, version uint64, want string, selectors ...string) {
		t.Helper()
		r.load(ms, "gpu-00", idle(1000), func(p *Report) { p.AgentProcess, p.PolicyVersion, p.Cordons = 0xb, version, selectors })
		if got := r.state(ms, worker0); got != want {
			t.Errorf("told of version %d: %s, want %s", version, got, want)
		}
	}
	if got := r.state(300, worker0); got != "cordoned" {
		t.Errorf("before it reports: %s", got)
	}
	told(400, 0, "cordoned")
	told(500, 2, "cordoned")
	told(600, 4, "ready") // taken back by the other side
	told(700, 5, "cordoned", "gpu-00")
	r.f.SetIntent(at(800), Intent{Version: 6, Assign: cordons()})
	if got := r.state(800, worker0); got != "ready" {
		t.Errorf("taken back by what is newer here: %s", got)
	}
}
