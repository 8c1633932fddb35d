package queue

import (
	"errors"
	"fmt"
	"math"
	"time"

	"waypost/gossip/ledger"
)

// ErrOptions is wrapped by every error of New and SetFacts.
var ErrOptions = errors.New("bad queue options")

// DefaultNoProgressAfter is how long a worker with requests may show no sign
// of life before it counts as stalled.
const DefaultNoProgressAfter = 10 * time.Second

// Options says what an Estimator starts from.
type Options struct {
	// Facts are the facts known of the worker.
	Facts Facts
	// NoProgressAfter is how long a worker with requests may show no sign of
	// life before it is reported as stalled; 0: DefaultNoProgressAfter.
	NoProgressAfter time.Duration
	// AgentProcess marks this agent's life. Frames of claims that are meant
	// for another one are ignored; 0: all are.
	AgentProcess uint64
}

// Facts is what the estimate needs to know of a worker. A count of 0 is
// unknown.
type Facts struct {
	// Model is the prior of its step model; another one voids what was learnt.
	Model ledger.StepModel
	// StepTokens is the number of prefill tokens a step may hold.
	StepTokens int
	// BlockTokens is the number of tokens per KV block.
	BlockTokens int
	// PoolBlocks is the number of usable KV blocks.
	PoolBlocks int
	// MaxRunning is the largest batch.
	MaxRunning int
	// Unordered says that requests are not served in the order they came: an
	// engine with slots, or one that schedules by priority.
	Unordered bool
}

// validate names the first fact that is out of range.
func (f *Facts) validate() error {
	for _, c := range [...]struct {
		name  string
		value int
		high  int
	}{
		{"stepTokens", f.StepTokens, ledger.MaxTokens},
		{"blockTokens", f.BlockTokens, ledger.MaxTokens},
		{"poolBlocks", f.PoolBlocks, math.MaxInt32},
		{"maxRunning", f.MaxRunning, math.MaxInt32},
	} {
		if c.value < 0 || c.value > c.high {
			return fmt.Errorf("%w: %s: %d is not in 0 to %d", ErrOptions, c.name, c.value, c.high)
		}
	}
	if err := f.Model.Validate(); err != nil {
		return fmt.Errorf("%w: model: %w", ErrOptions, err)
	}
	return nil
}

// Sample is one reading of an engine's counters. Nil is unknown, never zero.
type Sample struct {
	// At is when the reading was taken, on the local monotonic clock.
	At time.Time
	// Running is the number of requests in the running batch.
	Running *int
	// Waiting is the number of requests that wait for admission.
	Waiting *int
	// KVUsedRatio is the share of KV blocks referenced, 0 to 1.
	KVUsedRatio *float64
	// PromptTokens counts prompt tokens of finished and running requests.
	PromptTokens *float64
	// ComputedPromptTokens counts prompt tokens that were not cached.
	ComputedPromptTokens *float64
	// GenerationTokens counts generated tokens.
	GenerationTokens *float64
	// FirstTokens counts first tokens, FirstTokenSeconds sums their times.
	FirstTokens, FirstTokenSeconds *float64
	// Finished counts finished requests for any reason.
	Finished *float64
	// Preemptions counts preempted requests.
	Preemptions *float64
	// Sleeping says whether the engine sleeps.
	Sleeping *bool
}

// Bounds of what is learnt and of how long a reading is used.
const (
	maxRequests = 1 << 20
	// maxSampleAge is the age beyond which counters are not used.
	maxSampleAge = 10 * time.Second
	// perRequest is the weight of one request in the moving means.
	perRequest = 1.0 / 20
	// gapWeight is the weight of one interval in the mean token gap.
	gapWeight = .3
	// minInterval is the shortest interval a pace is learnt from.
	minInterval = 10 * time.Millisecond
	// finishTime is the time constant of the finish rate.
	finishTime = 10 * time.Second
)

// Estimator is the estimate of one worker. It is not safe for concurrent use.
type Estimator struct {
	facts           Facts
	noProgressAfter time.Duration
	agentProcess    uint64
	process         uint64    // of the engine; 0: not told
	epoch           time.Time // zero of the estimator's clock
	expiredMs       float64

	ledger claims
	lag    lag
	speeds *ledger.Speeds

	last             Sample  // newest cleaned reading; At is zero before the first
	lastMs, formerMs float64 // when it and the one before were taken
	foreign          int     // waiting requests that no claim explains
	// explained says that the replay explains the newest reading.
	explained bool
	// queuedTokens is the engine's own sum of waiting tokens at queuedMs; -1:
	// not told. slotForeignTokens are left in slots of nobody at slotsMs.
	queuedTokens, slotForeignTokens int
	queuedMs, slotsMs               float64
	eviction                        eviction
	growthSeen                      bool // stores of answers are seen
	// decodeLoad and contextLoad are those of the newest view.
	decodeLoad, contextLoad float64

	meanClaimTokens    float64 // uncached tokens per claim; NaN until learnt
	meanClaimPrompt    float64
	meanUncachedTokens float64 // per request by the counters; NaN until learnt
	meanPromptTokens   float64
	meanOutputTokens   float64
	gapMs              float64
	heldGap            gapSeen // of the newest interval, until the next one
	finishPerSec       float64

	// busySince is when requests without a sign of life were first seen;
	// zero while idle or unknown. progressAt is the newest sign of life.
	busySince  time.Time
	progressAt time.Time
	// witness tells that signs of life can be seen at all.
	witness bool

	counts Counts

	view   view
	jobs   []ledger.Job // reused
	owners []*claim
}

// New makes an estimator that knows nothing yet.
func New(options Options) (*Estimator, error) {
	if options.NoProgressAfter < 0 {
		return nil, fmt.Errorf("%w: noProgressAfter: %v is negative", ErrOptions, options.NoProgressAfter)
	}
	if options.NoProgressAfter == 0 {
		options.NoProgressAfter = DefaultNoProgressAfter
	}
	e := &Estimator{noProgressAfter: options.NoProgressAfter, agentProcess: options.AgentProcess, lag: newLag(), queuedTokens: -1}
	e.ledger.init()
	e.forget()
	if err := e.SetFacts(options.Facts); err != nil {
		return nil, err
	}
	return e, nil
}

// SetFacts replaces the facts of the worker.
func (e *Estimator) SetFacts(facts Facts) error {
	if err := facts.validate(); err != nil {
		return err
	}
	e.facts = facts
	if e.speeds == nil || e.speeds.Prior() != facts.Model {
		e.speeds = ledger.NewSpeeds(facts.Model)
	}
	return nil
}

// ms is a moment on the estimator's clock.
func (e *Estimator) ms(t time.Time) float64 {
	if e.epoch.IsZero() {
		e.epoch = t
	}
	return durationMs(t.Sub(e.epoch))
}

// SetProcess tells the engine's process mark. Claims that name another one
// are taken in and ended at once; a new mark is a restart.
func (e *Estimator) SetProcess(process uint64) {
	if e.process != 0 && process != e.process {
		e.Restarted()
	}
	e.process = process
}

// Restarted tells that the engine is a new process: its counters start anew,
// all open claims are over and nothing of the old one waits any more. The echo
// and what was learnt stay; the same model serves the same users.
func (e *Estimator) Restarted() {
	e.last = Sample{}
	e.busySince, e.progressAt = time.Time{}, time.Time{}
	e.witness, e.growthSeen = false, false
	e.gapMs, e.finishPerSec, e.heldGap = math.NaN(), math.NaN(), gapSeen{}
	e.counts.EndedClaims += uint64(e.ledger.remove(func(*claim) bool { return true }))
	e.ledger.forgetEvidence()
	e.lag.restart()
	e.foreign, e.queuedTokens, e.slotForeignTokens = 0, -1, 0
	e.explained = false
	e.decodeLoad, e.contextLoad = 0, 0
	clear(e.eviction.stored)
}

// forget sets everything learnt to unknown.
func (e *Estimator) forget() {
	nan := math.NaN()
	e.meanClaimTokens, e.meanClaimPrompt = nan, nan
	e.meanUncachedTokens, e.meanPromptTokens, e.meanOutputTokens = nan, nan, nan
	e.gapMs, e.finishPerSec = nan, nan
}

// Counts are what the estimator put aside or decided by itself.
type Counts struct {
	// BadReadings counts fields of readings that were negative, not finite
	// or out of range and were taken as unknown.
	BadReadings uint64
	// CounterResets counts counters that went back.
	CounterResets uint64
	// TakenClaims counts claims taken in that are open. DuplicateClaims counts
	// claims that had been taken in, FencedClaims those
	// of another engine life, DroppedClaims those dropped for room.
	TakenClaims, DuplicateClaims, FencedClaims, DroppedClaims uint64
	// FrameGaps counts frames before which claims were missing, FramesIgnored
	// those meant for another agent process.
	FrameGaps, FramesIgnored uint64
	// CoordinatorsRefused counts frames and lanes beyond the bound of
	// coordinators.
	CoordinatorsRefused uint64
	// DuplicateMarks counts marks that told nothing new, UnknownMarks those on
	// claims that are not here any more.
	DuplicateMarks, UnknownMarks uint64
	// ForeignStores counts store events that no claim explains.
	ForeignStores uint64
	// Views counts how often the view of the queue was derived from the facts.
	Views uint64
	// InferredClaims counts claims whose prefill was taken as over by the
	// counters, EndedClaims those that left the ledger.
	InferredClaims, EndedClaims uint64
}

// Counts returns the counts so far.
func (e *Estimator) Counts() Counts { return e.counts }

// OpenClaims counts the claims whose prefill is not known to be over, and all
// that are kept.
func (e *Estimator) OpenClaims() (open, kept int) {
	for _, c := range e.ledger.list {
		if c.why == inQueue {
			open++
		}
	}
	return open, len(e.ledger.list)
}

// LagMs is the signal lag of the counters; NaN: not known.
func (e *Estimator) LagMs() float64 { return e.lag.ms() }

// Stored tells that the engine stored blocks with so many tokens: a sign that
// its model runs.
func (e *Estimator) Stored(at time.Time, tokens int) {
	if tokens > 0 {
		e.witness = true
		e.alive(at)
	}
}

func (e *Estimator) alive(at time.Time) {
	if at.After(e.progressAt) {
		e.progressAt = at
	}
}

// Sample takes a reading. One that is not newer than the last is put aside.
func (e *Estimator) Sample(s Sample) {
	if !e.last.At.IsZero() && !s.At.After(e.last.At) {
		return
	}
	e.clean(&s)
	e.learn(&s)
	requests, known := sum(s.Running, s.Waiting)
	switch {
	case !known || requests == 0:
		e.busySince = time.Time{}
	case e.busySince.IsZero():
		e.busySince = s.At
	}
	e.formerMs, e.lastMs = e.lastMs, e.ms(s.At)
	if e.last.At.IsZero() {
		e.formerMs = e.lastMs
	}
	e.last = s
	if e.countersUsable(e.lastMs) {
		e.expect(e.sampledMs())
	}
}

// Rebase takes a reading as the one that the next is compared with. What
// happened before it teaches nothing.
func (e *Estimator) Rebase(s Sample) {
	e.clean(&s)
	e.last, e.lastMs, e.busySince = s, e.ms(s.At), time.Time{}
	e.formerMs = e.lastMs
}

// clean takes values that no engine can mean as unknown.
func (e *Estimator) clean(s *Sample) {
	for _, count := range [...]**int{&s.Running, &s.Waiting} {
		if *count != nil && (**count < 0 || **count > maxRequests) {
			*count = nil
			e.counts.BadReadings++
		}
	}
	for _, value := range [...]**float64{
		&s.KVUsedRatio, &s.PromptTokens, &s.ComputedPromptTokens, &s.GenerationTokens,
		&s.FirstTokens, &s.FirstTokenSeconds, &s.Finished, &s.Preemptions,
	} {
		if *value != nil && !(**value >= 0 && **value <= math.MaxFloat64) {
			*value = nil
			e.counts.BadReadings++
		}
	}
	if s.KVUsedRatio != nil && *s.KVUsedRatio > 1 {
		s.KVUsedRatio = nil
		e.counts.BadReadings++
	}
}

// learn takes the growth of the counters since the last reading.
func (e *Estimator) learn(s *Sample) {
	if e.last.At.IsZero() {
		return
	}
	prompt := e.grown(e.last.PromptTokens, s.PromptTokens)
	computed := e.grown(e.last.ComputedPromptTokens, s.ComputedPromptTokens)
	generated := e.grown(e.last.GenerationTokens, s.GenerationTokens)
	firsts := e.grown(e.last.FirstTokens, s.FirstTokens)
	finished := e.grown(e.last.Finished, s.Finished)
	for _, growth := range [...]float64{prompt, computed, generated, firsts, finished} {
		if !math.IsNaN(growth) {
			e.witness = true
		}
		if growth > 0 {
			e.alive(s.At)
		}
	}
	if changed(e.last.Running, s.Running) || changed(e.last.KVUsedRatio, s.KVUsedRatio) {
		// Admissions, ends, and a long prefill that fills block after block.
		e.alive(s.At)
	}
	prefills := firsts
	if math.IsNaN(prefills) {
		prefills = finished
	}
	answers := finished
	if math.IsNaN(answers) {
		answers = firsts
	}
	if math.IsNaN(computed) {
		computed = prompt
	}
	learnMean(&e.meanUncachedTokens, computed, prefills)
	learnMean(&e.meanPromptTokens, prompt, prefills)
	learnMean(&e.meanOutputTokens, generated, answers)
	e.learnPace(s, generated, finished, computed, firsts)
	if before, ok := sum(e.last.Running, e.last.Waiting); ok {
		if after, ok := sum(s.Running, s.Waiting); ok {
			e.lag.poll(e.lastMs, e.ms(s.At), float64(after-before)+finished)
		}
	}
}

// learnPace takes the token gap and the finish rate of an interval.
func (e *Estimator) learnPace(s *Sample, generated, finished, computed, firsts float64) {
	interval := s.At.Sub(e.last.At)
	if interval < minInterval {
		return
	}
	ms := float64(interval) / float64(time.Millisecond)
	if generated > 0 && s.Running != nil && e.last.Running != nil {
		// Every running stream gets one token per gap.
		running := float64(*s.Running+*e.last.Running) / 2
		if gap := running * ms / generated; gap > 0 && gap < 60_000 {
			blend(&e.gapMs, gap, gapWeight)
			e.learnGap(s, gap, computed, firsts)
		}
	}
	if !math.IsNaN(finished) {
		blend(&e.finishPerSec, min(finished*1000/ms, ledger.MaxFinishPerSec), 1-math.Exp(-float64(interval)/float64(finishTime)))
	}
}

// changed reports whether a known gauge moved.
func changed[T comparable](before, after *T) bool {
	return before != nil && after != nil && *before != *after
}

// grown is the growth of a counter, NaN if it is unknown. A counter that went
// back started anew; its growth since is not known.
func (e *Estimator) grown(before, after *float64) float64 {
	if before == nil || after == nil {
		return math.NaN()
	}
	if *after < *before {
		e.counts.CounterResets++
		return math.NaN()
	}
	return *after - *before
}

// learnMean moves a mean of tokens per request by the requests of an interval.
func learnMean(mean *float64, tokens, requests float64) {
	if !(requests >= 1) || math.IsNaN(tokens) {
		return
	}
	value := min(max(tokens/requests, 1), ledger.MaxTokens)
	blend(mean, value, 1-math.Pow(1-perRequest, requests))
}

// blend moves a mean towards a value; the first value is taken whole.
func blend(mean *float64, value, weight float64) {
	if math.IsNaN(*mean) {
		*mean = value
		return
	}
	*mean += weight * (value - *mean)
}

// sum adds two counts; it is not known if either is not.
func sum(a, b *int) (total int, known bool) {
	if a == nil || b == nil {
		return 0, false
	}
	return *a + *b, true
}
