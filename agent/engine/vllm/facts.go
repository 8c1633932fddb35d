package vllm

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/kvevents"
	"waypost/agent/engine/poller"
	"waypost/agent/engine/promtext"

	"github.com/zeebo/xxh3"
)

// publisher is what the engine says about the event publisher of one rank.
type publisher struct {
	Rank     int     `json:"data_parallel_rank"`
	Enabled  *bool   `json:"enable_kv_cache_events"`
	Kind     *string `json:"publisher"`
	Endpoint string  `json:"endpoint"`
	Replay   *string `json:"replay_endpoint"`
}

// of gives the publisher of a rank, whose ports count on from p's.
func (p publisher) of(rank int) *kvevents.Publisher {
	out := kvevents.Publisher{
		Off:      p.Enabled != nil && !*p.Enabled || p.Kind != nil && *p.Kind == "null",
		Endpoint: kvevents.ShiftPort(p.Endpoint, rank),
	}
	if p.Replay != nil {
		out.Replay = kvevents.ShiftPort(*p.Replay, rank)
	}
	return &out
}

// knowledge is what HTTP tells about an engine besides its counters.
type knowledge struct {
	facts engine.Facts
	// sources are the publishers by rank; nil if the engine has no such route.
	sources []publisher
	// configured says that the dev routes told of the event configuration.
	configured bool
	instance   uint64
	// faults counts ranks that cannot be.
	faults int
}

// learn asks the engine for everything that seldom changes. Only the list of
// models must be there; the other routes are newer or for developers.
func (c client) learn(ctx context.Context) (knowledge, error) {
	k := knowledge{}
	if err := poller.LearnModels(ctx, c.Client, &k.facts); err != nil {
		return k, err
	}
	var version struct {
		Version string `json:"version"`
	}
	if err := c.GetJSON(ctx, "/version", &version); err == nil {
		k.facts.Version = version.Version
	} else if !enginehttp.Missing(err) {
		return k, err
	}
	if err := c.learnSources(ctx, &k); err != nil && !enginehttp.Missing(err) {
		return k, err
	}
	// The route looks at much besides the configuration and fails with what it
	// finds, in an environment without pip for example; the engine serves.
	if err := c.learnConfig(ctx, &k); err != nil && !enginehttp.Missing(err) && enginehttp.Status(err) != http.StatusInternalServerError {
		return k, err
	}
	return k, nil
}

// learnSources reads the publishers: an object keyed by rank, or in the form
// first proposed a list.
func (c client) learnSources(ctx context.Context, k *knowledge) error {
	var raw json.RawMessage
	if err := c.GetJSON(ctx, "/kv_event_sources", &raw); err != nil {
		return err
	}
	var byRank map[string]publisher
	if _, err := enginehttp.Decode(raw, &byRank); err == nil {
		ranks := make([]int, 0, len(byRank))
		for name := range byRank {
			n := promtext.Small([]byte(name), engine.MaxRanks)
			if strconv.Itoa(n) != name { // "01" would be a second rank 1
				k.faults++
				continue
			}
			ranks = append(ranks, n)
		}
		slices.Sort(ranks)
		for _, n := range ranks {
			p := byRank[strconv.Itoa(n)]
			p.Rank = n
			k.sources = append(k.sources, p)
		}
	} else if _, err := enginehttp.Decode(raw, &k.sources); err != nil {
		return fmt.Errorf("/kv_event_sources: %w", err)
	}
	if len(k.sources) > engine.MaxRanks {
		return fmt.Errorf("/kv_event_sources: %d ranks, at most %d", len(k.sources), engine.MaxRanks)
	}
	return nil
}

func (c client) learnConfig(ctx context.Context, k *knowledge) error {
	var info struct {
		Config struct {
			Instance  string `json:"instance_id"`
			Scheduler struct {
				StepTokens int `json:"max_num_batched_tokens"`
				MaxRunning int `json:"max_num_seqs"`
			} `json:"scheduler_config"`
			Events      json.RawMessage `json:"kv_events_config"`
			Speculative *struct {
				Method string `json:"method"`
			} `json:"speculative_config"`
			transferConfig
		} `json:"vllm_config"`
		Env json.RawMessage `json:"vllm_env"`
	}
	if err := c.GetJSON(ctx, "/server_info?config_format=json", &info); err != nil {
		return err
	}
	k.facts.StepTokens = max(0, info.Config.Scheduler.StepTokens)
	k.facts.MaxRunning = max(0, info.Config.Scheduler.MaxRunning)
	if sp := info.Config.Speculative; sp != nil {
		// Drafts that start from the target's own states need those of the last
		// block computed.
		k.facts.Capabilities = k.facts.Capabilities.With(engine.RecomputesLastBlock, strings.Contains(sp.Method, "eagle") || strings.Contains(sp.Method, "mtp"))
	}
	k.facts.Transfer = info.Config.facts(k.facts.Version, info.Env)
	if info.Config.Instance != "" {
		k.instance = xxh3.HashString(info.Config.Instance)
	}
	k.configured = true
	if len(k.sources) == 0 && len(info.Config.Events) > 0 {
		// An older engine without the route of its own; ranks count ports on.
		var p publisher
		if json.Unmarshal(info.Config.Events, &p) == nil && p.Endpoint != "" {
			k.sources = []publisher{p}
		}
	}
	return nil
}

// planFor works out the endpoints of a rank from the configuration and from
// what the engine says.
func planFor(t engine.Target, k *knowledge, rank int) kvevents.Plan {
	var said *kvevents.Publisher
	named := rank
	switch {
	case rank < len(k.sources):
		said, named = k.sources[rank].of(0), k.sources[rank].Rank
	case len(k.sources) == 1:
		said = k.sources[0].of(rank)
	case k.configured && t.Events == "":
		said = &kvevents.Publisher{Off: true}
	}
	plan := dialect.PlanFor(kvevents.Configured{Events: t.Events, Replay: t.Replay, Listen: t.ListenEvents}, said, kvevents.HostOf(t.URL), rank)
	plan.Named = named
	for n, p := range k.sources {
		if n != rank && len(k.sources) > 1 {
			plan.Others = append(plan.Others, p.Rank)
		}
	}
	return plan
}
