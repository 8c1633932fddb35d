package sglang

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/kvevents"
	"waypost/agent/engine/poller"
	"waypost/agent/engine/promtext"

	"github.com/zeebo/xxh3"
)

// source asks one SGLang server.
type source struct {
	*enginehttp.Client
	target  engine.Target
	timeout time.Duration

	// model is the served model, for questions that must name it.
	model atomic.Pointer[string]

	buf             bytes.Buffer
	turn            int
	loads           loads
	totals          totals
	totalsAt        time.Time
	faults          int
	oldLoads        bool // the engine has the old route only
	noLoads, noPage bool // it has none at all
}

// Health implements poller.Source. The engine's own health route generates a
// token and takes a second: that load was told is as good a sign of life.
func (s *source) Health(context.Context) error { return nil }

// serverInfo is the part of the server's settings that is used.
type serverInfo struct {
	Version   string           `json:"version"`
	Page      promtext.Reading `json:"page_size"`
	DCP       promtext.Reading `json:"dcp_size"`
	Ranks     promtext.Reading `json:"dp_size"`
	Context   promtext.Reading `json:"context_length"`
	Pool      promtext.Reading `json:"max_total_num_tokens"`
	Chunk     promtext.Reading `json:"chunked_prefill_size"`
	Prefill   promtext.Reading `json:"max_prefill_tokens"`
	Running   promtext.Reading `json:"max_running_requests"`
	Report    bool             `json:"enable_cache_report"`
	NoCache   bool             `json:"disable_radix_cache"`
	Speculate *string          `json:"speculative_algorithm"`
	HostTier  bool             `json:"enable_hierarchical_cache"`
	Seed      json.RawMessage  `json:"random_seed"`
	Startup   json.RawMessage  `json:"startup_time"`
	Served    *string          `json:"served_model_name"`
	// The event settings as they were given, and what newer releases make of
	// them.
	EventsConfig *string `json:"kv_events_config"`
	Events       *struct {
		BlockSize promtext.Reading `json:"block_size"`
	} `json:"kv_events"`
	// What two engines must have alike to read each other's KV.
	Mode         string           `json:"disaggregation_mode"`
	Backend      string           `json:"disaggregation_transfer_backend"`
	ModelPath    string           `json:"model_path"`
	Revision     *string          `json:"revision"`
	DType        string           `json:"dtype"`
	Quantization *string          `json:"quantization"`
	KVType       string           `json:"kv_cache_dtype"`
	Tensor       promtext.Reading `json:"tp_size"`
	Pipeline     promtext.Reading `json:"pp_size"`
}

// Facts implements poller.Source.
func (s *source) Facts(ctx context.Context, _ *poller.Counters) (poller.Known, error) {
	// Routes that were missing may be there after an upgrade.
	s.oldLoads, s.noLoads, s.noPage = false, false, false
	var k poller.Known
	if err := poller.LearnModels(ctx, s.Client, &k.Facts); err != nil {
		return k, err
	}
	var info *serverInfo
	for _, path := range []string{"/server_info", "/get_server_info"} {
		info = &serverInfo{}
		err := s.GetJSON(ctx, path, info)
		if err == nil {
			break
		}
		info = nil
		if !enginehttp.Missing(err) {
			return k, err
		}
	}
	if info != nil {
		info.facts(&k)
	}
	s.fill(&k.Facts)
	k.Faults = s.Odd()
	model := k.Facts.Model
	s.model.Store(&model)
	k.Facts.Capabilities |= engine.StoresLate | engine.TokenizesText | engine.TokenizesChats
	for n := range min(max(1, k.Facts.Ranks), engine.MaxRanks) {
		k.Plans = append(k.Plans, planFor(s.target, info, n))
	}
	return k, nil
}

// facts fills in what the settings tell.
func (i *serverInfo) facts(k *poller.Known) {
	f := &k.Facts
	f.Version = i.Version
	f.Ranks = max(1, i.Ranks.Whole(engine.MaxRanks))
	f.BlockTokens = i.blockTokens()
	if n := i.Pool.Whole(engine.MaxTokens); f.BlockTokens > 0 {
		f.PoolBlocks = n / f.BlockTokens
	}
	if n := i.Context.Whole(engine.MaxTokens); n > 0 {
		f.MaxModelTokens = n
	}
	f.StepTokens = i.Chunk.Whole(engine.MaxTokens)
	if f.StepTokens == 0 {
		f.StepTokens = i.Prefill.Whole(engine.MaxTokens)
	}
	f.MaxRunning = i.Running.Whole(engine.MaxRequests)
	if f.Ranks > 1 {
		f.RankHeader = rankHeader
	}
	// Older releases leave the number out when nothing was reused.
	f.Capabilities = f.Capabilities.With(engine.ReportsCachedTokens|engine.OmitsZeroCachedTokens, i.Report)
	f.Capabilities = f.Capabilities.With(engine.ReadsHostTier, i.HostTier)
	// With speculation a page counts together with the token behind it.
	f.Capabilities = f.Capabilities.With(engine.RecomputesLastBlock, i.Speculate != nil && *i.Speculate != "")
	if len(i.Startup) > 0 && string(i.Startup) != "null" {
		// How long each part of a start took, and a random number, are the same
		// in one life only.
		k.StartMark = xxh3.Hash(append(append([]byte{}, i.Startup...), i.Seed...)) | 1
	}
	f.Transfer = i.transfer(f.BlockTokens)
}

// blockTokens is the number of tokens per block of the events.
func (i *serverInfo) blockTokens() int {
	if i.Events != nil {
		if n := i.Events.BlockSize.Whole(engine.MaxBlockTokens); n > 0 {
			return n
		}
	}
	return i.Page.Whole(engine.MaxBlockTokens) * max(1, i.DCP.Whole(engine.MaxRanks))
}

// transfer is how KV travels from engines that only prefill to those that only
// decode; others give none away.
func (i *serverInfo) transfer(blockTokens int) (t engine.Transfer) {
	switch i.Mode {
	case "prefill", "decode":
		t.Role = i.Mode
	default:
		return t
	}
	t.Connector = i.Backend
	if i.ModelPath == "" || blockTokens == 0 || i.Version == "" {
		return t
	}
	optional := func(s *string) string {
		if s == nil {
			return ""
		}
		return *s
	}
	text := fmt.Sprintf("%q %q %q %q %d %q %v %v %q %q", i.ModelPath, optional(i.Revision), i.DType, optional(i.Quantization),
		blockTokens, i.KVType, i.Tensor.V, i.Pipeline.V, i.Backend, i.Version)
	t.Fingerprint = fmt.Sprintf("%016x", xxh3.HashString(text))
	return t
}

// fill takes from the load and the page of metrics what is not known yet.
func (s *source) fill(f *engine.Facts) {
	f.Ranks = max(1, f.Ranks, len(s.loads.byRank))
	if f.BlockTokens == 0 {
		f.BlockTokens = s.totals.pageTokens.Whole(engine.MaxBlockTokens)
	}
	if f.PoolBlocks == 0 {
		f.PoolBlocks = s.totals.poolPages.Whole(engine.MaxPoolBlocks)
	}
	if f.MaxModelTokens == 0 {
		f.MaxModelTokens = s.totals.contextSize.Whole(engine.MaxTokens)
	}
	if len(s.loads.byRank) == 0 {
		return
	}
	if first := &s.loads.byRank[0]; f.MaxRunning == 0 {
		f.MaxRunning = first.MaxRunning.Whole(engine.MaxRequests)
	}
	if f.BlockTokens == 0 || len(s.loads.byRank) == 1 {
		return
	}
	for i := range s.loads.byRank {
		f.PerRank = append(f.PerRank, engine.RankFacts{PoolBlocks: s.loads.byRank[i].MaxTokens.Whole(engine.MaxTokens) / f.BlockTokens})
	}
}

const hintNoCache = "the engine keeps no prefixes: start it without --disable-radix-cache"

// planFor works out the endpoints of a rank from the configuration and from
// what the engine says; info is nil if it says nothing.
func planFor(t engine.Target, info *serverInfo, rank int) kvevents.Plan {
	var said *kvevents.Publisher
	if info != nil {
		if said = info.publisher(rank); info.NoCache {
			return kvevents.Plan{Named: rank, Hint: hintNoCache}
		}
	}
	plan := dialect.PlanFor(kvevents.Configured{Events: t.Events, Replay: t.Replay, Listen: t.ListenEvents}, said, kvevents.HostOf(t.URL), rank)
	plan.Named = rank
	if info != nil {
		for n := range min(info.Ranks.Whole(engine.MaxRanks), engine.MaxRanks) {
			if n != rank {
				plan.Others = append(plan.Others, n)
			}
		}
	}
	return plan
}

// publisher is what the settings say of a rank's; nil if an older engine says
// nothing and its settings cannot be read.
func (i *serverInfo) publisher(rank int) *kvevents.Publisher {
	var config struct {
		Publisher string  `json:"publisher"`
		Endpoint  *string `json:"endpoint"`
		Replay    *string `json:"replay_endpoint"`
	}
	if i.EventsConfig == nil || *i.EventsConfig == "" {
		return &kvevents.Publisher{Off: true}
	}
	if json.Unmarshal([]byte(*i.EventsConfig), &config) != nil {
		return nil
	}
	out := &kvevents.Publisher{Off: config.Publisher != "zmq", Endpoint: "tcp://*:5557"}
	if config.Endpoint != nil {
		out.Endpoint = *config.Endpoint
	}
	if config.Replay != nil {
		out.Replay = kvevents.ShiftPort(*config.Replay, rank)
	}
	out.Endpoint = kvevents.ShiftPort(out.Endpoint, rank)
	return out
}
