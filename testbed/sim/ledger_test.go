package sim

import "testing"

// ledgerOf runs a scenario for 40 s; long, eight seeds of 240 s.
func ledgerOf(t *testing.T, policy, scenario string, coordinators int) *LedgerSummary {
	t.Helper()
	o := LedgerOptions{
		Policy: policy, Scenario: scenario, Coordinators: coordinators, Seconds: 40, Copies: 1, Seed: 1,
		Evidence: evidence{stores: true}, Theta: 5, Learn: true,
	}
	if long() {
		o.Seconds, o.Copies = 240, 8
	}
	s, err := RunLedger(o, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Faults are seen and survived: what coordinators believe of the queues stays
// near the truth, first tokens near those of one who knows it, and nothing is
// held when all is over. Who believes gauges is far worse off. A long run, whose
// noise is small, is held to the figures to reach.
func TestLedgerUnderFaults(t *testing.T) {
	oracle := ledgerOf(t, policyOracle, "base", 4).TTFTMs.Mean
	if raw := ledgerOf(t, policyRaw, "base", 4).TTFTMs.Mean; raw < 1.4*oracle {
		t.Errorf("mean TTFT %.0f ms by gauges alone, %.0f by the truth: the setting shows nothing", raw, oracle)
	}
	for _, test := range []struct {
		scenario     string
		coordinators int
		ratio        float64 // of the oracle's mean first-token time
		p50, p95     float64 // of the error of the believed waiting, ms
		// figure is the ratio to reach, where there is one: then the errors are
		// to be at most 10 and 500 as well.
		figure float64
		long   bool
	}{
		{"base", 1, 1.25, 15, 500, 1.15, true},
		{"base", 4, 1.25, 15, 500, 1.15, false},
		{"base", 8, 1.25, 15, 500, 1.2, true},
		{"cut", 8, 1.3, 20, 600, 1.2, false},
		{"stale-gauges", 4, 1.35, 20, 500, 1.15, false},
		{"speeds", 4, 1.3, 25, 700, 0, true},
		{"foreign", 4, 1.3, 60, 1500, 0, true},
		{"lanes", 4, 1.4, 40, 900, 0, true},
		{"restarts", 4, 1.3, 20, 600, 0, false},
		{"engine-restarts", 4, 1.6, 60, 900, 0, true},
	} {
		if test.long && !long() {
			continue
		}
		if long() && test.figure > 0 {
			test.ratio, test.p50, test.p95 = test.figure, 10, 500
		}
		s := ledgerOf(t, policyWaypost, test.scenario, test.coordinators)
		if s.TTFTMs.Mean > test.ratio*oracle {
			t.Errorf("%s, %d coordinators: mean TTFT %.0f ms, want at most %.2f times the oracle's %.0f", test.scenario, test.coordinators, s.TTFTMs.Mean, test.ratio, oracle)
		}
		if w := s.WaitingMs; w.P50 > test.p50 || w.P95 > test.p95 {
			t.Errorf("%s, %d coordinators: believed less true waiting %.0f / %.0f ms, want at most %.0f / %.0f", test.scenario, test.coordinators, w.P50, w.P95, test.p50, test.p95)
		}
		if s.Residue > 0 {
			t.Errorf("%s: %d claims are left 80 s after the end", test.scenario, s.Residue)
		}
	}
}
