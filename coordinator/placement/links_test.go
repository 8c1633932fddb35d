package placement

import (
	"fmt"
	"math"
	"testing"
)

func TestLinkRates(t *testing.T) {
	var r LinkRates
	pair, back := Pair{"a", "b"}, Pair{"b", "a"}
	declared := Path{Link: "l", BytesPerMs: 100, Figure: FigureDeclared}
	if got := r.Measured(0, pair, declared); got != declared {
		t.Errorf("nothing seen: %+v", got)
	}
	for _, nothing := range [][2]float64{{0, 1}, {1, 0}, {-1, 1}, {math.NaN(), 1}, {1, math.NaN()}, {math.Inf(1), 1}, {1e12, 1}} {
		r.Note(0, "l", pair, nothing[0], nothing[1], 0)
	}
	if _, ok := r.OfLink(0, "l"); ok {
		t.Error("what is no transfer was noted")
	}
	// Three others had their shares; long transfers tell more than short ones.
	for i := range MeasuredTransfers {
		r.Note(float64(i), "l", pair, 1000, 80, 3)
		r.Note(float64(i), "l", pair, 1, 10, -5)
		if got := r.Measured(1e3, pair, declared); (i < MeasuredTransfers/2-1) != (got == declared) {
			t.Fatalf("after %d transfers: %+v", 2*(i+1), got)
		}
	}
	want := 4001. / 90
	if s, _ := r.OfPair(1e3, pair); math.Abs(s.BytesPerMs-want) > 1 || s.Transfers != 2*MeasuredTransfers || s.AtMs != MeasuredTransfers-1 {
		t.Errorf("seen %+v, want about %v", s, want)
	}
	// A pair's own rate goes before its link's; the other way is another pair.
	for range MeasuredTransfers {
		r.Note(1e3, "l", back, 7000, 1000, 0)
	}
	if got := r.Measured(1e3, back, declared); got.Figure != FigureMeasured || math.Abs(got.BytesPerMs-7) > 1e-9 {
		t.Errorf("back: %+v", got)
	}
	if got := r.Measured(1e3, pair, declared); math.Abs(got.BytesPerMs-want) > 1 {
		t.Errorf("forth: %+v", got)
	}
	if got := r.Measured(1e3, Pair{"c", "d"}, declared); got.Figure != FigureMeasured || got.BytesPerMs > want {
		t.Errorf("another pair on the link: %+v", got)
	}
	if got := r.Measured(1e3+RateKeptMs+1, pair, declared); got != declared || len(r.Pairs(1e3+RateKeptMs+1)) != 0 {
		t.Errorf("an hour later: %+v", got)
	}
	if len(r.Pairs(1e3)) != 2 {
		t.Errorf("pairs %v", r.Pairs(1e3))
	}
	// It is bounded, and the oldest goes.
	for i := range maxRates + 10 {
		r.Note(2e3+float64(i), "l", Pair{fmt.Sprint(i), "x"}, 1, 1, 0)
	}
	if len(r.pairs) != maxRates {
		t.Errorf("%d pairs are kept", len(r.pairs))
	}
	if _, ok := r.OfPair(3e3, pair); ok {
		t.Error("the oldest pair stayed")
	}
}

// TOP-02, TOP-03: what is moved and what is computed is a matter of the rate,
// and the price says both.
func TestPriceTransfer(t *testing.T) {
	from, to := testWorker(1, "gpu-01/v/0", 0), testWorker(2, "gpu-02/v/0", 0)
	policy := DefaultPolicy()
	path := Path{Link: "l", BytesPerMs: 500_000, LatencyMs: 1, UnderWay: 5}
	if p, note := PriceTransfer(&policy, &from, &to, &path, 8000); !math.IsNaN(p.TransferMs) || !(p.ComputeMs > 0) || note != PullNoConnector {
		t.Errorf("without connectors: %+v %v", p, note)
	}
	transfer := Transfer{Connector: "c", SideChannel: "h:1", Fingerprint: "f", ExportedTier: TierGPU, BytesPerToken: 131072}
	from.Transfer, to.Transfer = &transfer, &transfer
	slow, note := PriceTransfer(&policy, &from, &to, &path, 8000)
	if want := policy.TransferSetupMs + 1 + 8000*131072/500_000.; math.Abs(slow.TransferMs-want) > 1e-9 || note != PullNone || slow.TransferMs < slow.ComputeMs {
		t.Errorf("0.5 GB/s: %+v %v, want %v ms", slow, note, want)
	}
	path.BytesPerMs = 49_000_000
	if fast, _ := PriceTransfer(&policy, &from, &to, &path, 8000); fast.TransferMs > fast.ComputeMs {
		t.Errorf("49 GB/s: %+v", fast)
	}
	path.Off = true
	if _, note := PriceTransfer(&policy, &from, &to, &path, 8000); note != PullPairOff {
		t.Errorf("a pair that is off: %v", note)
	}
}
