package cluster

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// fastLink declares that every engine reaches every other one quickly.
const fastLink = `version = 1
[[rack]]
name = "a1"
zone = "a"
hosts = ["gpu-*"]
[[zone]]
name = "a"
[[link]]
between = ["rack:a1", "rack:a1"]
bandwidth = "100Gbit/s"
latency = "20us"
`

// connected runs engines that can read each other's KV, each with a connector
// of its own, over a fast link.
func connected(t *testing.T, engines ...emulator.Transfer) *rig {
	t.Helper()
	return connectedTo(t, 1, engines...)
}

// connectedTo does so with a number of coordinators.
func connectedTo(t *testing.T, coordinators int, engines ...emulator.Transfer) *rig {
	t.Helper()
	r := start(t, len(engines), coordinators, emulator.Options{BlockTokens: 16}, func(o *Options) {
		for i := range o.Engines {
			o.Engines[i].Transfer = &engines[i]
		}
	})
	r.whileNoLeader(func() error {
		_, err := r.Operator(0).PutFleet(t.Context(), &waypostv1.PutFleetRequest{Toml: proto.String(fastLink), Message: proto.String("fast"), RequestId: proto.String("fast")})
		return err
	})
	return r
}

// outcome reports what an engine told of a placement.
func (r *rig) outcome(p *waypostv1.Placement, a ask, cached int, firstToken time.Duration) {
	r.t.Helper()
	resp, err := r.Placement(0).ReportOutcome(r.t.Context(), &waypostv1.ReportOutcomeRequest{
		PlacementId: p.PlacementId, Result: proto.String("done"), CachedTokens: proto.Uint32(uint32(cached)), PromptTokens: proto.Uint32(uint32(len(a.tokens))),
		FirstTokenMs: proto.Float64(float64(firstToken) / float64(time.Millisecond)),
	})
	if err != nil || !resp.GetJoined() {
		r.t.Fatalf("outcome of %s: %v %v", p.GetPlacementId(), resp, err)
	}
}

// topology asks the first coordinator.
func (r *rig) topology(req *waypostv1.GetTopologyRequest) *waypostv1.GetTopologyResponse {
	r.t.Helper()
	resp, err := r.Operator(0).GetTopology(r.t.Context(), req)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp
}

// held lets the first engine hold a prompt, and waits until that is known and
// nothing is under way.
func (r *rig) held(a ask) {
	r.t.Helper()
	holder := WorkerName(0, 0)
	p, err := r.place(0, ask{tokens: a.tokens, output: 1, exclude: r.others(holder)})
	if err != nil {
		r.t.Fatal(err)
	}
	cached, _, err := r.send(p, ask{tokens: a.tokens, output: 1})
	if err != nil {
		r.t.Fatal(err)
	}
	r.outcome(p, a, cached, time.Second)
	r.settled(holder, a, len(a.tokens), 16)
	for e := range r.Engines {
		r.eventually("the fleet does not come to rest", func() string {
			if w := r.worker(0, WorkerName(e, 0)); w.GetOpenClaims()+w.GetPendingClaims()+w.GetLive() > 0 {
				return w.String()
			}
			return ""
		})
	}
}

// others are all workers but one.
func (r *rig) others(worker string) (names []string) {
	for e := range r.Engines {
		if n := WorkerName(e, 0); n != worker {
			names = append(names, n)
		}
	}
	return names
}

// pulls places a prompt that the first engine holds anywhere but there.
func (r *rig) pulls(a ask) *waypostv1.Placement {
	r.t.Helper()
	a.exclude = []string{WorkerName(0, 0)}
	p, err := r.place(0, a)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

// What another engine holds is pulled from it when that is quicker than to
// compute it, and the outcome confirms it. Every part is real: facts are asked
// of the engines, the link is declared, the engine reads over its side channel.
func TestPullIsChosenAndConfirmed(t *testing.T) {
	t.Parallel()
	r := connected(t, emulator.Transfer{}, emulator.Transfer{})
	w := r.worker(0, WorkerName(1, 0))
	if f := w.GetTransfer(); f.GetConnector() != "OffloadingConnector" || f.GetSideChannel() != r.Engines[1].SideChannel() ||
		f.GetFingerprint() == "" || f.GetExportedTier() != "gpu" || f.GetKvBytesPerToken() != 131072 || w.GetRole() != "" {
		t.Fatalf("facts of the second engine: %v, role %q", f, w.GetRole())
	}
	a := ask{tokens: tokens(11, 12_000), output: 1}
	r.held(a)
	p := r.pulls(a)
	if p.GetPull().GetSource().GetName() != WorkerName(0, 0) || p.GetPull().GetTokens() < 11_000 || p.GetWorker().GetName() != WorkerName(1, 0) {
		t.Fatalf("placed on %s, pull %v, terms %v", p.GetWorker().GetName(), p.GetPull(), p.GetTerms())
	}
	if rec, err := r.record(0, p.GetPlacementId()); err != nil || rec.GetPlacement().GetPull().GetSource().GetName() != WorkerName(0, 0) || rec.GetPlacement().GetPull().GetTokens() != p.GetPull().GetTokens() {
		t.Errorf("the record tells of pull %v, %v", rec.GetPlacement().GetPull(), err)
	}
	cached, _, err := r.send(p, a)
	if err != nil {
		t.Fatal(err)
	}
	if want := (len(a.tokens) - 1) / 16; cached != want*16 || r.Engines[1].PulledBlocks() != int64(want) {
		t.Errorf("%d tokens reused, %d blocks read; want %d blocks", cached, r.Engines[1].PulledBlocks(), want)
	}
	// A first token this late is the transfer's, however slow the machine is.
	r.outcome(p, a, cached, time.Minute)
	topo := r.topology(&waypostv1.GetTopologyRequest{From: proto.String(HostName(0)), To: proto.String(WorkerName(1, 0))})
	if len(topo.GetPairs()) != 1 || topo.GetPairs()[0].GetFrom() != WorkerName(0, 0) || topo.GetPairs()[0].GetTo() != WorkerName(1, 0) ||
		topo.GetPairs()[0].GetMeasuredPulls() != 1 || !(topo.GetPairs()[0].GetMeasuredBytesPerSec() > 0) || topo.GetPairs()[0].GetOff() {
		t.Errorf("measured pairs: %v", topo.GetPairs())
	}
	if l := topo.GetLinks()[0]; l.GetName() != "rack a1 ↔ rack a1" || l.GetBandwidthSource() != "declared" || l.GetBytesPerSec() != 12.5e9 || l.GetMeasuredPulls() != 1 {
		t.Errorf("link %v", l)
	}
	if len(topo.GetPrices()) != 1 || topo.GetPrices()[0].GetReason() != "" || topo.GetPrices()[0].GetKvBytesPerToken() != 131072 || len(topo.GetPrices()[0].GetCosts()) != 3 {
		t.Fatalf("prices: %v", topo.GetPrices())
	}
	if c := topo.GetPrices()[0].GetCosts()[1]; c.GetTokens() != 8192 || c.GetTransferMs() < 8192*131072/12.5e6 || c.GetTransferMs() > c.GetComputeMs() {
		t.Errorf("price of 8k tokens: %v", c)
	}
	if h := topo.GetHosts(); len(h) != 2 || h[0].GetRack() != "a1" || h[0].GetSource() != "declared" || len(h[0].GetPulls()) != 1 {
		t.Errorf("hosts: %v", h)
	}
	// Now both hold it, and nobody has to read anything.
	r.settled(WorkerName(1, 0), a, len(a.tokens), 16)
	if p := r.pulls(a); p.GetPull() != nil {
		t.Errorf("pulled again: %v", p.GetPull())
	}
}

// Three pulls in a row that the engine did not do switch the pair off, and only
// that pair.
func TestUnconfirmedPairIsSwitchedOff(t *testing.T) {
	t.Parallel()
	r := connected(t, emulator.Transfer{}, emulator.Transfer{Deaf: true}, emulator.Transfer{})
	deaf, other := WorkerName(1, 0), WorkerName(2, 0)
	to := func(worker string, a ask) *waypostv1.Placement {
		t.Helper()
		a.exclude = r.others(worker)
		p, err := r.place(0, a)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for i := range 3 {
		a := ask{tokens: tokens(uint32(20+i), 12_000), output: 1}
		r.held(a)
		p := to(deaf, a)
		if p.GetPull() == nil {
			t.Fatalf("pull %d was not chosen: %v", i, p.GetTerms())
		}
		began := time.Now()
		cached, _, err := r.send(p, a)
		if err != nil || cached != 0 {
			t.Fatalf("the deaf engine reused %d: %v", cached, err)
		}
		r.outcome(p, a, cached, time.Since(began))
	}
	a := ask{tokens: tokens(30, 12_000), output: 1}
	r.held(a)
	if p := to(deaf, a); p.GetPull() != nil || p.GetTerms()[0].GetPullNote() != "pair is off: pulls were not confirmed" {
		t.Errorf("after three: pull %v, note %q", p.GetPull(), p.GetTerms()[0].GetPullNote())
	}
	pairs := r.topology(&waypostv1.GetTopologyRequest{}).GetPairs()
	if len(pairs) != 1 || pairs[0].GetTo() != deaf || !pairs[0].GetOff() || pairs[0].GetUnconfirmed() != 3 || !(pairs[0].GetOffForMs() > 0) || pairs[0].MeasuredPulls != nil {
		t.Errorf("pairs that are off: %v", pairs)
	}
	status, err := r.Operator(0).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil || !slices.ContainsFunc(status.GetProblems(), func(p *waypostv1.Problem) bool {
		return p.GetSubject() == WorkerName(0, 0)+" → "+deaf && p.GetNext() == "waypost topology --from "+WorkerName(0, 0)+" --to "+deaf
	}) {
		t.Errorf("status says nothing of it: %v %v", status.GetProblems(), err)
	}
	if p := to(other, a); p.GetPull() == nil {
		t.Errorf("another pair is off as well: %v", p.GetTerms())
	}
}

// A prefill and a decode worker are one placement with a claim on each, and
// what the first computes is in the second's cache when it decodes.
func TestPairIsOnePlacementWithTwoClaims(t *testing.T) {
	t.Parallel()
	r := connected(t, emulator.Transfer{Role: "kv_producer"}, emulator.Transfer{Role: "kv_consumer"})
	prefill, decode := WorkerName(0, 0), WorkerName(1, 0)
	if a, b := r.worker(0, prefill).GetRole(), r.worker(0, decode).GetRole(); a != "prefill" || b != "decode" {
		t.Fatalf("roles %q and %q", a, b)
	}
	claims := func(want uint32) func() string {
		return func() string {
			a, b := r.worker(0, prefill), r.worker(0, decode)
			if a.GetOpenClaims() == want && b.GetOpenClaims() == want {
				return ""
			}
			return fmt.Sprintf("%d and %d open claims", a.GetOpenClaims(), b.GetOpenClaims())
		}
	}
	a := ask{tokens: tokens(40, 4000), output: 8}
	p, err := r.place(0, a)
	if err != nil {
		t.Fatal(err)
	}
	if p.GetPrefillWorker().GetName() != prefill || p.GetWorker().GetName() != decode {
		t.Fatalf("prefill on %q, decode on %q", p.GetPrefillWorker().GetName(), p.GetWorker().GetName())
	}
	if rec, err := r.record(0, p.GetPlacementId()); err != nil || rec.GetPlacement().GetPrefillWorker().GetName() != prefill || rec.GetPlacement().GetWorker().GetName() != decode {
		t.Errorf("the record tells of prefill on %q, decode on %q, %v", rec.GetPlacement().GetPrefillWorker().GetName(), rec.GetPlacement().GetWorker().GetName(), err)
	}
	r.eventually("it has no claim on each", claims(1))
	began := time.Now()
	if _, _, err := r.sendTo(t.Context(), p.GetPrefillWorker(), ask{tokens: a.tokens, output: 1}); err != nil {
		t.Fatal(err)
	}
	cached, output, err := r.send(p, a)
	if err != nil || len(output) != 8 {
		t.Fatalf("decode: %d tokens, %v", len(output), err)
	}
	if want := (len(a.tokens) - 1) / 16 * 16; cached != want {
		t.Errorf("the decode worker had %d tokens of the prefill's, want %d", cached, want)
	}
	r.outcome(p, a, cached, time.Since(began))
	r.eventually("the claims do not end", claims(0))
}

// What one coordinator sees of transfers, the receiver's agent tells all: the
// other one switches a deaf pair off without a pull of its own, and so does one
// that starts anew, after the agent did.
func TestTransfersAreKnownToAllCoordinators(t *testing.T) {
	t.Parallel()
	r := connectedTo(t, 2, emulator.Transfer{}, emulator.Transfer{Deaf: true})
	deaf := WorkerName(1, 0)
	for i := range 3 {
		a := ask{tokens: tokens(uint32(20+i), 12_000), output: 1}
		r.held(a)
		p := r.pulls(a)
		if p.GetPull() == nil {
			t.Fatalf("pull %d was not chosen: %v", i, p.GetTerms())
		}
		cached, _, err := r.send(p, a)
		if err != nil || cached != 0 {
			t.Fatalf("the deaf engine reused %d: %v", cached, err)
		}
		r.outcome(p, a, cached, time.Second)
	}
	off := func(coordinator int) {
		t.Helper()
		r.eventually(fmt.Sprintf("coordinator %d does not know of the pair", coordinator), func() string {
			topo, err := r.Operator(coordinator).GetTopology(t.Context(), &waypostv1.GetTopologyRequest{})
			if err != nil {
				return err.Error()
			}
			if p := topo.GetPairs(); len(p) != 1 || p[0].GetFrom() != WorkerName(0, 0) || p[0].GetTo() != deaf || !p[0].GetOff() || p[0].GetUnconfirmed() != 3 {
				return fmt.Sprint(p)
			}
			return ""
		})
	}
	off(0)
	off(1)
	if err := r.StopAgent(1); err != nil {
		t.Fatal(err)
	}
	if err := r.StopCoordinator(1); err != nil {
		t.Fatal(err)
	}
	if err := r.StartCoordinator(1); err != nil {
		t.Fatal(err)
	}
	if err := r.StartAgent(1); err != nil {
		t.Fatal(err)
	}
	off(1)
	off(0) // which has heard them once
}
