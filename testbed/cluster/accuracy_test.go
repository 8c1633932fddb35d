package cluster

import (
	"fmt"
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// sameLearnt says how what two coordinators know of a worker differs; empty: not
// at all. Weights fade between two readings.
func sameLearnt(a, b *waypostv1.Worker) string {
	x, y := a.GetLearnt(), b.GetLearnt()
	if x == nil || y == nil || x.GetOutcomes() == 0 || len(x.GetErrors()) == 0 {
		return fmt.Sprintf("nothing learnt yet: %v, %v", x, y)
	}
	close := func(x, y float64) bool { return math.Abs(x-y) <= 1e-6+.02*math.Abs(x) }
	ok := close(x.GetOutcomes(), y.GetOutcomes()) && close(a.GetTrust(), b.GetTrust()) && x.GetBiasTokens() == y.GetBiasTokens() && len(x.GetErrors()) == len(y.GetErrors())
	for i := range x.GetErrors() {
		if !ok {
			break
		}
		e, f := x.GetErrors()[i], y.GetErrors()[i]
		ok = e.GetTerm() == f.GetTerm() && close(e.GetBiasMs(), f.GetBiasMs()) && close(e.GetMeanMs(), f.GetMeanMs()) && close(e.GetOutcomes(), f.GetOutcomes())
	}
	if !ok {
		return fmt.Sprintf("trust %v and %v, %v, %v", a.GetTrust(), b.GetTrust(), x, y)
	}
	return ""
}

// TestCoordinatorsAgreeOnErrors reports outcomes to two coordinators in turn:
// both show the same trust and errors, which the agent folded of all of them,
// and neither a restart of the agent nor of a coordinator forgets them.
func TestCoordinatorsAgreeOnErrors(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 2, emulator.Options{BlockTokens: 16})
	worker := WorkerName(0, 0)
	report := func(coordinator int, p *waypostv1.Placement, cached uint32, firstTokenMs float64) {
		t.Helper()
		_, err := r.Placement(coordinator).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{
			PlacementId: p.PlacementId, Result: proto.String("done"), CachedTokens: &cached, PromptTokens: proto.Uint32(640), FirstTokenMs: &firstTokenMs,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	a := ask{tokens: tokens(1, 640)}
	p, err := r.place(0, a)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.send(p, a); err != nil {
		t.Fatal(err)
	}
	report(0, p, 0, 50)
	for i := range 2 {
		r.eventually("the prompt is not listed", func() string {
			if n := r.expects(i, worker, a); n < 512 {
				return fmt.Sprint(n)
			}
			return ""
		})
	}
	// As the engine would if its cache were lost in silence: half of what
	// either coordinator expects is there.
	before := r.worker(0, worker).GetTrust()
	half := func(i int) {
		t.Helper()
		p, err := r.place(i%2, a)
		if err != nil {
			t.Fatal(err)
		}
		report(i%2, p, uint32(p.GetExpected().GetReuseTokens()/2), p.GetExpected().GetFirstTokenMs()+40)
	}
	for i := range 8 {
		half(i)
	}
	told := time.Now()
	var seen *waypostv1.Worker
	r.eventually("the coordinators do not agree", func() string {
		seen = r.worker(0, worker)
		// Nine outcomes told of their first token, eight expected reuse.
		if n := seen.GetLearnt().GetOutcomes(); n < 7.5 {
			if time.Since(told) > 10*time.Second { // one went with a lane that was opened anew
				half(0)
				told = time.Now()
			}
			return fmt.Sprintf("%v of 8 outcomes are learnt", n)
		}
		return sameLearnt(seen, r.worker(1, worker))
	})
	if seen.Trust == nil || before != 0 && seen.GetTrust() >= before {
		t.Errorf("trust %v after misses, was %v", seen.Trust, before)
	}
	for _, e := range seen.GetLearnt().GetErrors() {
		if e.GetTerm() == "first token" && !(e.GetBiasMs() > 0 && e.GetOutcomes() > 8) {
			t.Errorf("the error of the first token is %v", e)
		}
	}

	// A restart of the agent forgets nothing.
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	if err := r.StopCoordinator(1); err != nil {
		t.Fatal(err)
	}
	if err := r.StartCoordinator(1); err != nil {
		t.Fatal(err)
	}
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	r.eventually("what was learnt is not told after the restarts", func() string {
		now := r.worker(1, worker)
		if now == nil {
			return "the worker is not known yet"
		}
		// What was learnt fades while time goes by, but not at once.
		if got, was := now.GetLearnt().GetOutcomes(), seen.GetLearnt().GetOutcomes(); got < .5*was {
			return fmt.Sprintf("%v outcomes are known, %v were", got, was)
		}
		return sameLearnt(r.worker(0, worker), now)
	})
}
