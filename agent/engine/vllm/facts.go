package vllm

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"

	"github.com/zeebo/xxh3"
)

// source is what the engine says about the event publisher of one rank.
type source struct {
	Enabled   *bool   `json:"enable_kv_cache_events"`
	Publisher *string `json:"publisher"`
	Endpoint  string  `json:"endpoint"`
	Replay    *string `json:"replay_endpoint"`
}

func (s source) publishes() bool {
	return (s.Enabled == nil || *s.Enabled) && (s.Publisher == nil || *s.Publisher != "null") && s.Endpoint != ""
}

// knowledge is what HTTP tells about an engine besides its counters.
type knowledge struct {
	facts engine.Facts
	// sources are the publishers by rank; nil if the engine has no such route.
	sources []source
	// configured says that the dev routes told of the event configuration.
	configured bool
	instance   uint64
}

// learn asks the engine for everything that seldom changes. Only the list of
// models must be there; the other routes are newer or for developers.
func (c client) learn(ctx context.Context) (knowledge, error) {
	k := knowledge{}
	if err := c.learnModels(ctx, &k.facts); err != nil {
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
	if err := c.learnConfig(ctx, &k); err != nil && !enginehttp.Missing(err) {
		return k, err
	}
	return k, nil
}

func (c client) learnModels(ctx context.Context, f *engine.Facts) error {
	var models struct {
		Data []struct {
			ID     string  `json:"id"`
			Parent *string `json:"parent"`
			MaxLen *int    `json:"max_model_len"`
		} `json:"data"`
	}
	if err := c.GetJSON(ctx, "/v1/models", &models); err != nil {
		return err
	}
	for _, m := range models.Data {
		if m.Parent == nil && f.Model == "" {
			f.Model = m.ID
			if m.MaxLen != nil {
				f.MaxModelTokens = *m.MaxLen
			}
			continue
		}
		f.Aliases = append(f.Aliases, m.ID)
	}
	if f.Model == "" {
		return fmt.Errorf("/v1/models lists no model")
	}
	return nil
}

// learnSources reads the publishers: an object keyed by rank, or in the form
// first proposed a list.
func (c client) learnSources(ctx context.Context, k *knowledge) error {
	var raw json.RawMessage
	if err := c.GetJSON(ctx, "/kv_event_sources", &raw); err != nil {
		return err
	}
	var byRank map[string]source
	if json.Unmarshal(raw, &byRank) == nil {
		ranks := make([]int, 0, len(byRank))
		for name := range byRank {
			n, err := strconv.Atoi(name)
			if err != nil || n < 0 {
				return fmt.Errorf("/kv_event_sources: rank %q is no number", name)
			}
			ranks = append(ranks, n)
		}
		slices.Sort(ranks)
		for _, n := range ranks {
			k.sources = append(k.sources, byRank[strconv.Itoa(n)])
		}
	} else if err := json.Unmarshal(raw, &k.sources); err != nil {
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
			Events json.RawMessage `json:"kv_events_config"`
			transferConfig
		} `json:"vllm_config"`
		Env json.RawMessage `json:"vllm_env"`
	}
	if err := c.GetJSON(ctx, "/server_info?config_format=json", &info); err != nil {
		return err
	}
	k.facts.StepTokens = max(0, info.Config.Scheduler.StepTokens)
	k.facts.MaxRunning = max(0, info.Config.Scheduler.MaxRunning)
	k.facts.Transfer = info.Config.facts(k.facts.Version, info.Env)
	if info.Config.Instance != "" {
		k.instance = xxh3.HashString(info.Config.Instance)
	}
	k.configured = true
	if len(k.sources) == 0 && len(info.Config.Events) > 0 {
		// An older engine without the route of its own; ranks count ports on.
		var s source
		if json.Unmarshal(info.Config.Events, &s) == nil && s.Endpoint != "" {
			k.sources = []source{s}
		}
	}
	return nil
}

// plan is how to reach the publisher of one rank.
type plan struct {
	events string // "": none
	listen bool   // the publisher connects to us
	// either says that the address does not tell who binds: listen if nobody
	// answers there.
	either bool
	replay string // "": none
	hint   string // why there is none
}

const (
	hintNoEvents = `the engine publishes no KV events: start it with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'`
	hintUnknown  = "where the engine publishes KV events is not known: set kv_events and kv_replay of the engine, or start it with --kv-events-config"
)

// planFor works out the addresses of a rank from the configuration and from
// what the engine says. The engine's own word decides who binds.
func planFor(t engine.Target, k *knowledge, rank int) plan {
	p := plan{events: shiftPort(t.Events, rank), replay: shiftPort(t.Replay, rank), listen: t.ListenEvents}
	if host := hostOf(t.Events); host == "*" {
		p.listen = true
	}
	var s source
	switch {
	case rank < len(k.sources):
		s = k.sources[rank]
	case len(k.sources) == 1:
		s = k.sources[0]
		s.Endpoint = shiftPort(s.Endpoint, rank)
		if s.Replay != nil {
			r := shiftPort(*s.Replay, rank)
			s.Replay = &r
		}
	case p.events == "" && k.configured:
		return plan{hint: hintNoEvents}
	case p.events == "":
		return plan{hint: hintUnknown}
	default:
		return p
	}
	if !s.publishes() {
		return plan{hint: hintNoEvents}
	}
	if bindsAnywhere(s.Endpoint) {
		if p.events == "" || p.listen {
			p.events = onHost(s.Endpoint, t.URL)
		}
		p.listen = false
	} else {
		p.events, p.either = s.Endpoint, true
	}
	if p.replay == "" && s.Replay != nil {
		p.replay = *s.Replay
		if bindsAnywhere(p.replay) {
			p.replay = onHost(p.replay, t.URL)
		}
	}
	return p
}

// bindsAnywhere is the engine's rule for binding rather than connecting.
func bindsAnywhere(endpoint string) bool {
	return strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::")
}

func hostOf(endpoint string) string {
	host, _, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		return ""
	}
	return host
}

// shiftPort gives the endpoint of a rank from that of rank 0.
func shiftPort(endpoint string, rank int) string {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		return endpoint
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(n+rank))
}

// onHost gives an endpoint bound everywhere at the host of the engine's URL.
func onHost(endpoint, target string) string {
	u, err := url.Parse(target)
	if err != nil {
		return endpoint
	}
	port := endpoint[strings.LastIndexByte(endpoint, ':')+1:]
	return "tcp://" + net.JoinHostPort(u.Hostname(), port)
}
