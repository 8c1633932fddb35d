package ledger

import "strings"

// Class describes a worker for the choice of a prior. Empty fields and a
// TensorParallel of 0 are unknown.
type Class struct {
	// Engine is the engine kind, "vllm" for example.
	Engine string
	// Model is the served model, "Qwen/Qwen3-32B" for example.
	Model string
	// GPU is the product name, "NVIDIA H100 80GB HBM3" for example.
	GPU string
	// TensorParallel is the number of GPUs one rank spans.
	TensorParallel int
}

// Prior is what is assumed of a worker before anything was learnt.
type Prior struct {
	// Model is the step model; its Source is SourcePrior.
	Model StepModel
	// StepTokens is the step budget.
	StepTokens int
	// Basis names the measurement it comes from.
	Basis string
}

// Engine kinds that are emulations and get the mocker's timing.
const (
	EngineEmulator = "emulator"
	EngineMocker   = "mocker"
)

// priorRow is one measured engine class.
type priorRow struct {
	engine, model, gpu string // as fold leaves them
	tensorParallel     int
	basis              string
	steps              StepModel
}

// siliconBasis names the source of most rows: non-negative least squares over
// the published silicon samples of NVIDIA's aiconfigurator, fitted as
// TPOT = d0 + d1·B + d2·KV + (B−1)/O·(p1·S + p2·S²). The fit has no base per
// prefill of its own: p0 is 0 and every step pays d0.
const siliconBasis = "fit of NVIDIA aiconfigurator silicon samples"

// mockerBasis names the source of the prior of emulated engines: the default
// timing of NVIDIA Dynamo's mocker, prefill 4.21e-7 n² + .01518 n + 16.5 ms
// over the tokens of a step, decode −25.74 x² + 54.01 x + 5.74 ms, x the share
// of a pool of 16,384 blocks of 64 tokens.
const mockerBasis = "NVIDIA Dynamo mocker defaults"

const mockerPoolTokens = 16_384 * 64

// priors is ordered; of equally good rows the first is taken.
var priors = []priorRow{
	{"vllm", "qwen332b", "h100", 2, siliconBasis, steps(14.07, .044, 6.24e-5, .0499, 1.4e-7)},
	{"vllm", "qwen332b", "h100", 4, siliconBasis, steps(9.42, .062, 2.33e-5, .0283, 4.4e-7)},
	{"trtllm", "qwen332b", "h100", 1, siliconBasis, steps(13.97, .067, 3.41e-5, .0715, 0)},
	{"trtllm", "llama318b", "h100", 1, siliconBasis, steps(6.58, .003, 4.68e-5, .0186, 6.3e-7)},
	{"trtllm", "llama318b", "h100", 2, siliconBasis, steps(4.52, .005, 2.31e-5, .0119, 2.0e-7)},
	{"vllm", "llama3170b", "h100", 4, siliconBasis, steps(11.11, .101, 1.91e-5, .0037, 5.7e-6)},
	{"trtllm", "llama3170b", "h200", 2, siliconBasis, steps(11.54, .051, 1.60e-5, .0416, 3.4e-6)},
	{"trtllm", "llama3170b", "h200", 4, siliconBasis, steps(7.71, .032, 1.10e-5, .0418, 0)},
	{"trtllm", "llama3170b", "b200", 2, siliconBasis, steps(9.17, .011, 1.46e-5, .0352, 5e-8)},
	{"sglang", "deepseekv3", "h200", 8, siliconBasis, steps(9.22, .360, 0, .0401, 0)},
	{"trtllm", "deepseekv3", "b200", 8, siliconBasis, steps(9.83, .124, 7.6e-6, .0113, 9.6e-7)},
	{"vllm", "gptoss120b", "h200", 2, siliconBasis, steps(4.40, .162, 0, .0082, 1.8e-6)},
	{"trtllm", "qwen3235ba22b", "h100", 8, siliconBasis, steps(11.68, .121, 2.8e-6, .0420, 0)},
}

// mockerSteps is the prior of emulated engines.
var mockerSteps = StepModel{
	P0Ms: 16.50142, P1MsPerToken: .01518344, QMsPerToken2: 4.209989e-7,
	D0Ms: 5.74, D2MsPerToken: 54.01 / mockerPoolTokens, D3Ms: -25.74, Source: SourcePrior,
}

// steps builds a prior from the columns of the published fit.
func steps(d0, d1, d2, p1, p2 float64) StepModel {
	return StepModel{
		P1MsPerToken: p1, P2MsPerToken2: p2,
		D0Ms: d0, D1MsPerRequest: d1, D2MsPerToken: d2, Source: SourcePrior,
	}
}

// PriorFor returns the measured class that is nearest to c: the model counts
// most, then the GPU, the engine and the tensor parallelism. A class that
// matches nothing gets a 32B model on two H100 under vLLM, a size in the
// middle of the table; what is learnt replaces it.
func PriorFor(c Class) Prior {
	engine, model, gpu := fold(c.Engine), fold(c.Model), fold(c.GPU)
	if engine == EngineEmulator || engine == EngineMocker {
		return Prior{Model: mockerSteps, StepTokens: DefaultStepTokens, Basis: mockerBasis}
	}
	best, bestScore := 0, -1
	for i, row := range priors {
		score := 0
		if strings.Contains(model, row.model) {
			score += 8
		}
		if strings.Contains(gpu, row.gpu) {
			score += 4
		}
		if row.engine == engine {
			score += 2
		}
		if row.tensorParallel == c.TensorParallel {
			score++
		}
		if score > bestScore {
			best, bestScore = i, score
		}
	}
	return Prior{Model: priors[best].steps, StepTokens: DefaultStepTokens, Basis: priors[best].basis}
}

// fold reduces a product name to lower-case letters and digits.
func fold(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		}
		return -1
	}, s)
}
