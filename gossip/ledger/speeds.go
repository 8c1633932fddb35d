package ledger

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrSpeeds is wrapped by every error of Speeds.Import.
var ErrSpeeds = errors.New("bad learnt speeds")

// Learning of speeds. The gains are those that were measured to pay: full for
// a dispatch to a worker where nothing was pending, a fifth of it otherwise,
// because a queue adds noise of its own.
const (
	slowestGain = .01
	busyWeight  = .2
	priorWeight = 10 // the prior counts like ten observations
	// maxFactor bounds what is learnt: between a sixteenth of the prior's time
	// and sixteen times it.
	maxFactor = 16
	// maxStep bounds what one observation may say: a caller that sent late is
	// no slow worker.
	maxStep = .7
	// Own speeds for the base of a step and for its tokens are used after so
	// many observations and while they predict clearly better than one factor.
	ownAfter       = 30
	ownBetter      = .9
	ownForgetting  = .99
	ridge          = .3
	errorGain      = 1.0 / 50
	decodeAfter    = 10
	minPredictedMs = .1
)

// DeadBand is the relative difference of speeds below which workers of one
// class count as equal: noise would break good ties.
const DeadBand = .10

// Speeds is what a worker's evidence says of its step model: first one factor
// on the prior, then, once they predict better, a factor each for the base of
// a step and for its tokens, and one for decoding. The zero value is not
// ready; use NewSpeeds.
type Speeds struct {
	prior StepModel
	state SpeedsState
	shown StepModel
}

// SpeedsState is what a Speeds has learnt, in plain numbers to be kept over a
// restart. Logarithms are natural and of observed over the prior's time.
type SpeedsState struct {
	// Prior is the model it is relative to; another prior voids it.
	Prior StepModel `json:"prior"`
	// LnFactor is the factor on everything, Weight what it was learnt from,
	// Observations the number of them.
	LnFactor     float64 `json:"lnFactor"`
	Weight       float64 `json:"weight"`
	Observations float64 `json:"observations"`
	// LnDecode is the factor on decoding.
	LnDecode           float64 `json:"lnDecode"`
	DecodeObservations float64 `json:"decodeObservations"`
	// DecodeMs is the mean decode part of the observed steps, by the prior.
	DecodeMs float64 `json:"decodeMs"`
	// Sums are the decayed normal equations of the two own factors: BB, BT,
	// TT, BY, TY with base B, tokens T and observation Y over the prior's
	// time.
	Sums [5]float64 `json:"sums"`
	// FactorError and OwnError are mean |ln| errors of the two predictions.
	FactorError float64 `json:"factorError"`
	OwnError    float64 `json:"ownError"`
	// OwnUsed says that the own factors are in force.
	OwnUsed bool `json:"ownUsed"`
}

// NewSpeeds starts from a validated prior.
func NewSpeeds(prior StepModel) *Speeds {
	s := &Speeds{prior: prior}
	s.state.Prior = prior
	s.shown = prior
	return s
}

// Prior is the model it started from.
func (s *Speeds) Prior() StepModel { return s.prior }

// ObservePrefill takes that the work took observedMs, whose steps had the
// given decode part by the prior. alone says that nothing was pending when it
// was dispatched.
func (s *Speeds) ObservePrefill(w *Work, priorDecodeMs, observedMs float64, alone bool) {
	base, tokens := w.priceMs(&s.prior, priorDecodeMs)
	predicted := base + tokens
	if alone {
		predicted += priorDecodeMs / 2 // the decode step in flight
	}
	if !(predicted >= minPredictedMs) || !(observedMs > 0) || math.IsInf(observedMs, 0) || math.IsInf(predicted, 0) {
		return
	}
	st := &s.state
	gain := max(1/(st.Weight+priorWeight), slowestGain)
	weight := 1.0
	if !alone {
		weight = busyWeight
	}
	off := math.Log(observedMs/predicted) - st.LnFactor
	clipped := min(max(off, -maxStep), maxStep)
	ratio := math.Exp(st.LnFactor + clipped) // the observation, less what no worker does
	s.observeOwn(base/predicted, tokens/predicted, ratio)
	st.FactorError += errorGain * (math.Abs(clipped) - st.FactorError)
	st.LnFactor = clampLn(st.LnFactor + gain*weight*clipped)
	st.Weight += weight
	st.Observations++
	switch {
	case st.Observations < ownAfter:
	case st.OwnError < ownBetter*st.FactorError:
		st.OwnUsed = true
	case st.OwnError > st.FactorError:
		st.OwnUsed = false
	}
	decode := min(priorDecodeMs, maxBaseMs)
	if st.Observations == 1 {
		st.DecodeMs = decode
	}
	st.DecodeMs += errorGain * (decode - st.DecodeMs)
	s.show()
}

// observeOwn takes an observation into the normal equations of the own
// factors, after judging what they would have predicted.
func (s *Speeds) observeOwn(base, tokens, ratio float64) {
	st := &s.state
	a, c := s.own()
	if predicted := a*base + c*tokens; predicted > 0 {
		off := min(math.Abs(math.Log(ratio/predicted)), maxStep)
		st.OwnError += errorGain * (off - st.OwnError)
	}
	for i, v := range [...]float64{base * base, base * tokens, tokens * tokens, base * ratio, tokens * ratio} {
		st.Sums[i] = ownForgetting*st.Sums[i] + v
	}
}

// own solves the normal equations with a ridge towards the one factor.
func (s *Speeds) own() (base, tokens float64) {
	st := &s.state
	f := math.Exp(st.LnFactor)
	bb, bt, tt := st.Sums[0]+ridge, st.Sums[1], st.Sums[2]+ridge
	by, ty := st.Sums[3]+ridge*f, st.Sums[4]+ridge*f
	det := bb*tt - bt*bt
	if !(det > 1e-9) {
		return f, f
	}
	return clampFactor((by*tt - ty*bt) / det), clampFactor((ty*bb - by*bt) / det)
}

// ObserveDecode takes that a pure decode step, priorMs by the prior, took
// observedMs.
func (s *Speeds) ObserveDecode(priorMs, observedMs float64) {
	if !(priorMs >= minPredictedMs) || !(observedMs > 0) || math.IsInf(priorMs, 0) || math.IsInf(observedMs, 0) {
		return
	}
	st := &s.state
	gain := max(1/(st.DecodeObservations+priorWeight), slowestGain)
	off := math.Log(observedMs/priorMs) - st.LnDecode
	st.LnDecode = clampLn(st.LnDecode + gain*min(max(off, -maxStep), maxStep))
	st.DecodeObservations++
	s.show()
}

// Factor is the learnt factor on the prior's time; 1 before anything was
// observed.
func (s *Speeds) Factor() float64 { return math.Exp(s.state.LnFactor) }

// Observations is the number of prefills the factor was learnt from.
func (s *Speeds) Observations() float64 { return s.state.Observations }

// learnt is the model as the numbers say now.
func (s *Speeds) learnt() StepModel {
	st, m := &s.state, s.prior
	f := math.Exp(st.LnFactor)
	decode := f
	if st.DecodeObservations >= decodeAfter {
		decode = math.Exp(st.LnDecode)
	}
	base, tokens := f, f
	if st.OwnUsed {
		base, tokens = s.own()
	}
	// The base of a step is p0 and the decode part together; what decoding
	// does not explain of it is p0.
	m.P0Ms = min(max(base*(m.P0Ms+st.DecodeMs)-decode*st.DecodeMs, 0), maxBaseMs)
	m.P1MsPerToken = min(m.P1MsPerToken*tokens, maxMsPerToken)
	m.QMsPerToken2 = min(m.QMsPerToken2*tokens, maxMsPerToken2)
	m.P2MsPerToken2 = min(m.P2MsPerToken2*tokens, maxMsPerToken2)
	m.D0Ms = min(m.D0Ms*decode, maxBaseMs)
	m.D1MsPerRequest = min(m.D1MsPerRequest*decode, maxBaseMs)
	m.D2MsPerToken = min(m.D2MsPerToken*decode, maxMsPerToken)
	m.D3Ms = min(max(m.D3Ms*decode, -maxBaseMs), maxBaseMs)
	m.Source = SourceLearnt
	return m
}

// The model in force moves only when it would price one of these differently
// by more than showBand, so that it need not be told over and over.
var shownPrompts = [...]int{256, 2048, 8192}

const showBand = .05

// show takes what was learnt into force if it makes a difference.
func (s *Speeds) show() {
	next := s.learnt()
	for _, n := range shownPrompts {
		if differ(next.PrefillMs(n), s.shown.PrefillMs(n)) {
			s.shown = next
			return
		}
	}
	if differ(next.D0Ms+next.D1MsPerRequest, s.shown.D0Ms+s.shown.D1MsPerRequest) {
		s.shown = next
	}
}

func differ(a, b float64) bool { return math.Abs(a-b) > showBand*max(a, b) }

// Model is the step model in force: the prior until something else was
// learnt, then learnt.
func (s *Speeds) Model() StepModel { return s.shown }

// Export is what was learnt.
func (s *Speeds) Export() SpeedsState { return s.state }

// Import takes what was learnt before, if it is relative to the same prior. It
// refuses numbers that no learning leads to.
func (s *Speeds) Import(st SpeedsState) error {
	prior := st.Prior
	prior.Source = s.prior.Source
	if prior != s.prior {
		return fmt.Errorf("%w: prior: is another than this worker's", ErrSpeeds)
	}
	limit := math.Log(maxFactor) + 1e-9
	for _, f := range [...]struct {
		name      string
		value     float64
		low, high float64
	}{
		{"lnFactor", st.LnFactor, -limit, limit},
		{"lnDecode", st.LnDecode, -limit, limit},
		{"weight", st.Weight, 0, math.MaxInt64},
		{"observations", st.Observations, 0, math.MaxInt64},
		{"decodeObservations", st.DecodeObservations, 0, math.MaxInt64},
		{"decodeMs", st.DecodeMs, 0, maxBaseMs},
		{"factorError", st.FactorError, 0, 1},
		{"ownError", st.OwnError, 0, 1},
	} {
		if !(f.value >= f.low && f.value <= f.high) {
			return fmt.Errorf("%w: %s: %v is not in %g to %g", ErrSpeeds, f.name, f.value, f.low, f.high)
		}
	}
	for i, v := range st.Sums {
		if !(v >= 0 && v <= 1e6) {
			return fmt.Errorf("%w: sums[%d]: %v is not in 0 to 1e6", ErrSpeeds, i, v)
		}
	}
	st.Prior = s.prior
	s.state = st
	s.shown = s.prior
	s.show()
	return nil
}

func clampLn(v float64) float64 {
	limit := math.Log(maxFactor)
	return min(max(v, -limit), limit)
}

func clampFactor(v float64) float64 { return min(max(v, 1.0/maxFactor), maxFactor) }

// Scaled is the model with every price times a factor.
func (m StepModel) Scaled(factor float64) StepModel {
	m.P0Ms = min(m.P0Ms*factor, maxBaseMs)
	m.P1MsPerToken = min(m.P1MsPerToken*factor, maxMsPerToken)
	m.QMsPerToken2 = min(m.QMsPerToken2*factor, maxMsPerToken2)
	m.P2MsPerToken2 = min(m.P2MsPerToken2*factor, maxMsPerToken2)
	m.D0Ms = min(m.D0Ms*factor, maxBaseMs)
	m.D1MsPerRequest = min(m.D1MsPerRequest*factor, maxBaseMs)
	m.D2MsPerToken = min(m.D2MsPerToken*factor, maxMsPerToken)
	m.D3Ms = min(max(m.D3Ms*factor, -maxBaseMs), maxBaseMs)
	return m
}

// The step that workers are compared by: a usual prefill beside a usual
// decode load.
const (
	typicalTokens   = 2048
	typicalDecoding = 8
	typicalContext  = 8 * 4096
)

// typicalMs is the price of that step.
func (m *StepModel) typicalMs() float64 {
	return m.PrefillMs(typicalTokens) + m.AttentionMs(0, typicalTokens) + m.DecodeMs(typicalDecoding, typicalContext, 0)
}

// Equalise returns, for the models of workers of one class, the factors to
// scale them by so that all within DeadBand of their median count as equal to
// it; 1 for the others. The order does not matter.
func Equalise(models []StepModel, factors []float64) []float64 {
	factors = factors[:0]
	times := make([]float64, 0, len(models))
	for i := range models {
		if ms := models[i].typicalMs(); ms > 0 {
			times = append(times, ms)
		}
	}
	slices.Sort(times)
	for i := range models {
		factor := 1.0
		if ms := models[i].typicalMs(); ms > 0 {
			median := times[(len(times)-1)/2]
			if math.Abs(math.Log(ms/median)) <= math.Log(1+DeadBand) {
				factor = median / ms
			}
		}
		factors = append(factors, factor)
	}
	return factors
}
