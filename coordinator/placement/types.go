package placement

import (
	"math"

	"github.com/zeebo/xxh3"

	"waypost/gossip/ledger"
)

// WorkerID is the dense slot of a worker in a coordinator.
type WorkerID uint32

// ViewKind says how much of a worker's cache is seen.
type ViewKind uint8

// The kinds of view. Blind is the zero value: nothing is known of the cache.
const (
	ViewBlind ViewKind = iota
	ViewLive
	ViewWarming
	ViewPartial
	ViewInferred
	ViewStale
)

var viewWords = [...]string{"blind", "live", "warming", "partial", "inferred", "stale"}

// String is the word that people see.
func (k ViewKind) String() string {
	if int(k) < len(viewWords) {
		return viewWords[k]
	}
	return "blind"
}

// View is what is known of a worker's cache and since when.
type View struct {
	// Kind says how much is seen.
	Kind ViewKind
	// AtMs is when it was last true, on the coordinator's clock; NaN: never.
	AtMs float64
	// Trust is the learnt factor on cache credit, 0 to 1; NaN: the prior of
	// the kind.
	Trust float64
	// EvictionAgeMs is the age a block reaches before eviction; NaN: unknown.
	EvictionAgeMs float64
}

// Worker is what a coordinator knows of one worker at one moment. It is
// immutable once published: fleet replaces it as a whole. Times are ms on the
// coordinator's clock, NaN is unknown, an int of 0 is unknown. NewWorker sets
// everything to unknown.
type Worker struct {
	// ID is its slot.
	ID WorkerID
	// Name is host/engine/rank.
	Name string
	// Process marks its engine's life; equality only.
	Process uint64
	// Steps prices its steps at its present decode load.
	Steps ledger.Steps
	// BlockTokens is the number of tokens per KV block, PoolBlocks the number
	// of blocks, MaxModelTokens the longest prompt and answer together,
	// MaxRunning the largest batch.
	BlockTokens, PoolBlocks, MaxModelTokens, MaxRunning int
	// Waiting is its waiting work: the load report and the claims on top.
	Waiting ledger.Waiting
	// QueueKnown says that the report told the queue; else Waiting holds the
	// coordinator's own claims only.
	QueueKnown bool
	// LoadAtMs is when the report's facts were true.
	LoadAtMs float64
	// Decoding counts streams past their first token, ContextTokens sums
	// their contexts.
	Decoding, ContextTokens float64
	// Live counts open and running requests, claims on top included.
	Live float64
	// OpenClaims counts the coordinator's own claims that are not in the
	// report; a lower bound when Live is unknown.
	OpenClaims float64
	// HeldBlocks counts the KV blocks held, claims on top included.
	HeldBlocks float64
	// GapMs is the token gap the worker reports.
	GapMs float64
	// MeanOutputTokens is its mean answer.
	MeanOutputTokens float64
	// FinishPerSec is the number of requests it finishes per second.
	FinishPerSec float64
	// ErrorMs is the mean error of past first-token predictions.
	ErrorMs float64
	// View is what is known of its cache.
	View View
	// AwaySinceMs is since when its host's lane is down; NaN: it is up.
	AwaySinceMs float64
	// Served are the names its engine serves beside the model: aliases and
	// loaded adapters. It must not be changed.
	Served []string
	// Role says which part of a request it serves.
	Role Role
	// Transfer says how its saved KV may travel; nil: not at all. It must not
	// be changed.
	Transfer *Transfer
	// Host says what reading its saved KV back from host memory takes; nil: not
	// known. It must not be changed.
	Host *HostTier
	// Barred is a constraint of will or a fact that nothing relaxes,
	// BarredWhy says more.
	Barred    Reason
	BarredWhy string
	// Doubted is a constraint of observation, DoubtedWhy says more.
	Doubted    Reason
	DoubtedWhy string

	nameHash uint64
}

// hash is the hash of its name; one that was read back from where a record was
// kept has none ready.
func (w *Worker) hash() uint64 {
	if w.nameHash == 0 {
		return xxh3.HashString(w.Name)
	}
	return w.nameHash
}

// NewWorker returns a worker of which nothing else is known.
func NewWorker(id WorkerID, name string) Worker {
	nan := math.NaN()
	return Worker{
		ID: id, Name: name, nameHash: xxh3.HashString(name),
		LoadAtMs: nan, Decoding: nan, ContextTokens: nan, Live: nan, HeldBlocks: nan,
		GapMs: nan, MeanOutputTokens: nan, FinishPerSec: nan, ErrorMs: nan, AwaySinceMs: nan,
		View: View{AtMs: nan, Trust: nan, EvictionAgeMs: nan},
	}
}

// Unknown is the number of tokens that are not known.
const Unknown = -1

// Candidate is a worker beside what is known of it for one request.
type Candidate struct {
	*Worker
	// MatchedTokens is the deepest prefix of the prompt that the worker is
	// known to hold, 0 if none, Unknown if that cannot be said.
	MatchedTokens int
	// LowerTokens is how many of these, from the end, are not in GPU memory but
	// in the host's.
	LowerTokens int
	// Predicted says that the match comes from the prompt of a live claim
	// and not from the worker's own report.
	Predicted bool
	// DistanceMs is the network round trip between caller and worker; NaN:
	// unknown.
	DistanceMs float64
	// SurchargeMs is the operator's price on that way, at least 0.
	SurchargeMs float64
	// Outside says that the operator's topology rule keeps the request from
	// it.
	Outside bool
	// Paths are the ways to it from Situation.Sources, in their order; none:
	// nothing may be pulled.
	Paths []Path
	// Partners are workers that may decode what it prefills, if its role is
	// RolePrefill; PairUp finds them.
	Partners []Partner
}

// Situation is what surrounds a decision.
type Situation struct {
	// NowMs is the moment, on the coordinator's clock.
	NowMs float64
	// ArrivalsPerMs is λ: requests per ms and worker of the pool; NaN:
	// unknown.
	ArrivalsPerMs float64
	// MeanOutputTokens is the pool's mean answer; NaN: unknown.
	MeanOutputTokens float64
	// PolicyAgeMs is the time since the last contact with a leader; NaN:
	// never.
	PolicyAgeMs float64
	// PolicyVersion is the version of the fleet file in force.
	PolicyVersion uint32
	// Sources are workers that saved KV of this prompt may be pulled from, at
	// most MaxSources.
	Sources []Source
}

// Reason says why a worker cannot be chosen.
type Reason uint8

// The reasons. Those up to ReasonLost hold whatever the need; the later ones
// are observations and yield to the panic floor or the last resort.
const (
	ReasonNone Reason = iota
	ReasonCordoned
	ReasonExcludedByRequest
	ReasonSuperseded
	ReasonTenant
	ReasonTooLong
	ReasonNoAdapter
	ReasonOutside
	ReasonLost
	ReasonStarting
	ReasonSleeping
	ReasonStalled
	ReasonFailing
	ReasonGPUFault
	ReasonNotReady
	ReasonDecodes
	ReasonNoPartner
	ReasonAway
	ReasonSilent
	ReasonGroupIncomplete
	numReasons
)

var reasonWords = [numReasons]string{
	"", "cordoned", "excluded_by_request", "superseded", "tenant", "too_long", "no_adapter", "outside", "lost",
	"starting", "sleeping", "stalled", "failing", "gpu_fault", "not_ready", "decode_only", "no_decode_partner", "away", "silent", "group_incomplete",
}

// String is the word used in refusals and counters; empty for ReasonNone.
func (r Reason) String() string {
	if r < numReasons {
		return reasonWords[r]
	}
	return "not_ready"
}

// Firm reports whether the reason is never relaxed.
func (r Reason) Firm() bool { return r != ReasonNone && r <= ReasonLost }

// ofAge reports whether the reason rests on missing or old data alone.
func (r Reason) ofAge() bool { return r == ReasonAway || r == ReasonSilent }

// Budget names a budget of a request.
type Budget uint8

// The budgets.
const (
	BudgetNone Budget = iota
	BudgetFirstToken
	BudgetGap
	BudgetDeadline
)

var budgetWords = [...]string{"none", "first-token budget", "gap budget", "deadline"}

// String is its name for a person.
func (b Budget) String() string { return budgetWords[min(int(b), len(budgetWords)-1)] }

// Terms are the cost terms of one candidate in ms; NaN is unknown.
type Terms struct {
	// Worker is the candidate's slot.
	Worker WorkerID
	// Reason says why the worker was not a free choice.
	Reason Reason
	// Placeable says that it could be chosen, a relaxed observation included.
	Placeable bool
	// OverLimit says that its own time is beyond the policy's limit.
	OverLimit bool
	// Missed is the budget of the request that it misses, if any.
	Missed Budget
	// ReuseTokens is what the worker's engine can reuse of the match, Unknown
	// if the match is.
	ReuseTokens int
	// UncachedTokens is the rest of the prompt, what is pulled left out; at
	// least 1.
	UncachedTokens int
	// StillThere is the probability that the reused blocks are still there;
	// NaN without reuse.
	StillThere float64
	// HostTokens is how many of the reused tokens are read back from host memory.
	HostTokens int
	// LoadMs is what that takes, beside a source on average; NaN: it is unknown and
	// counts as doubt, or nothing is read back.
	LoadMs float64
	// Pull is the best transfer that was found.
	Pull Pull
	// ComputeMs is the prefill that runs on the worker: PrefillMs, or the rest
	// behind what is pulled.
	ComputeMs float64
	// The terms of the package comment.
	StartMs, PrefillMs, PullMs, RoomMs, DoubtMs, DistanceMs, OwnMs float64
	QueueMs, GapMs, StallMs                                        float64
	// HandMs is, for a pair, the hand-over to the decode worker; NaN: there is
	// none. GapMs is that of the decode worker then. Partner is its index in
	// Candidate.Partners; -1: none.
	HandMs  float64
	Partner int
	// AssumedMs is what unknown gap, stall and queue were taken as, weighted.
	AssumedMs float64
	// TotalMs is the sum that is compared.
	TotalMs float64
}

// LikelyGone reports whether what the worker holds itself is gone more likely than
// there; without reuse it is not.
func (t *Terms) LikelyGone() bool { return t.ReuseTokens > 0 && t.StillThere < .5 }

// SurelyThere is the probability from which on what a worker holds itself is taken
// for there where a source may have moved it as well.
const SurelyThere = .9

// SurelyHeld reports whether the worker reuses something of its own that is there
// for sure.
func (t *Terms) SurelyHeld() bool { return t.ReuseTokens > 0 && t.StillThere >= SurelyThere }

// SourceFillsIn reports whether what is reused can be a source's work rather than
// what the worker held: a source that is asked moves whatever of the worker's own is
// missing, without a word.
func (t *Terms) SourceFillsIn() bool {
	return t.Pull.Note == PullSpare || t.Pull.Note == PullTaken && !t.SurelyHeld()
}

// ExpectedReuseTokens is the prediction that outcomes are compared with: the
// likelier of all or nothing. It is Unknown if the match is.
func (t *Terms) ExpectedReuseTokens() int {
	gone := t.LikelyGone()
	// What is gone of its own is moved as well.
	if t.Pull.StillThere >= .5 && (t.Pull.Note == PullTaken || t.Pull.Note == PullSpare && gone) {
		return t.Pull.Behind + t.Pull.Tokens
	}
	if gone {
		return 0
	}
	return t.ReuseTokens
}

// Marks says what was not normal about a decision.
type Marks uint16

// The marks.
const (
	MarkStalePolicy Marks = 1 << iota
	MarkStaleQueue
	MarkQueueUnknown
	MarkLastResort
	MarkOverLimit
	MarkNoCacheView
	MarkEstimatedLength
	MarkPanicFloor
	MarkTenantOverShare
	// MarkShorterThanBlock: the prompt is at most one block of the chosen worker,
	// of which nothing is ever reused: that nothing is expected is no fault.
	MarkShorterThanBlock
)

var markWords = [...]string{
	"stale_policy", "stale_queue", "queue_unknown", "last_resort", "over_limit",
	"no_cache_view", "estimated_length", "panic_floor",
	"tenant_over_share", "shorter_than_block",
}

// Words lists the marks by their names.
func (m Marks) Words() []string {
	var words []string
	for i, word := range markWords {
		if m&(1<<i) != 0 {
			words = append(words, word)
		}
	}
	return words
}
