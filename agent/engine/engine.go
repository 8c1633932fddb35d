package engine

import (
	"context"
	"strconv"
	"time"

	"waypost/agent/blocktable"
)

// Target is one engine endpoint on this host, as configured or discovered.
type Target struct {
	// Name is the engine's name on the host, "vllm-8000" for example.
	Name string
	// Kind is the engine kind, "vllm" for example.
	Kind string
	// URL is the base URL the agent reaches the engine at.
	URL string
	// Events is the ZeroMQ endpoint of KV events of rank 0, "tcp://host:port";
	// other ranks count its port on. Empty: the engine is asked. "tcp://*:port"
	// is to listen there for an engine that connects.
	Events string
	// ListenEvents says that the engine connects to Events.
	ListenEvents bool
	// Replay is the ZeroMQ endpoint of the event replay of rank 0; empty: the
	// engine is asked.
	Replay string
	// APIKey authorises requests to the engine; empty: none.
	APIKey string
	// HostCacheMiB is the engine's cache in host memory, as its own flag has
	// it: -1: no limit in bytes, 0: none; nil: not known.
	HostCacheMiB *int
	// KVBytesPerToken is the KV of one token; 0: not known.
	KVBytesPerToken float64
	// KVConnector is the engine's KV connector; empty: the engine is asked.
	KVConnector string
}

// The bounds of what is believed of an engine. Beyond them a number is unknown.
const (
	// MaxRanks bounds the ranks behind one endpoint.
	MaxRanks = 256
	// MaxBlockTokens bounds the tokens of a block.
	MaxBlockTokens = 1 << 20
	// MaxPoolBlocks bounds the blocks of a rank.
	MaxPoolBlocks = 1 << 30
	// MaxTokens bounds the tokens of a prompt or step, MaxRequests the requests
	// that run at once.
	MaxTokens, MaxRequests = 1 << 28, 1 << 20
	// MaxNames bounds the served names and adapters, MaxNameBytes each of them.
	MaxNames, MaxNameBytes = 1024, 512
)

// Within is a count if it is from 1 to limit, else 0, which is unknown.
func Within(n, limit int) int {
	if n < 1 || n > limit {
		return 0
	}
	return n
}

// Facts is what seldom changes about an engine. Zero values are unknown
// unless the field says otherwise.
type Facts struct {
	// Version is the engine's version as it says.
	Version string
	// Model is the served model: the first id of the engine's list that is
	// not an adapter.
	Model string
	// Aliases are the other served names and loaded adapters.
	Aliases []string
	// Ranks is the number of data-parallel ranks behind the endpoint.
	Ranks int
	// BlockTokens is the number of tokens per KV block.
	BlockTokens int
	// PoolBlocks is the number of usable KV blocks per rank.
	PoolBlocks int
	// MaxModelTokens is the longest prompt and answer together.
	MaxModelTokens int
	// MaxRunning is the largest number of running requests per rank.
	MaxRunning int
	// StepTokens is the number of prefill tokens a step may hold.
	StepTokens int
	// StartMark identifies the process life: equal within one life and
	// different in the next. It is 0 when the engine does not tell.
	StartMark uint64
	// RankHeader is the HTTP header by which a request names its rank, empty:
	// the engine chooses.
	RankHeader string
	// PerRank is what differs from rank to rank, by rank; empty: nothing.
	PerRank []RankFacts
	// Capabilities are those that the engine was seen to have.
	Capabilities Capability
	// LeastReuseRatio is the share of a prompt that must be found for any of it
	// to be reused, 0 to 1; 0: anything that is found is.
	LeastReuseRatio float64
	// Unordered says that the engine does not serve requests in their order.
	Unordered bool
	// Transfer is what the engine says of its KV transfer connector.
	Transfer Transfer
}

// Bounded is the facts with everything unknown that no engine can have, and
// with names left out that are too many or too long.
func (f Facts) Bounded() Facts {
	f.Ranks = min(max(1, f.Ranks), MaxRanks)
	f.BlockTokens, f.PoolBlocks = Within(f.BlockTokens, MaxBlockTokens), Within(f.PoolBlocks, MaxPoolBlocks)
	f.MaxModelTokens, f.StepTokens = Within(f.MaxModelTokens, MaxTokens), Within(f.StepTokens, MaxTokens)
	f.MaxRunning = Within(f.MaxRunning, MaxRequests)
	f.Version, f.Model, f.RankHeader = short(f.Version), short(f.Model), short(f.RankHeader)
	var aliases []string
	for _, a := range f.Aliases {
		if short(a) != "" && len(aliases) < MaxNames {
			aliases = append(aliases, a)
		}
	}
	f.Aliases = aliases
	f.PerRank = append([]RankFacts(nil), f.PerRank[:min(len(f.PerRank), MaxRanks)]...)
	for i := range f.PerRank {
		r := &f.PerRank[i]
		r.BlockTokens, r.PoolBlocks = Within(r.BlockTokens, MaxBlockTokens), Within(r.PoolBlocks, MaxPoolBlocks)
	}
	if !(f.LeastReuseRatio >= 0 && f.LeastReuseRatio <= 1) {
		f.LeastReuseRatio = 0
	}
	if !(f.Transfer.BytesPerToken >= 0 && f.Transfer.BytesPerToken <= maxBytesPerToken) {
		f.Transfer.BytesPerToken = 0
	}
	return f
}

// maxBytesPerToken bounds the KV of one token.
const maxBytesPerToken = 1e9

// short is a name, or nothing if it is too long to be one.
func short(name string) string {
	if len(name) > MaxNameBytes {
		return ""
	}
	return name
}

// RankFacts is what one rank has for itself. Zero values are as in Facts.
type RankFacts struct {
	// BlockTokens is the number of tokens per KV block.
	BlockTokens int
	// PoolBlocks is the number of usable KV blocks.
	PoolBlocks int
	// Capabilities are those that this rank was seen to have besides.
	Capabilities Capability
}

// Of is the facts of one rank: those of the engine with what the rank has for
// itself.
func (f Facts) Of(rank int) Facts {
	if rank >= 0 && rank < len(f.PerRank) {
		own := f.PerRank[rank]
		if own.BlockTokens > 0 {
			f.BlockTokens = own.BlockTokens
		}
		if own.PoolBlocks > 0 {
			f.PoolBlocks = own.PoolBlocks
		}
		f.Capabilities |= own.Capabilities
	}
	f.PerRank = nil
	return f
}

// Transfer says how saved KV of an engine may travel to another. Empty texts
// and 0 are unknown.
type Transfer struct {
	// Connector is the engine's name of it, "OffloadingConnector" for example.
	Connector string
	// Role is "prefill" or "decode" of an engine that serves a part of each
	// request; empty: it serves all of it.
	Role string
	// SideChannel is the host:port where peers reach the connector of rank 0;
	// other ranks count its port on.
	SideChannel string
	// Fingerprint stands for what both ends must have alike: model and
	// weights, KV type and layout, block size, parallelism, connector and
	// version.
	Fingerprint string
	// ExportedTier is the memory that the connector reads for others, "gpu" or
	// "host".
	ExportedTier string
	// BytesPerToken is the KV of one token over all GPUs of a rank.
	BytesPerToken float64
}

// Load is one reading of the counters of one rank. Nil is unknown, never zero.
type Load struct {
	// At is when the reading was taken, on the local monotonic clock: when the
	// engine took it if it says how old its counters are, else when they came.
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

// Sink receives what an adapter learns, on the adapter's goroutines. Calls of
// one rank are never concurrent with each other.
type Sink interface {
	// Facts tells changed facts of the engine.
	Facts(Facts)
	// Load tells a reading of one rank.
	Load(rank int, load Load)
	// Health tells whether the engine serves; reason is empty when it does.
	Health(up bool, reason string)
	// Batch tells an event batch of one rank in order. The events are valid
	// during the call only.
	Batch(rank int, batch Batch)
	// Reset tells that nothing of the rank's cache is known any more.
	Reset(rank int, cause ResetCause)
	// Coverage tells how much of the rank's cache the events show.
	Coverage(rank int, coverage Coverage, hint string)
	// Counted adds to a counter of stream faults: gaps, duplicates, damage.
	Counted(rank int, what string, n int)
}

// What adapters count besides faults of event streams: answers about load, facts
// and slots with values that no engine can have.
const (
	CountMetricFaults = "metricFaults"
	CountFactFaults   = "factFaults"
	CountSlotFaults   = "slotFaults"
)

// Rebuilder is a Sink that can build a new view of a rank's cache beside the
// old one, which then serves on, unverified, instead of nothing. A Sink that is
// none is told Reset with the same cause in place of Rebuild.
type Rebuilder interface {
	// Rebuild tells that the batches that follow build the cache of a rank
	// from the beginning of what the engine remembers. The old view stays,
	// but is to be trusted less, until Rebuilt or Reset.
	Rebuild(rank int, cause ResetCause)
	// Rebuilt tells that the batches since Rebuild are the rank's cache.
	Rebuilt(rank int)
}

// Resyncer is an Adapter that can read one rank's events again from the
// beginning while it runs.
type Resyncer interface {
	// Resync asks for it, because the view of the rank proved wrong. Rebuild
	// or Reset follows when the engine's answer begins. Where the engine tells
	// nothing twice, all of the view is dropped, unless it is only lacking: what
	// it has is not in doubt, and Resync reports false. It does not block and may be
	// called from within the Sink's methods.
	Resync(rank int, lacking bool) bool
}

// Batch is one event batch of one rank.
type Batch struct {
	// Seq is the publisher's number of the batch.
	Seq uint64
	// Received is when it arrived, on the local monotonic clock.
	Received time.Time
	// Age is how long before Received the engine published it, at least 0.
	Age time.Duration
	// Replayed says that it came from the replay socket.
	Replayed bool
	// Events are the batch's events in order.
	Events []blocktable.Event
}

// ResetCause says why a rank's cache is no longer known.
type ResetCause string

// The causes of a reset.
const (
	ResetRestart ResetCause = "restart"
	ResetGap     ResetCause = "gap"
	ResetSleep   ResetCause = "sleep"
	// ResetGone: its process has ended, and with it the requests it had.
	ResetGone ResetCause = "gone"
)

// Coverage says how much of a worker's cache is seen.
type Coverage string

// The coverages. Full needs events and a replay that reached the beginning.
const (
	CoverageFull    Coverage = "full"
	CoveragePartial Coverage = "partial"
	CoverageNone    Coverage = "none"
)

// Adapter reads one engine until its context ends. What an engine cannot give
// its adapter has no method for: see Tokenizer and Resyncer.
type Adapter interface {
	// Run reads the engine and calls sink; it returns when ctx is done, or
	// with an error when the target can never work. It may be called again
	// and then begins anew, with a Reset of each rank.
	Run(ctx context.Context, sink Sink) error
}

// Tokenizer is an Adapter of an engine that tells token ids.
type Tokenizer interface {
	// Tokenize asks the engine for the token ids of a prompt.
	Tokenize(ctx context.Context, prompt string, addSpecialTokens bool) ([]uint32, error)
	// Render asks the engine to render a chat request and tokenize it.
	Render(ctx context.Context, chatJSON []byte) ([]uint32, error)
}

// RenderCoster is a Tokenizer whose Render takes more than one request to the
// engine.
type RenderCoster interface {
	// RenderRequests is how many it takes.
	RenderRequests() int
}

// Completer is an Adapter of an engine that can be asked for one token.
type Completer interface {
	// Complete runs a prompt, special tokens added as the engine does it, for
	// one token, on a rank that the engine lets requests name; below 0 the engine
	// chooses.
	Complete(ctx context.Context, prompt string, rank int) (Usage, error)
}

// Usage is what an engine says of one request.
type Usage struct {
	// PromptTokens is the length of the prompt; 0: not told.
	PromptTokens int
	// CachedTokens is how many of them were reused; -1: not told.
	CachedTokens int
}

// RankHeaders are the headers of a request that names a rank; nil below 0.
func RankHeaders(name string, rank int) map[string]string {
	if rank < 0 {
		return nil
	}
	return map[string]string{name: strconv.Itoa(rank)}
}
