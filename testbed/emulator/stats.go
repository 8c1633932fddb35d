package emulator

import (
	"slices"
	"strings"
	"sync"
	"time"

	"waypost/testbed/emulator/core"
)

const maxSamples = 1 << 16

// sample is the rank's state at one time.
type sample struct {
	at     time.Time
	status core.Status
}

// histogram counts observations per bucket; the last bucket is +Inf.
type histogram struct {
	bounds []float64
	counts []uint64
	sum    float64
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(v float64) {
	i, _ := slices.BinarySearch(h.bounds, v)
	h.counts[i]++
	h.sum += v
}

// The buckets of the engine's histograms.
var (
	firstTokenBounds = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	tokenGapBounds   = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	latencyBounds    = []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	iterationBounds  = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	samplesBounds    = []float64{1, 2, 5, 10, 20}
	preemptionBounds = []float64{1, 2, 3, 4, 5, 10, 20}
)

// tokenBounds are 1, 2, 5, 10, ... up to the model's limit.
func tokenBounds(limit int) []float64 {
	var bounds []float64
	for decade := 1; ; decade *= 10 {
		for _, m := range []int{1, 2, 5} {
			if m*decade > limit {
				return bounds
			}
			bounds = append(bounds, float64(m*decade))
		}
	}
}

// adapterUse is one combination of adapters seen in use, and when last.
type adapterUse struct {
	running, waiting string
	at               time.Time
}

// rankStats is what /metrics tells of one rank.
type rankStats struct {
	mu       sync.Mutex
	lag      time.Duration
	samples  []sample // oldest first; the first is the newest older than lag
	adapters []adapterUse
	began    time.Time

	firstToken, tokenGap, perToken                     *histogram
	total, queued, inference, prefill, decode          *histogram
	promptTokens, outputTokens, computedTokens         *histogram
	iteration, samplesAsked, tokensAsked, preemptCount *histogram
	finished                                           map[core.Finish]uint64
}

func newRankStats(o Options, began time.Time) *rankStats {
	tokens := tokenBounds(o.MaxModelTokens)
	return &rankStats{
		lag: o.GaugeLag, began: began, finished: make(map[core.Finish]uint64),
		firstToken: newHistogram(firstTokenBounds), tokenGap: newHistogram(tokenGapBounds), perToken: newHistogram(tokenGapBounds),
		total: newHistogram(latencyBounds), queued: newHistogram(latencyBounds), inference: newHistogram(latencyBounds),
		prefill: newHistogram(latencyBounds), decode: newHistogram(latencyBounds),
		promptTokens: newHistogram(tokens), outputTokens: newHistogram(tokens), computedTokens: newHistogram(tokens), tokensAsked: newHistogram(tokens),
		iteration: newHistogram(iterationBounds), samplesAsked: newHistogram(samplesBounds), preemptCount: newHistogram(preemptionBounds),
	}
}

// record notes the state; the gauges show it when it is as old as their lag.
func (s *rankStats) record(now time.Time, status core.Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recordLocked(now, status)
}

func (s *rankStats) recordLocked(now time.Time, status core.Status) {
	s.samples = append(s.samples, sample{now, status})
	old := 0
	for old+1 < len(s.samples) && now.Sub(s.samples[old+1].at) >= s.lag {
		old++
	}
	old = max(old, len(s.samples)-maxSamples)
	s.samples = slices.Delete(s.samples, 0, old)
}

// step notes what a step did.
func (s *rankStats) step(out *core.Outcome, now time.Time, status core.Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recordLocked(now, status)
	n := len(out.Outputs)
	for i := range out.Outputs {
		if out.Outputs[i].Index == 0 {
			n += out.Outputs[i].Sequence.PromptTokens()
		}
	}
	s.iteration.observe(float64(n))
	s.useAdapters(now, status)
}

const maxAdapterUses = 256

func (s *rankStats) useAdapters(now time.Time, status core.Status) {
	use := adapterUse{strings.Join(status.RunningAdapters, ","), strings.Join(status.WaitingAdapters, ","), now}
	for i := range s.adapters {
		if s.adapters[i].running == use.running && s.adapters[i].waiting == use.waiting {
			s.adapters[i].at = now
			return
		}
	}
	if len(s.adapters) < maxAdapterUses {
		s.adapters = append(s.adapters, use)
	}
}

// token notes one generated token.
func (s *rankStats) token(o *core.Output, a *answer, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := o.Sequence
	if o.Index == 0 {
		s.firstToken.observe(now.Sub(a.arrived).Seconds())
	} else {
		s.tokenGap.observe((q.Last() - o.Previous).Seconds())
	}
	if o.Finish == "" {
		return
	}
	s.finished[o.Finish]++
	s.total.observe(now.Sub(a.arrived).Seconds())
	s.queued.observe((q.Started() - q.Arrived()).Seconds())
	s.prefill.observe((q.First() - q.Started()).Seconds())
	s.decode.observe((q.Last() - q.First()).Seconds())
	s.inference.observe((q.Last() - q.Started()).Seconds())
	if n := q.OutputTokens(); n > 1 {
		s.perToken.observe((q.Last() - q.First()).Seconds() / float64(n-1))
	}
	s.promptTokens.observe(float64(q.PromptTokens()))
	s.outputTokens.observe(float64(q.OutputTokens()))
	s.computedTokens.observe(float64(q.PromptTokens() - q.CachedTokens()))
	s.preemptCount.observe(float64(q.Preemptions()))
}

// asked notes a request's parameters.
func (s *rankStats) asked(samples, maxTokens int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.samplesAsked.observe(float64(samples))
	s.tokensAsked.observe(float64(maxTokens))
}

// latest is the newest state.
func (s *rankStats) latest() core.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.latestLocked()
}

func (s *rankStats) latestLocked() core.Status {
	if len(s.samples) == 0 {
		return core.Status{}
	}
	return s.samples[len(s.samples)-1].status
}

// shown is the state that the gauges show.
func (s *rankStats) shownLocked(now time.Time) core.Status {
	var shown core.Status
	for i := range s.samples {
		if now.Sub(s.samples[i].at) < s.lag {
			break
		}
		shown = s.samples[i].status
	}
	return shown
}

func (s *rankStats) setLag(lag time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lag = lag
}
