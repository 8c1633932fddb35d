package profile

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"waypost/testbed/emulator/wire"
)

// Kind is an engine kind, as the agent's configuration names it.
type Kind string

// The kinds.
const (
	SGLang      Kind = "sglang"
	TensorRTLLM Kind = "trtllm"
	LlamaCpp    Kind = "llamacpp"
)

// Kinds are all kinds.
func Kinds() []Kind { return []Kind{SGLang, TensorRTLLM, LlamaCpp} }

// Options configures an engine. Zero values take the defaults; what belongs to
// another kind is ignored.
type Options struct {
	// Kind is required.
	Kind Kind
	// Model is the served name; default "emulated".
	Model string
	// Version is what the engine says it is; default that of the recordings.
	Version string
	// PageTokens is the number of tokens per page or block; default 16 of
	// SGLang, 32 of TensorRT-LLM.
	PageTokens int
	// PoolTokens is the KV memory; default 400,000 tokens, of llama.cpp what
	// its slots hold.
	PoolTokens int
	// MaxModelTokens is the longest prompt and answer together; default 32,768,
	// of llama.cpp that of a slot.
	MaxModelTokens int
	// MaxRunning is the largest number of running requests; default 64.
	MaxRunning int
	// NaturalTokens is the length of an answer whose request sets no limit;
	// default 16.
	NaturalTokens int

	// PrefillTokensPerSec and TokenTime are the speeds; defaults 40,000 and
	// 10 ms. Speed divides both times; default 1.
	PrefillTokensPerSec float64
	TokenTime           time.Duration
	Speed               float64

	// Address is where HTTP listens; EventsAddress and ReplayAddress where
	// events do; default "127.0.0.1:0".
	Address, EventsAddress, ReplayAddress string
	// NoEvents turns events off, NoReplay the replay socket.
	NoEvents, NoReplay bool
	// Topic is the first frame of each event message.
	Topic string
	// ReplayWithoutTopic answers replay with three frames, as SGLang before
	// 0.5.23.
	ReplayWithoutTopic bool
	// BufferBatches is how many batches are kept for replay; default 10,000.
	BufferBatches int

	// Layout is that of SGLang's events; default the newest.
	Layout SGLayout
	// UnsaltedHashes leaves the salt out of SGLang's hashes, as before 0.5.18.
	UnsaltedHashes bool
	// OldLoads serves load at /get_load instead of /v1/loads, and settings at
	// /get_server_info.
	OldLoads bool
	// HideMetrics leaves out the page of metrics.
	HideMetrics bool
	// StoresLag is how long after an answer its pages are told of; default of
	// SGLang 5 ms.
	StoresLag time.Duration

	// Streams publishes TensorRT-LLM's events on ZeroMQ: then polling gives
	// none.
	Streams bool
	// Hash is that of TensorRT-LLM's blocks; default TRTBlockKey.
	Hash TRTHash
	// EventBuffer is how many events wait to be polled, the oldest being lost;
	// default 16,384.
	EventBuffer int
	// IterationStats serves the records of steps at /metrics.
	IterationStats bool

	// Slots is the number of llama.cpp's slots; default 4.
	Slots int
	// Similarity is --slot-prompt-similarity; default 0.1.
	Similarity float64
	// HostTokens bounds the host's prompt cache; default 32,768 per slot, -1:
	// there is none.
	HostTokens int
	// Unified is the server without --parallel: one buffer, idle slots emptied.
	Unified bool
	// NoIdleCopies is --no-cache-idle-slots.
	NoIdleCopies bool
	// HideSlots is --no-slots.
	HideSlots bool
	// CountsCached is the page of metrics since prompt tokens are counted
	// without the cached ones, which have a counter of their own; false is
	// older.
	CountsCached bool
	// ModelsNeedKey asks for the API key at /v1/models too, as newer builds do.
	ModelsNeedKey bool
	// APIKey is asked of requests; empty: none.
	APIKey string

	// Tap sees the event batches, Wrap the HTTP routes; nil: nobody.
	Tap  wire.Tap
	Wrap func(http.Handler) http.Handler
	// Logger may be nil.
	Logger *slog.Logger
}

// ErrOptions is a configuration that cannot work.
var ErrOptions = errors.New("emulator profile options")

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (o Options) withDefaults() (Options, error) {
	bad := func(format string, args ...any) (Options, error) {
		return o, fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...))
	}
	switch o.Kind {
	case SGLang:
		orDefault(&o.Version, "0.5.23")
		orDefault(&o.PageTokens, 16)
		orDefault(&o.Layout, SGMap)
		orDefault(&o.StoresLag, 5*time.Millisecond)
	case TensorRTLLM:
		orDefault(&o.Version, "1.3.0")
		orDefault(&o.PageTokens, 32)
		orDefault(&o.Hash, TRTBlockKey)
	case LlamaCpp:
		orDefault(&o.Version, "b11434-unknown")
		orDefault(&o.PageTokens, 1)
		orDefault(&o.MaxModelTokens, 32_768)
		orDefault(&o.Slots, 4)
		orDefault(&o.Similarity, .1)
		orDefault(&o.HostTokens, 32_768*o.Slots)
		o.MaxRunning = o.Slots
	default:
		return bad("Kind is %q: want sglang, trtllm or llamacpp", o.Kind)
	}
	orDefault(&o.Model, "emulated")
	orDefault(&o.PoolTokens, 400_000)
	orDefault(&o.MaxModelTokens, 32_768)
	orDefault(&o.MaxRunning, 64)
	orDefault(&o.NaturalTokens, 16)
	orDefault(&o.PrefillTokensPerSec, 40_000)
	orDefault(&o.TokenTime, 10*time.Millisecond)
	orDefault(&o.Speed, 1)
	orDefault(&o.BufferBatches, 10_000)
	orDefault(&o.EventBuffer, 16_384)
	for _, a := range []*string{&o.Address, &o.EventsAddress, &o.ReplayAddress} {
		orDefault(a, "127.0.0.1:0")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case o.Layout > SGMap:
		return bad("Layout is %d: want 1 to %d", o.Layout, SGMap)
	case o.PageTokens < 1 || o.PageTokens > 4096:
		return bad("PageTokens is %d: want 1 to 4096", o.PageTokens)
	case o.PoolTokens < 2*o.PageTokens || o.PoolTokens > 1<<30:
		return bad("PoolTokens is %d: want two pages or more", o.PoolTokens)
	case o.MaxRunning < 1 || o.MaxRunning > 4096:
		return bad("MaxRunning is %d: want 1 to 4096", o.MaxRunning)
	case !(o.Speed > 0 && o.Speed <= 1e9):
		return bad("Speed is %v: want more than 0", o.Speed)
	case o.Kind == TensorRTLLM && o.Hash != TRTBlockKey && o.Hash != TRTSHA256:
		return bad("Hash is %q: want %s or %s", o.Hash, TRTBlockKey, TRTSHA256)
	}
	return o, nil
}

// Versions are the releases whose differences matter, by name: what a fleet of
// mixed versions has to be tested with.
var versions = map[Kind][]struct {
	name  string
	apply func(*Options)
}{
	SGLang: {
		{"0.4.7", func(o *Options) {
			o.Layout, o.UnsaltedHashes, o.ReplayWithoutTopic, o.OldLoads = SGRanked, true, true, true
		}},
		{"0.5.9", func(o *Options) { o.Layout, o.UnsaltedHashes, o.ReplayWithoutTopic = SGMedium, true, true }},
		{"0.5.18", func(o *Options) { o.Layout, o.ReplayWithoutTopic = SGSalted, true }},
		{"0.5.23", func(o *Options) { o.Layout = SGMap }},
	},
	TensorRTLLM: {
		{"1.0.0", func(o *Options) { o.HideMetrics, o.IterationStats = true, true }},
		{"1.3.0", func(*Options) {}},
		{"1.4.0", func(o *Options) { o.Streams, o.Hash = true, TRTSHA256 }},
	},
	LlamaCpp: {
		{"b9000", func(o *Options) { o.NoIdleCopies = true }},
		{"b10434", func(o *Options) { o.CountsCached = true }},
		{"b11434", func(o *Options) { o.CountsCached, o.ModelsNeedKey = true, true }},
	},
}

// Versions are the names of a kind's releases with a switch of their own,
// oldest first.
func Versions(k Kind) (names []string) {
	for _, v := range versions[k] {
		names = append(names, v.name)
	}
	return names
}

// Of is the options of a release: one of Versions, or empty for the newest.
func Of(k Kind, version string) (Options, error) {
	o := Options{Kind: k, Version: version}
	list := versions[k]
	if len(list) == 0 {
		return o, fmt.Errorf("%w: Kind is %q: want sglang, trtllm or llamacpp", ErrOptions, k)
	}
	if version == "" {
		version = list[len(list)-1].name
	}
	for _, v := range list {
		if v.name == version {
			o.Version = version
			v.apply(&o)
			return o, nil
		}
	}
	return o, fmt.Errorf("%w: %s has no version %q: want one of %v", ErrOptions, k, version, Versions(k))
}
