package fleet

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"waypost/coordinator/group"
	"waypost/coordinator/placement"
)

const meeting = "10.0.0.1:29501"

// groupRig is a front with a share on another host, both up and well.
func groupRig(t *testing.T, change ...func(*Options)) *rig {
	t.Helper()
	r := newRig(t, 0, change...)
	r.open(0, frontHello())
	r.open(0, memberHello(21))
	r.load(10, "gpu-01", idle(1000), verdicts(11, "ok"))
	r.report(10, "gpu-02", 21, "ok")
	return r
}

func frontHello() Hello {
	h := hello("gpu-01", 1)
	h.Shares, h.LooksForShares = []group.Share{{Process: 11, Kind: "vllm", Engine: "vllm-8000", Meeting: meeting, Nodes: 2}}, true
	return h
}

func memberHello(process uint64) Hello {
	h := hello("gpu-02", 0)
	h.LooksForShares = true
	if process != 0 {
		h.Shares = []group.Share{{Process: process, Kind: "vllm", Meeting: meeting, Node: 1, Nodes: 2, GPUUUIDs: []string{"GPU-0000beef"}}}
	}
	return h
}

func verdicts(process uint64, verdict string) func(*Report) {
	return func(r *Report) { r.Shares = []ShareVerdict{{process, verdict}} }
}

// report sends a host's word about its share, without workers.
func (r *rig) report(ms float64, host string, process uint64, verdict string, change ...func(*Report)) Changes {
	r.t.Helper()
	r.seq++
	report := Report{AgentProcess: 0xa, LoadSeq: r.seq, Shares: []ShareVerdict{{process, verdict}}}
	for _, c := range change {
		c(&report)
	}
	changes, err := r.f.Load(at(ms), host, r.lanes[host], report)
	if err != nil {
		r.t.Fatalf("Load(%s): %v", host, err)
	}
	return changes
}

func (r *rig) groupState(ms float64) string {
	r.t.Helper()
	w, err := r.f.Worker(at(ms), "gpu-01/vllm-8000/0")
	if err != nil {
		r.t.Fatalf("%v", err)
	}
	return w.State + ": " + w.StateWhy
}

func (r *rig) wantState(ms float64, want string) {
	r.t.Helper()
	if got := r.groupState(ms); got != want {
		r.t.Fatalf("%q, want %q", got, want)
	}
}

// The worker of a group is as well as its worst member, and comes back with it.
func TestGroupIsAsWellAsItsWorstMember(t *testing.T) {
	r := groupRig(t)
	r.wantState(20, "ready: ")

	changes := r.report(30, "gpu-02", 21, "exclude:xid_79(gpu_0)")
	if len(changes.States) != 1 || changes.States[0].To != "excluded:gpu_fault" {
		t.Errorf("the change is not told: %+v", changes.States)
	}
	r.wantState(40, "excluded:gpu_fault: node 1 on gpu-02: xid_79(gpu_0)")
	if s := r.snapshot("gpu-01/vllm-8000/0"); s.Doubted != placement.ReasonGPUFault {
		t.Errorf("decisions see %v", s.Doubted)
	}
	r.report(50, "gpu-02", 21, "ok")
	r.wantState(60, "ready: ")

	// The front's own fault is told as its own.
	bad := idle(1000)
	bad.GPUVerdict = "exclude:xid_48"
	r.load(70, "gpu-01", bad)
	r.wantState(70, "excluded:gpu_fault: xid_48")
	r.load(80, "gpu-01", idle(1000))

	// A report that does not speak of the share leaves it unknown: no fault.
	r.report(90, "gpu-02", 99, "exclude:xid_79")
	r.wantState(90, "ready: ")
	if w, _ := r.f.Worker(at(90), "gpu-01/vllm-8000/0"); w.Members[0].State != group.Unknown {
		t.Errorf("what is not told is %s", w.Members[0].State)
	}
	r.report(95, "gpu-02", 21, "ok")

	r.f.CloseLane(at(100), "gpu-02", r.lanes["gpu-02"])
	r.wantState(100, "away: node 1 on gpu-02: the host's lane is lost")
	if s := r.snapshot("gpu-01/vllm-8000/0"); s.AwaySinceMs != 100 || s.Doubted != placement.ReasonNone {
		t.Errorf("away since %v, doubted for %v: a lane that is lost is doubt that grows", s.AwaySinceMs, s.Doubted)
	}
	r.open(200, memberHello(21))
	r.report(200, "gpu-02", 21, "ok")
	r.wantState(200, "ready: ")
	if s := r.snapshot("gpu-01/vllm-8000/0"); !math.IsNaN(s.AwaySinceMs) {
		t.Errorf("away since %v", s.AwaySinceMs)
	}

	// Its process ends, on a host that looks.
	if _, err := r.f.UpdateHello(at(300), r.lanes["gpu-02"], memberHello(0)); err != nil {
		t.Fatal(err)
	}
	r.wantState(300, "excluded:group_incomplete: node 1 on gpu-02: its process is gone")
	// The engine comes up again: what the former life's members did says nothing,
	// and who carries the share now is not known.
	again := frontHello()
	again.Workers[0].EngineProcess, again.Shares[0].Process = 2000, 12
	if _, err := r.f.UpdateHello(at(400), r.lanes["gpu-01"], again); err != nil {
		t.Fatal(err)
	}
	r.load(410, "gpu-01", idle(2000))
	r.wantState(410, "ready: ")
	if w, _ := r.f.Worker(at(410), "gpu-01/vllm-8000/0"); len(w.Members) != 1 || w.Members[0].State != group.Unknown || w.Members[0].Host != "" {
		t.Errorf("members %+v", w.Members)
	}
	if _, err := r.f.UpdateHello(at(420), r.lanes["gpu-02"], memberHello(22)); err != nil {
		t.Fatal(err)
	}
	r.report(430, "gpu-02", 22, "exclude:gpu_lost")
	r.wantState(430, "excluded:gpu_fault: node 1 on gpu-02: gpu_lost")
	if names := r.f.GroupWorkers("GPU-0000beef"); !slices.Equal(names, []string{"gpu-01/vllm-8000/0"}) {
		t.Errorf("the GPU of the share serves %v", names)
	}

	// It spans hosts no more.
	alone := frontHello()
	alone.Workers[0].EngineProcess, alone.Shares = 2000, nil
	if _, err := r.f.UpdateHello(at(500), r.lanes["gpu-01"], alone); err != nil {
		t.Fatal(err)
	}
	r.wantState(500, "ready: ")
	if len(r.f.fronts) != 0 {
		t.Errorf("%d fronts are left", len(r.f.fronts))
	}
}

// With the group declared, a share that nobody tells of counts as soon as there
// was time to tell it.
func TestDeclaredGroupMustBeWhole(t *testing.T) {
	r := newRig(t, 0)
	r.f.SetIntent(at(0), Intent{GroupOf: func(front string) (bool, func(string) bool) {
		return front == "gpu-01", func(other string) bool { return other == "gpu-02" }
	}})
	r.open(0, frontHello())
	r.load(10, "gpu-01", idle(1000), verdicts(11, "ok"))
	r.wantState(10, "ready: ")
	r.f.Tick(at(shareGraceMs - 1))
	r.wantState(shareGraceMs-1, "ready: ")
	r.f.Tick(at(shareGraceMs))
	r.wantState(shareGraceMs, "excluded:group_incomplete: node 1: no host tells of it")
	stranger := memberHello(31)
	stranger.Host = "gpu-09"
	r.open(shareGraceMs, stranger)
	r.wantState(shareGraceMs, "excluded:group_incomplete: node 1: gpu-09 tells of it, and no [[group]] of the fleet file has it together with gpu-01")
	r.open(shareGraceMs, memberHello(21))
	r.wantState(shareGraceMs, "ready: ")
	// Undeclared it need not be told of.
	r.f.CloseLane(at(shareGraceMs), "gpu-02", r.lanes["gpu-02"])
	r.f.CloseLane(at(shareGraceMs), "gpu-09", r.lanes["gpu-09"])
	r.f.SetIntent(at(shareGraceMs), Intent{})
	r.wantState(shareGraceMs, "away: node 1 on gpu-02: the host's lane is lost; told of by gpu-09 as well")
}

// A cordon, a newer policy and a host's own wish hold for the worker of a group
// wherever the share is.
func TestCordonOfAMember(t *testing.T) {
	r := groupRig(t)
	var asked []group.Member
	r.f.SetIntent(at(20), Intent{Version: 3, Assign: func(id Identity) Assignment {
		asked = id.Members
		return Assignment{Pool: "m", Cordoned: slices.ContainsFunc(id.Members, func(m group.Member) bool { return m.SelectedBy("gpu-0000BEEF") }), Why: "by anna: fan"}
	}})
	if len(asked) != 1 || asked[0].Host != "gpu-02" {
		t.Errorf("intent was asked about %+v", asked)
	}
	r.wantState(20, "cordoned: by anna: fan")
	r.f.SetIntent(at(30), Intent{Version: 4})
	r.wantState(30, "ready: ")

	newer := func(rep *Report) { rep.PolicyVersion, rep.Cordons = 9, []string{"gpu-02"} }
	r.report(40, "gpu-02", 21, "ok", newer)
	r.wantState(40, "cordoned: as gpu-02, which carries a share, was told by a newer policy: gpu-02")
	r.report(50, "gpu-02", 21, "ok", func(rep *Report) { rep.PolicyVersion, rep.Cordons = 9, []string{"gpu-02/vllm-1"} })
	r.wantState(50, "ready: ")
	r.report(60, "gpu-02", 21, "ok", func(rep *Report) { rep.Wish = DrainWish{"w1", "fan"} })
	r.wantState(60, "cordoned: by gpu-02 itself (drain --local), which carries a share: fan")
	if w, _ := r.f.Worker(at(60), "gpu-01/vllm-8000/0"); w.WishHost != "gpu-02" || w.Wish.ID != "w1" {
		t.Errorf("wished by %s: %+v", w.WishHost, w.Wish)
	}
	r.report(70, "gpu-02", 21, "ok")
	r.wantState(70, "ready: ")
}

// A host that is forgotten is missing, a worker that is forgotten leaves no group.
func TestForgottenMembers(t *testing.T) {
	r := groupRig(t)
	r.f.CloseLane(at(100), "gpu-02", r.lanes["gpu-02"])
	day := durationMs(r.f.options.ForgetHostAfter)
	r.load(day, "gpu-01", idle(1000))
	r.f.Tick(at(day + 200))
	r.wantState(day+200, "excluded:group_incomplete: node 1 on gpu-02: the host is known no more")
	r.f.CloseLane(at(day+300), "gpu-01", r.lanes["gpu-01"])
	r.f.Tick(at(2*day + 400))
	if len(r.f.fronts) != 0 || len(r.f.byName) != 0 {
		t.Errorf("%d fronts, %d workers are left", len(r.f.fronts), len(r.f.byName))
	}
}

func TestBadShares(t *testing.T) {
	f := newFleet(t)
	for what, change := range map[string]func(*Hello){
		"shares[0]: process":         func(h *Hello) { h.Shares[0].Process = 0 },
		"shares[1].process: 0000000": func(h *Hello) { h.Shares = append(h.Shares, h.Shares[0]) },
		"shares: 65 are more":        func(h *Hello) { h.Shares = make([]group.Share, 65) },
	} {
		h := frontHello()
		change(&h)
		if _, _, err := f.OpenLane(at(0), h); !errors.Is(err, ErrHello) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	r := groupRig(t)
	if _, err := r.f.Load(at(20), "gpu-02", r.lanes["gpu-02"], Report{AgentProcess: 0xa, LoadSeq: 99, Shares: []ShareVerdict{{21, strings.Repeat("x", 600)}}}); !errors.Is(err, ErrReport) {
		t.Errorf("a verdict of 600 bytes: %v", err)
	}
}
