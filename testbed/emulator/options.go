package emulator

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"waypost/testbed/emulator/core"
	"waypost/testbed/emulator/internal/kvevent"
	"waypost/testbed/emulator/wire"
)

// Options configures an engine. Zero values take the defaults.
type Options struct {
	// Model is the served name; default "emulated".
	Model string
	// Adapters are LoRA adapters, each a served name of its own.
	Adapters []Adapter
	// Version is what /version says; default "0.32.0".
	Version string
	// Ranks is the number of data-parallel ranks behind the port; default 1.
	Ranks int

	// BlockTokens is the number of tokens per KV block; default 16.
	BlockTokens int
	// PoolBlocks is the number of KV blocks per rank, of which one is never
	// usable; default 27,000, about what an 80 GB GPU holds for an 8B model.
	PoolBlocks int
	// MaxModelTokens is the longest prompt and answer together; default 131,072.
	MaxModelTokens int
	// StepTokens is the token budget of a step; default 8,192.
	StepTokens int
	// MaxRunning is the largest number of running requests per rank; default 256.
	MaxRunning int
	// HashSeed is the engine's PYTHONHASHSEED; empty: unset.
	HashSeed string
	// StepTime is the duration of a step; default core.Llama8BH100.
	StepTime core.StepTime
	// Speed divides every step's duration; default 1.
	Speed float64
	// VocabularyTokens bounds the token ids of prompts; default 200,000.
	VocabularyTokens int
	// NaturalTokens is the mean length of an answer whose request does not set
	// ignore_eos; default 200.
	NaturalTokens int
	// StreamInterval is the number of tokens per streamed chunk after the
	// first; default 1.
	StreamInterval int

	// Address is where HTTP listens; default "127.0.0.1:0".
	Address string
	// NoEvents turns cache events off.
	NoEvents bool
	// EventsAddress is where rank 0 publishes; rank r uses the port + r.
	// Default "127.0.0.1:0": any port, with room for the ranks.
	EventsAddress string
	// EventsDial makes the publisher connect to this address (port + r)
	// instead of listening, as an engine does whose endpoint has no "*".
	EventsDial string
	// NoReplay turns the replay socket off; ReplayAddress is as EventsAddress.
	NoReplay      bool
	ReplayAddress string
	// Topic is the first frame of each event message.
	Topic string
	// ArrayEvents sends positional events, as before 0.24, instead of maps.
	ArrayEvents bool
	// EventFields is how many fields a positional store has: 6 to 10, by
	// release, or the default 12.
	EventFields int
	// BatchWithoutRank leaves the rank out of batches of 6 fields, as the first
	// release.
	BatchWithoutRank bool
	// DigestHashes sends 32-byte hashes instead of 64-bit integers.
	DigestHashes bool
	// ReplayWithoutTopic answers replay with (empty, sequence, payload), as
	// before 0.26, instead of (empty, topic, sequence, payload).
	ReplayWithoutTopic bool
	// BufferBatches is the number of batches kept for replay; default 10,000.
	BufferBatches int
	// HighWater is the number of batches kept for a slow subscriber; default
	// 100,000.
	HighWater int

	// Transfer lets saved KV travel between engines; nil: it does not.
	Transfer *Transfer

	// HidePromptTokensDetails leaves cached tokens out of the usage, as without
	// --enable-prompt-tokens-details.
	HidePromptTokensDetails bool
	// HideServerInfo leaves out the routes that need the development mode:
	// /server_info, resets and sleep.
	HideServerInfo bool
	// APIKey is asked of /v1 requests; empty: none.
	APIKey string
	// GaugeLag is the age of the gauges in /metrics.
	GaugeLag time.Duration
	// AdminPath serves faults at POST /emulator/fault.
	AdminPath bool

	// Tap sees the event batches of every rank on their way out, Wrap the HTTP
	// routes; nil: nobody.
	Tap  wire.Tap                        `json:"-"`
	Wrap func(http.Handler) http.Handler `json:"-"`

	// Clock is the engine's time; default the machine's. Network deadlines do
	// not use it.
	Clock Clock
	// Logger may be nil.
	Logger *slog.Logger
}

// Adapter is a LoRA adapter.
type Adapter struct {
	// Name is the served name, Path where it was loaded from; default "lora".
	Name, Path string
}

// ErrOptions is a configuration that cannot work.
var ErrOptions = errors.New("emulator options")

const (
	defaultAddress  = "127.0.0.1:0"
	maxRanks        = 64
	maxBatchesKept  = 1 << 20
	tokenizerTokens = 257 // one per byte, and the end token
	endToken        = 256
)

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (o Options) withDefaults() (Options, error) {
	orDefault(&o.Model, "emulated")
	orDefault(&o.Version, "0.32.0")
	orDefault(&o.Ranks, 1)
	orDefault(&o.BlockTokens, 16)
	orDefault(&o.PoolBlocks, 27000)
	orDefault(&o.MaxModelTokens, min(131072, (o.PoolBlocks-1)*o.BlockTokens))
	orDefault(&o.StepTokens, 8192)
	orDefault(&o.MaxRunning, 256)
	orDefault(&o.StepTime, core.Llama8BH100)
	orDefault(&o.Speed, 1)
	orDefault(&o.VocabularyTokens, 200000)
	orDefault(&o.NaturalTokens, 200)
	orDefault(&o.StreamInterval, 1)
	orDefault(&o.Address, defaultAddress)
	orDefault(&o.EventsAddress, defaultAddress)
	orDefault(&o.ReplayAddress, defaultAddress)
	orDefault(&o.BufferBatches, 10000)
	orDefault(&o.HighWater, 100000)
	orDefault[Clock](&o.Clock, realClock{})
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Transfer = o.Transfer.withDefaults()
	adapters := make([]Adapter, len(o.Adapters))
	for i, a := range o.Adapters {
		orDefault(&a.Path, "lora")
		adapters[i] = a
	}
	o.Adapters = adapters
	return o, o.validate()
}

func (o Options) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...))
	}
	if err := o.coreOptions().Validate(); err != nil {
		return bad("%v", err)
	}
	for _, f := range []struct {
		name      string
		value     int
		low, high int
	}{
		{"Ranks", o.Ranks, 1, maxRanks},
		{"VocabularyTokens", o.VocabularyTokens, tokenizerTokens, 1 << 31},
		{"NaturalTokens", o.NaturalTokens, 1, 1 << 20},
		{"StreamInterval", o.StreamInterval, 1, 1 << 20},
		{"BufferBatches", o.BufferBatches, 1, maxBatchesKept},
		{"HighWater", o.HighWater, 1, maxBatchesKept},
	} {
		if f.value < f.low || f.value > f.high {
			return bad("%s is %d: want %d to %d", f.name, f.value, f.low, f.high)
		}
	}
	if !(o.Speed > 0 && o.Speed <= 1e6) {
		return bad("Speed is %v: want more than 0, at most 1e6", o.Speed)
	}
	if err := o.Transfer.validate(); err != nil {
		return bad("%v", err)
	}
	if _, ok := formOf[o.EventFields]; !ok {
		return bad("EventFields is %d: want 6 to 10, or 12", o.EventFields)
	}
	if o.GaugeLag < 0 {
		return bad("GaugeLag is %v: want 0 or more", o.GaugeLag)
	}
	names := map[string]bool{o.Model: true}
	for _, a := range o.Adapters {
		if a.Name == "" || names[a.Name] {
			return bad("Adapters: the name %q is empty or taken", a.Name)
		}
		names[a.Name] = true
	}
	for name, address := range map[string]string{"Address": o.Address, "EventsAddress": o.EventsAddress, "ReplayAddress": o.ReplayAddress, "EventsDial": o.EventsDial} {
		if address == "" {
			continue
		}
		if _, _, err := splitAddress(address); err != nil {
			return bad("%s: %v", name, err)
		}
	}
	return nil
}

func splitAddress(address string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, err
	}
	port, err = strconv.Atoi(p)
	if err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("port %q: want 0 to 65535", p)
	}
	return host, port, nil
}

func (o Options) coreOptions() core.Options {
	return core.Options{
		BlockTokens: o.BlockTokens, PoolBlocks: o.PoolBlocks, MaxModelTokens: o.MaxModelTokens,
		StepTokens: o.StepTokens, MaxRunning: o.MaxRunning, HashSeed: o.HashSeed, StepTime: o.StepTime,
	}
}

func (o Options) eventForm() kvevent.Form {
	switch {
	case !o.ArrayEvents:
		return kvevent.FormMap
	case o.EventFields == 6 && o.BatchWithoutRank:
		return kvevent.FormUnranked
	}
	return formOf[o.EventFields]
}

// formOf is the positional layout of so many fields.
var formOf = map[int]kvevent.Form{
	0: kvevent.FormArray, 12: kvevent.FormArray, 10: kvevent.FormArray10, 9: kvevent.FormArray9, 8: kvevent.FormArray8, 7: kvevent.FormArray7, 6: kvevent.FormArray6,
}
