package ledger

import (
	"errors"
	"fmt"
)

// ErrLoad is wrapped by every error of Load.Validate.
var ErrLoad = errors.New("bad load report")

// State is the state word of a worker as its agent reports it.
type State string

// The states an agent reports. Any other word is taken as not ready.
const (
	StateReady    State = "ready"
	StateStarting State = "starting"
	StateSleeping State = "sleeping"
	StateStalled  State = "stalled"
	StateLost     State = "lost"
)

// Load is what a load report says of one worker. Nil fields are unknown,
// never zero; the zero value knows nothing. Times are ms, lengths tokens.
type Load struct {
	// EngineProcess marks the engine life it was read from; equality only.
	EngineProcess uint64
	// State is the state word, StateReason says why it is not ready.
	State       State
	StateReason string
	// AgeMs is the age of the report's oldest fact at the moment of writing;
	// it is what doubt grows with.
	AgeMs *float64
	// QueueMs is the time from the moment of writing until the last known
	// open claim's prefill ends; 0 is an empty queue. The writer has carried
	// older facts forward to that moment already.
	QueueMs *float64
	// OpenTokens is the prompt tokens in the last planned step that has not
	// begun; 0 when that step is in flight or full.
	OpenTokens *uint32
	// Decoding counts the streams past their first token, ContextTokens sums
	// their contexts, prompt and output so far, at the moment of writing.
	Decoding      *uint32
	ContextTokens *float64
	// GapMs is the present gap between tokens.
	GapMs *float64
	// Live counts open and running requests, foreign ones included.
	Live *uint32
	// HeldBlocks counts the KV blocks held by live requests.
	HeldBlocks *float64
	// Foreign counts the requests that no claim explains.
	Foreign *uint32
	// MeanOutputTokens is the mean output length.
	MeanOutputTokens *float64
	// Running and Waiting are the engine's own counters.
	Running, Waiting *uint32
	// CountersAgeMs is the age of the counters with their learnt lag; nil:
	// counters were not used.
	CountersAgeMs *float64
	// KVUsedRatio is the share of KV blocks referenced, 0 to 1.
	KVUsedRatio *float64
	// FinishPerSec is the number of requests finished per second.
	FinishPerSec *float64
	// CachedBlocks is the number of blocks in the block table.
	CachedBlocks *uint32
	// EvictionAgeMs is the age a block reaches before it is evicted.
	EvictionAgeMs *float64
	// QueueBasis says what the queue rests on; empty: it is not told.
	QueueBasis Basis
	// Echo says what was taken in of each coordinator's claims.
	Echo []Echo
	// GPUVerdict is ok, price or exclude, with the reason after a colon.
	GPUVerdict string
	// Coverage is how much of the cache the events show: full, partial, none.
	Coverage string
}

// Basis is what a reported queue rests on.
type Basis string

// The bases of a queue, best first.
const (
	// BasisEvidence: marks or stored blocks confirm the claims.
	BasisEvidence Basis = "evidence"
	// BasisCounters: the engine's counters do.
	BasisCounters Basis = "counters"
	// BasisTime: nothing does; the claims drain by time only.
	BasisTime Basis = "time only"
)

// Echo is the contiguous end of what was taken in from one coordinator:
// every claim up to Upto was taken in or given up by its sender.
type Echo struct {
	// Coordinator is the process mark of the coordinator.
	Coordinator uint64
	// Upto is the last claim seq covered.
	Upto uint64
}

// Limits of a load report; a report beyond them is an error.
const (
	MaxContextTokens = 1e12
	MaxFinishPerSec  = 1e6
	maxReportAgeMs   = 3_600_000
	maxRequests      = 1 << 20
	maxBlocks        = 1e10
	maxWordBytes     = 256
	maxEchoes        = 64
	MaxEvictionMs    = 1e12
)

// Validate reports the first field that is not finite, negative or beyond its
// limit, by the name it has in the report.
func (l *Load) Validate() error {
	for _, f := range [...]struct {
		name  string
		value *float64
		high  float64
	}{
		{"ageMs", l.AgeMs, maxReportAgeMs},
		{"queueMs", l.QueueMs, MaxQueueMs},
		{"contextTokens", l.ContextTokens, MaxContextTokens},
		{"gapMs", l.GapMs, maxBaseMs},
		{"heldBlocks", l.HeldBlocks, maxBlocks},
		{"meanOutputTokens", l.MeanOutputTokens, MaxTokens},
		{"countersAgeMs", l.CountersAgeMs, maxReportAgeMs},
		{"kvUsedRatio", l.KVUsedRatio, 1},
		{"finishPerSec", l.FinishPerSec, MaxFinishPerSec},
		{"evictionAgeMs", l.EvictionAgeMs, MaxEvictionMs},
	} {
		if f.value != nil && !(*f.value >= 0 && *f.value <= f.high) {
			return fmt.Errorf("%w: %s: %v is not in 0 to %g", ErrLoad, f.name, *f.value, f.high)
		}
	}
	for _, f := range [...]struct {
		name  string
		value *uint32
		high  uint32
	}{
		{"openTokens", l.OpenTokens, MaxTokens},
		{"decoding", l.Decoding, maxRequests},
		{"live", l.Live, maxRequests},
		{"foreign", l.Foreign, maxRequests},
		{"running", l.Running, maxRequests},
		{"waiting", l.Waiting, maxRequests},
	} {
		if f.value != nil && *f.value > f.high {
			return fmt.Errorf("%w: %s: %d is above %d", ErrLoad, f.name, *f.value, f.high)
		}
	}
	for _, f := range [...]struct{ name, value string }{
		{"state", string(l.State)},
		{"stateReason", l.StateReason},
		{"gpuVerdict", l.GPUVerdict},
		{"coverage", l.Coverage},
		{"queueBasis", string(l.QueueBasis)},
	} {
		if len(f.value) > maxWordBytes {
			return fmt.Errorf("%w: %s: %d bytes are more than %d", ErrLoad, f.name, len(f.value), maxWordBytes)
		}
	}
	if len(l.Echo) > maxEchoes {
		return fmt.Errorf("%w: echo: %d entries are more than %d", ErrLoad, len(l.Echo), maxEchoes)
	}
	return nil
}

// EchoOf is the last seq of the coordinator's claims that the report covers;
// 0 when it names none.
func (l *Load) EchoOf(coordinator uint64) uint64 {
	for _, e := range l.Echo {
		if e.Coordinator == coordinator {
			return e.Upto
		}
	}
	return 0
}
