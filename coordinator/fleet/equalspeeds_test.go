package fleet

import (
	"fmt"
	"math"
	"testing"

	"waypost/gossip/ledger"
)

// Speeds within the dead band count as equal, others do not.
func TestEqualSpeeds(t *testing.T) {
	r := newRig(t, 0)
	for i, factor := range []float64{1.04, .97, 1, 1.6} {
		h := hello(fmt.Sprintf("gpu-%02d", i), 1)
		model := ledger.PriorFor(ledger.Class{Engine: ledger.EngineMocker}).Model.Scaled(factor)
		model.Source = ledger.SourceLearnt
		h.Workers[0].StepModel = &model
		r.open(0, h)
	}
	took := map[int]float64{}
	for i := range 4 {
		s := r.snapshot(fmt.Sprintf("gpu-%02d/vllm-8000/0", i))
		took[i] = s.Steps.PrefillMs(0, 3000)
	}
	if math.Abs(took[0]-took[1]) > 1e-6 || math.Abs(took[0]-took[2]) > 1e-6 || took[3] < 1.5*took[0] {
		t.Errorf("prefills take %v", took)
	}
	// It leaves the band: it counts as it is.
	h := hello("gpu-00", 1)
	model := ledger.PriorFor(ledger.Class{Engine: ledger.EngineMocker}).Model.Scaled(1.3)
	model.Source = ledger.SourceLearnt
	h.Workers[0].StepModel = &model
	if _, err := r.f.UpdateHello(at(1), r.lanes["gpu-00"], h); err != nil {
		t.Fatal(err)
	}
	if got := r.snapshot(worker0).Steps.PrefillMs(0, 3000); got < 1.2*took[1] {
		t.Errorf("prefill takes %v", got)
	}
}

// What a worker was equalised with does not outlive the one that had learnt: who
// comes later with the prior is as fast as who was there.
func TestEqualSpeedsAfterTheOneThatLearntIsGone(t *testing.T) {
	r := newRig(t, 0)
	add := func(host string, factor float64, source ledger.Source) {
		h := hello(host, 1)
		model := ledger.PriorFor(ledger.Class{Engine: ledger.EngineMocker}).Model.Scaled(factor)
		model.Source = source
		h.Workers[0].StepModel = &model
		r.open(0, h)
	}
	took := func(host string) float64 { return r.snapshot(host+"/vllm-8000/0").Steps.PrefillMs(0, 3000) }
	add("gpu-00", 1, ledger.SourcePrior)
	prior := took("gpu-00")
	add("gpu-01", 1.06, ledger.SourceLearnt)
	add("gpu-02", 1.06, ledger.SourceLearnt)
	if took("gpu-00") == prior {
		t.Fatal("the two are not within the dead band: the test shows nothing")
	}
	r.remove(1, "gpu-01")
	r.remove(1, "gpu-02")
	add("gpu-03", 1, ledger.SourcePrior)
	if a, b := took("gpu-00"), took("gpu-03"); a != b {
		t.Errorf("prefills of equal workers take %v and %v ms", a, b)
	}
}
