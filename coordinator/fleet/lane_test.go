package fleet

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

func TestSlotsAreDenseAndReusedAfterRemovalOnly(t *testing.T) {
	r := newRig(t, 3)
	ids := func() map[string]WorkerID {
		m := map[string]WorkerID{}
		for _, w := range r.f.Workers(at(0)) {
			m[w.Name] = w.ID
		}
		return m
	}
	before := ids()
	for name, id := range before {
		if int(id) > 2 {
			t.Errorf("%s has slot %d of 3", name, id)
		}
	}
	// Neither a lost lane nor a restart moves a worker.
	r.f.CloseLane(at(10), "gpu-01", r.lanes["gpu-01"])
	again := hello("gpu-01", 1)
	again.Session, again.Workers[0].EngineProcess = 2, 77
	r.open(20, again)
	if after := ids(); after["gpu-01/vllm-8000/0"] != before["gpu-01/vllm-8000/0"] {
		t.Errorf("the slot moved from %d to %d", before["gpu-01/vllm-8000/0"], after["gpu-01/vllm-8000/0"])
	}
	removed := r.remove(30, "gpu-01").Removed
	if len(removed) != 1 || removed[0] != before["gpu-01/vllm-8000/0"] {
		t.Fatalf("removed %v", removed)
	}
	appeared := r.open(40, hello("gpu-09", 1)).Appeared
	if len(appeared) != 1 || appeared[0] != removed[0] {
		t.Errorf("the new worker got slot %v, want the freed %v", appeared, removed)
	}
}

// Members are counted around, and say the same as Workers.
func TestMembersOfAPool(t *testing.T) {
	r := newRig(t, 3)
	r.loadAll(0)
	r.f.CloseLane(at(1), "gpu-01", r.lanes["gpu-01"])
	r.f.Tick(at(60_000))
	workers := r.f.Workers(at(60_000))
	for place := range 7 {
		name, host, ready, of := r.f.Member(workers[0].Pool, place)
		if want := workers[place%3]; name != want.Name || host != want.Host || ready != (want.State == "ready") || of != 3 {
			t.Errorf("member %d is %s of %s, ready %v, of %d; want %s, %s", place, name, host, ready, of, want.Name, want.State)
		}
	}
	if name, _, ready, of := r.f.Member("nobody's", 0); name != "" || ready || of != 0 {
		t.Errorf("of an unknown pool: %s %v %d", name, ready, of)
	}
}

// A fleet whose hosts come and go for ever has room for the next ones: who has
// been away for a day is forgotten with all that was known of it, whoever is
// there or was there today is not.
func TestHostsThatAreGoneAreForgotten(t *testing.T) {
	book := newKeyBook(t)
	r := newRig(t, 2, func(o *Options) { o.Predicted, o.MaxHosts = book, 3 })
	r.loadAll(0)
	const dayMs = 24 * 3600 * 1000
	r.f.CloseLane(at(10), "gpu-01", r.lanes["gpu-01"])
	for day := range 5 {
		name, base := fmt.Sprintf("pod-%d", day), float64(day)*2*dayMs
		r.open(base+100, hello(name, 1))
		r.f.CloseLane(at(base+200), name, r.lanes[name])
		if early := r.f.Tick(at(base + 200 + dayMs - 1)); day > 0 && len(early.Removed) > 0 || !r.f.HasHost(name) {
			t.Fatalf("day %d: removed too early: %v", day, early.Removed)
		}
		if r.f.Tick(at(base + 200 + dayMs)); r.f.HasHost(name) {
			t.Fatalf("day %d: %s is not forgotten", day, name)
		}
	}
	if hosts := r.f.Hosts(at(20 * dayMs)); len(hosts) != 1 || hosts[0].Name != "gpu-00" || len(r.f.Workers(at(20*dayMs))) != 1 {
		t.Errorf("hosts %+v", hosts)
	}
	if len(r.f.slots) > 3 || len(book.drops) != 6 {
		t.Errorf("%d slots, %d indexes dropped", len(r.f.slots), len(book.drops))
	}
}

func TestHelloNamesBadFields(t *testing.T) {
	for field, change := range map[string]func(*Hello){
		"host":                      func(h *Hello) { h.Host = "a/b" },
		"agentProcess":              func(h *Hello) { h.AgentProcess = 0 },
		"workers: 257":              func(h *Hello) { h.Workers = make([]Facts, 257) },
		"workers[0].engine":         func(h *Hello) { h.Workers[0].Engine = "" },
		"workers[1].index":          func(h *Hello) { h.Workers[1].Index = 0 },
		"workers[1].engine":         func(h *Hello) { h.Workers[1].Engine = h.Workers[0].Engine },
		"workers[0].rank":           func(h *Hello) { h.Workers[0].Rank = -1 },
		"workers[0].engineProcess":  func(h *Hello) { h.Workers[0].EngineProcess = 0 },
		"workers[0].poolBlocks":     func(h *Hello) { h.Workers[0].PoolBlocks = -1 },
		"workers[0].url":            func(h *Hello) { h.Workers[0].URL = strings.Repeat("x", 2000) },
		"workers[0].gpuUuids":       func(h *Hello) { h.Workers[0].GPUUUIDs = make([]string, 300) },
		"workers[0].stepModel":      func(h *Hello) { h.Workers[0].StepModel = &ledger.StepModel{P0Ms: math.NaN()} },
		"workers[0].maxModelTokens": func(h *Hello) { h.Workers[0].MaxModelTokens = -4 },
	} {
		f := newFleet(t)
		h := hello("gpu-01", 2)
		change(&h)
		_, _, err := f.OpenLane(at(0), h)
		if !errors.Is(err, ErrHello) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
		if n := len(f.Workers(at(0))) + len(f.Hosts(at(0))); n != 0 {
			t.Errorf("%s: a bad hello left %d workers and hosts", field, n)
		}
	}
}

func TestNewestSessionWins(t *testing.T) {
	r := newRig(t, 1)
	first := r.lanes["gpu-00"]
	second := hello("gpu-00", 1)
	second.Session = 2
	r.open(10, second)
	report := Report{AgentProcess: 0xa, LoadSeq: 1, Workers: []WorkerLoad{{Load: idle(1000)}}}
	if _, err := r.f.Load(at(20), "gpu-00", first, report); !errors.Is(err, ErrStaleLane) {
		t.Errorf("a frame of the old lane: %v", err)
	}
	if _, _, err := r.f.OpenLane(at(30), hello("gpu-00", 1)); !errors.Is(err, ErrStaleSession) {
		t.Errorf("the old session again: %v", err)
	}
	// Nobody changes the host's facts on its lane in another agent's name.
	other := hello("gpu-00", 2)
	other.AgentProcess = 0xb
	if _, err := r.f.UpdateHello(at(35), r.lanes["gpu-00"], other); !errors.Is(err, ErrHello) || len(r.f.Workers(at(35))) != 1 {
		t.Errorf("facts of another agent: %v", err)
	}
	// The end of the old lane does not make the host away.
	r.f.CloseLane(at(40), "gpu-00", first)
	if s := r.snapshot("gpu-00/vllm-8000/0"); !math.IsNaN(s.AwaySinceMs) {
		t.Error("the host is away although its lane is up")
	}
}

func TestTwoAgentsUnderOneName(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(1000)
	clone := hello("gpu-00", 1)
	clone.AgentProcess, clone.Workers[0].EngineProcess = 0xb, 55
	if _, _, err := r.f.OpenLane(at(1500), clone); !errors.Is(err, ErrConflict) {
		t.Fatalf("another agent was let in: %v", err)
	}
	if got := r.snapshot("gpu-00/vllm-8000/0").Process; got != 1000 {
		t.Errorf("the clone's engine %d is believed", got)
	}
	if hosts := r.f.Hosts(at(1600)); hosts[0].ConflictWith != 0xb {
		t.Errorf("the conflict is not shown: %+v", hosts[0])
	}
	r.load(1700, "gpu-00", idle(1000)) // the first keeps serving
	// An agent that restarted on a host whose old lane only looks alive gets
	// in once that lane is silent.
	if _, _, err := r.f.OpenLane(at(3699), clone); !errors.Is(err, ErrConflict) {
		t.Errorf("let in after 1,999 ms of silence: %v", err)
	}
	if _, _, err := r.f.OpenLane(at(3701), clone); err != nil {
		t.Errorf("refused after 2,001 ms of silence: %v", err)
	}
	if hosts := r.f.Hosts(at(90_000)); hosts[0].ConflictWith != 0 {
		t.Error("an old conflict is shown for ever")
	}
}

// What outcomes taught is of one life of the engine.
func TestJudgementOfAnotherLife(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(0)
	const name = "gpu-00/vllm-8000/0"
	id, process, _ := r.f.LookupWorker(name)
	failing := Judgement{Trust: .5, Failing: true, Why: "5 in a row failed"}
	r.f.Judge(at(10), id, process+1, failing)
	if s := r.snapshot(name); s.Doubted != placement.ReasonNone || !math.IsNaN(s.View.Trust) {
		t.Errorf("doubted %v, trust %v by what another life did", s.Doubted, s.View.Trust)
	}
	r.f.Judge(at(20), id, process, failing)
	if s := r.snapshot(name); s.Doubted != placement.ReasonFailing || s.DoubtedWhy != failing.Why || s.View.Trust != .5 {
		t.Errorf("doubted %v (%s), trust %v", s.Doubted, s.DoubtedWhy, s.View.Trust)
	}
	r.load(30, "gpu-00", idle(process+1))
	if s := r.snapshot(name); s.Doubted != placement.ReasonNone || !math.IsNaN(s.View.Trust) {
		t.Errorf("the next life starts as doubted %v, trust %v", s.Doubted, s.View.Trust)
	}
}

func TestEngineRestart(t *testing.T) {
	for _, by := range []string{"hello", "report"} {
		t.Run(by, func(t *testing.T) {
			book := newKeyBook(t)
			r := newRig(t, 1, func(o *Options) { o.Predicted = book })
			r.loadAll(0)
			const name = "gpu-00/vllm-8000/0"
			id, _, _ := r.f.LookupWorker(name)
			r.f.SetView(at(50), id, 1000, placement.ViewLive, 0)
			for _, request := range []string{"a", "b"} {
				r.claim(100, request, name, 500, func(n *NewClaim) {
					n.Keys, n.KeyDepths = append(n.Keys, 7), append(n.KeyDepths, 500)
				})
			}
			var changes Changes
			if by == "hello" {
				h := hello("gpu-00", 1)
				h.Workers[0].EngineProcess = 2000
				var err error
				if changes, err = r.f.UpdateHello(at(200), r.lanes["gpu-00"], h); err != nil {
					t.Fatal(err)
				}
			} else {
				changes = r.load(200, "gpu-00", idle(2000))
			}
			if len(changes.Restarted) != 1 || changes.Restarted[0] != (Restart{Worker: id, Old: 1000, New: 2000}) {
				t.Errorf("restarts %v", changes.Restarted)
			}
			if len(changes.Ended) != 2 || changes.Ended[0].How != EndWorkerLost {
				t.Errorf("ended %v, want both claims as worker_lost", changes.Ended)
			}
			s := r.snapshot(name)
			if s.Process != 2000 || s.View.Kind != placement.ViewBlind || s.OpenClaims != 0 || s.Waiting.QueueMs(200) != 0 {
				t.Errorf("after the restart: %+v", s)
			}
			if len(book.drops) != 1 || book.drops[0] != id {
				t.Errorf("the index was told to drop %v, want the worker once", book.drops)
			}
			if book.count() != 0 {
				t.Errorf("%d predicted key sets outlived their engine", book.count())
			}
			// What still speaks of the old life is fenced.
			late := idle(1000)
			late.QueueMs = ptr(9000.0)
			r.load(300, "gpu-00", late)
			if got := r.snapshot(name).Waiting.QueueMs(300); got != 0 {
				t.Errorf("a report of the old life sets the queue to %v", got)
			}
			r.f.SetView(at(310), id, 1000, placement.ViewLive, 0)
			if r.snapshot(name).View.Kind != placement.ViewBlind {
				t.Error("a view of the old life is believed")
			}
			_, _, _, err := r.f.Claim(at(320), NewClaim{
				Key: RequestKey{ID: "c"}, Attempt: 1, Placement: "pl_c", Worker: id,
				Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: 1, UncachedTokens: 1},
			})
			if !errors.Is(err, ErrFenced) {
				t.Errorf("a claim for the old life: %v", err)
			}
			if c := r.f.Counts(); c.FencedReports != 1 || c.FencedClaims != 1 {
				t.Errorf("counts %+v", c)
			}
		})
	}
}

func TestWorkersThatAreListedNoMore(t *testing.T) {
	r := newRig(t, 0)
	r.open(0, hello("gpu-00", 2))
	lane := r.lanes["gpu-00"]
	changes, err := r.f.UpdateHello(at(1000), lane, hello("gpu-00", 1))
	if err != nil || len(changes.Removed) != 0 {
		t.Fatalf("%v, removed %v", err, changes.Removed)
	}
	if got := r.state(1000, "gpu-00/vllm-8001/0"); got != "lost" {
		t.Errorf("state %q of a worker that is listed no more", got)
	}
	if got := r.f.Tick(at(600_999)).Removed; len(got) != 0 {
		t.Errorf("removed %v before its time", got)
	}
	if _, err := r.f.UpdateHello(at(601_000), lane, hello("gpu-00", 2)); err != nil {
		t.Fatal(err)
	}
	if got := r.f.Tick(at(700_000)).Removed; len(got) != 0 {
		t.Errorf("removed %v although it is back", got)
	}
	if _, err := r.f.UpdateHello(at(700_000), lane, hello("gpu-00", 1)); err != nil {
		t.Fatal(err)
	}
	if got := r.f.Tick(at(1_300_000)).Removed; len(got) != 1 {
		t.Errorf("removed %v, want the forgotten one", got)
	}
}

// The word that a worker is gone was missed: it gets no placements once it is in
// no report any more for as long as a host may be silent.
func TestDSC01MissedDeparture(t *testing.T) {
	r := newRig(t, 0)
	r.open(0, hello("gpu-00", 2))
	r.load(0, "gpu-00", idle(1000), func(p *Report) { p.Workers = append(p.Workers, WorkerLoad{Index: 1, Load: idle(1001)}) })
	if got := r.state(0, "gpu-00/vllm-8001/0"); got != "ready" {
		t.Fatalf("state %q while it is reported", got)
	}
	for ms := 1000.0; ms <= 40_000; ms += 1000 {
		r.load(ms, "gpu-00", idle(1000)) // of the first worker alone
	}
	policy := placement.DefaultPolicy()
	for i := range 20 {
		candidates, sit, err := r.f.Candidates(at(40_000), Query{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		var d placement.Decision
		req := placement.Request{ID: fmt.Sprint(i), PromptTokens: 100}
		if err := placement.Decide(&req, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		if got := candidates[d.Chosen].Name; got != worker0 {
			t.Fatalf("%s is chosen, whose agent says nothing of it", got)
		}
	}
}

func TestAway(t *testing.T) {
	r := newRig(t, 2)
	r.loadAll(1000)
	const name = "gpu-00/vllm-8000/0"
	if got := r.state(1000, name); got != "ready" {
		t.Fatalf("state %q", got)
	}
	changes := r.f.CloseLane(at(5000), "gpu-00", r.lanes["gpu-00"])
	if len(changes.States) != 1 || changes.States[0].From != "ready" || changes.States[0].To != "away" {
		t.Errorf("changes %+v", changes.States)
	}
	choose := func(ms float64) (string, placement.Marks) {
		candidates, sit, err := r.f.Candidates(at(ms), Query{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		candidates[1].Worker = ptr(*candidates[1].Worker) // busy, but known
		candidates[1].Worker.Waiting.F = ms + 20_000
		candidates[1].Worker.LoadAtMs = ms
		policy := placement.DefaultPolicy()
		var d placement.Decision
		req := placement.Request{ID: "r", PromptTokens: 100}
		if err := placement.Decide(&req, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		return candidates[d.Chosen].Name, d.Marks
	}
	if got, _ := choose(30_000); got != name {
		t.Errorf("25 s after its lane was lost: chose %s over it", got)
	}
	if got, _ := choose(65_001); got == name {
		t.Error("chosen 60 s after its lane was lost, with another worker there")
	}
	again := hello("gpu-00", 1)
	again.AgentProcess = 0xb // the agent restarted; the engine did not
	if changes := r.open(70_000, again); len(changes.Restarted) != 0 || len(changes.Appeared) != 0 {
		t.Errorf("changes %+v: the same engine came back", changes)
	}
	if s := r.snapshot(name); !math.IsNaN(s.AwaySinceMs) {
		t.Error("still away")
	}
}

func TestLateness(t *testing.T) {
	var l lateness
	const offset = 1e12 // the sender's clock began long before ours
	send := func(sentMs, transitMs float64) float64 {
		return math.Round(l.observe(sentMs+transitMs, uint64((sentMs+offset)*1e6))*1e3) / 1e3
	}
	for i := range 10 {
		if got := send(float64(i)*200, 3); got != 0 {
			t.Fatalf("frame %d: lateness %v on a steady way", i, got)
		}
	}
	if got := send(2000, 153); got != 150 {
		t.Errorf("lateness %v of a frame held up 150 ms", got)
	}
	if got := send(2200, 1); got != 0 {
		t.Errorf("lateness %v of the fastest frame", got)
	}
	if got := send(2400, 3); got != 2 {
		t.Errorf("lateness %v, want the 2 ms above the fastest", got)
	}
	// A way that stays longer becomes the norm after at most two windows.
	last := 0.0
	for ms := 2600.0; ms < 70_000; ms += 200 {
		last = send(ms, 43)
	}
	if last != 0 {
		t.Errorf("lateness %v long after the way grew", last)
	}
	// A clock that jumps back starts anew, it does not make frames late.
	if got := l.observe(80_000, 5e9); got != 0 {
		t.Errorf("lateness %v after the sender's clock went back", got)
	}
	if got := l.observe(80_200, 0); got != 0 {
		t.Errorf("lateness %v of a frame without send time", got)
	}
}

func TestOptionsNameBadFields(t *testing.T) {
	for field, options := range map[string]Options{
		"epoch":          {Process: 1},
		"process":        {Epoch: epoch},
		"reservationTTL": {Epoch: epoch, Process: 1, ReservationTTL: -1},
		"maxClaims":      {Epoch: epoch, Process: 1, MaxClaims: -1},
	} {
		if _, err := New(options); !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
}

func TestBoundsOfHostsAndWorkers(t *testing.T) {
	r := newRig(t, 2, func(o *Options) { o.MaxHosts, o.MaxWorkers = 2, 4 })
	if _, _, err := r.f.OpenLane(at(0), hello("gpu-07", 1)); !errors.Is(err, ErrFull) {
		t.Errorf("a third host: %v", err)
	}
	if _, err := r.f.UpdateHello(at(0), r.lanes["gpu-00"], hello("gpu-00", 4)); !errors.Is(err, ErrFull) {
		t.Errorf("workers over the bound: %v", err)
	}
	if got := len(r.f.Workers(at(0))); got != 2 {
		t.Errorf("%d workers after the refusals", got)
	}
	if _, err := r.f.UpdateHello(at(0), r.lanes["gpu-00"], hello("gpu-00", 3)); err != nil {
		t.Errorf("up to the bound: %v", err)
	}
}
