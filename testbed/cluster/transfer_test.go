package cluster

import (
	"fmt"
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
	r := start(t, len(engines), 1, emulator.Options{BlockTokens: 16}, func(o *Options) {
		for i := range o.Engines {
			o.Engines[i].Transfer = &engines[i]
		}
	})
	if _, err := r.Operator(0).PutFleet(t.Context(), &waypostv1.PutFleetRequest{Toml: proto.String(fastLink), Message: proto.String("fast")}); err != nil {
		t.Fatal(err)
	}
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
	began := time.Now()
	cached, _, err := r.send(p, a)
	if err != nil {
		t.Fatal(err)
	}
	if want := (len(a.tokens) - 1) / 16; cached != want*16 || r.Engines[1].PulledBlocks() != int64(want) {
		t.Errorf("%d tokens reused, %d blocks read; want %d blocks", cached, r.Engines[1].PulledBlocks(), want)
	}
	r.outcome(p, a, cached, time.Since(began))
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
	if state := claims(1)(); state != "" {
		t.Error(state)
	}
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
