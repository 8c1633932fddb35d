package ledger

import (
	"errors"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// The mocker's published formulas, computed independently of the code.
func TestMockerPriorIsThePublishedFormula(t *testing.T) {
	prior := PriorFor(Class{Engine: "Mocker"})
	if got, want := prior.Model.PrefillMs(8192), 4.209989e-7*8192*8192+.01518344*8192+16.50142; !near(got, want) {
		t.Errorf("P(8192) = %v, want %v", got, want)
	}
	for _, fill := range []float64{0, .1, .5, 1} {
		if got, want := prior.Model.DecodeMs(40, fill*1_048_576, 1_048_576), -25.74*fill*fill+54.01*fill+5.74; !near(got, want) {
			t.Errorf("D(%v) = %v, want %v", fill, got, want)
		}
	}
}

func TestPriorFor(t *testing.T) {
	for _, test := range []struct {
		class Class
		d0    float64
	}{
		{Class{Engine: "vllm", Model: "Qwen/Qwen3-32B", GPU: "NVIDIA H100 80GB HBM3", TensorParallel: 2}, 14.07},
		{Class{Engine: "vllm", Model: "Qwen/Qwen3-32B", GPU: "NVIDIA H100 80GB HBM3", TensorParallel: 4}, 9.42},
		{Class{Engine: "trtllm", Model: "Qwen/Qwen3-32B-FP8", GPU: "NVIDIA H100", TensorParallel: 1}, 13.97},
		{Class{Engine: "vllm", Model: "meta-llama/Llama-3.1-8B-Instruct", GPU: "NVIDIA H100"}, 6.58},
		{Class{Engine: "sglang", Model: "deepseek-ai/DeepSeek-V3", GPU: "NVIDIA H200", TensorParallel: 8}, 9.22},
		{Class{Engine: "vllm", Model: "openai/gpt-oss-120b", GPU: "NVIDIA H200", TensorParallel: 2}, 4.40},
		{Class{}, 14.07}, // nothing known: the middle of the table
	} {
		prior := PriorFor(test.class)
		if prior.Model.D0Ms != test.d0 {
			t.Errorf("PriorFor(%+v) has d0 %v, want %v", test.class, prior.Model.D0Ms, test.d0)
		}
		if prior.Model.Source != SourcePrior || prior.StepTokens != DefaultStepTokens || prior.Basis == "" {
			t.Errorf("PriorFor(%+v) = %+v: not marked as a prior", test.class, prior)
		}
	}
	// The independent calibration: 8,192 tokens of Qwen3-32B on two H100 take
	// about 419 ms.
	steps := NewSteps(PriorFor(Class{Engine: "vllm", Model: "Qwen3-32B", GPU: "H100", TensorParallel: 2}).Model, 8192, 0)
	if got := steps.PrefillMs(0, 8192); math.Abs(got-419) > 2 {
		t.Errorf("prefill of 8,192 tokens = %.1f ms, want about 419", got)
	}
}

func TestEveryPriorIsValid(t *testing.T) {
	for _, row := range priors {
		if err := row.steps.Validate(); err != nil {
			t.Errorf("%s on %s: %v", row.model, row.gpu, err)
		}
	}
	if err := mockerSteps.Validate(); err != nil {
		t.Error(err)
	}
}

func TestValidateNamesTheCoefficient(t *testing.T) {
	for name, m := range map[string]StepModel{
		"p0Ms":           {P0Ms: -1},
		"p1MsPerToken":   {P1MsPerToken: math.NaN()},
		"qMsPerToken2":   {QMsPerToken2: math.Inf(1)},
		"p2MsPerToken2":  {P2MsPerToken2: 2},
		"d0Ms":           {D0Ms: 1e9},
		"d1MsPerRequest": {D1MsPerRequest: -1e-9},
		"d2MsPerToken":   {D2MsPerToken: math.NaN()},
		"d3Ms":           {D3Ms: math.Inf(-1)},
	} {
		err := m.Validate()
		if !errors.Is(err, ErrStepModel) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// A chunked prefill costs the same attention as a whole one; reuse is not free.
func TestAttention(t *testing.T) {
	m := StepModel{P2MsPerToken2: 5.7e-6}
	whole := m.AttentionMs(100_000, 700)
	if parts := m.AttentionMs(100_000, 300) + m.AttentionMs(100_300, 400); !near(parts, whole) {
		t.Errorf("in parts %v, whole %v", parts, whole)
	}
	if want := 5.7e-6 * (100_700.*100_700 - 100_000.*100_000); !near(whole, want) {
		t.Errorf("attention = %v, want %v", whole, want)
	}
}

func TestDecodeNeverFallsWithContext(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawModel(t)
		context := rapid.Float64Range(0, 3e6).Draw(t, "context")
		more := context + rapid.Float64Range(0, 1e6).Draw(t, "more")
		pool := rapid.SampledFrom([]float64{0, math.NaN(), 5e4, 1e6}).Draw(t, "pool")
		a, b := m.DecodeMs(8, context, pool), m.DecodeMs(8, more, pool)
		if !(a >= 0) || b < a-1e-9 {
			t.Fatalf("D(%v) = %v, D(%v) = %v", context, a, more, b)
		}
	})
}

func TestLoadValidateNamesTheField(t *testing.T) {
	bad, many := math.NaN(), uint32(1<<21)
	for name, load := range map[string]Load{
		"ageMs":            {AgeMs: &bad},
		"queueMs":          {QueueMs: &bad},
		"contextTokens":    {ContextTokens: &bad},
		"gapMs":            {GapMs: &bad},
		"heldBlocks":       {HeldBlocks: &bad},
		"meanOutputTokens": {MeanOutputTokens: &bad},
		"countersAgeMs":    {CountersAgeMs: &bad},
		"kvUsedRatio":      {KVUsedRatio: &bad},
		"finishPerSec":     {FinishPerSec: &bad},
		"evictionAgeMs":    {EvictionAgeMs: &bad},
		"decoding":         {Decoding: &many},
		"live":             {Live: &many},
		"foreign":          {Foreign: &many},
		"running":          {Running: &many},
		"waiting":          {Waiting: &many},
		"stateReason":      {StateReason: strings.Repeat("x", 300)},
		"echo":             {Echo: make([]Echo, 65)},
	} {
		err := load.Validate()
		if !errors.Is(err, ErrLoad) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if err := (&Load{}).Validate(); err != nil {
		t.Errorf("a report that knows nothing: %v", err)
	}
}
