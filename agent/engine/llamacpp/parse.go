package llamacpp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/llamacpp/slots"
	"waypost/agent/engine/promtext"
	"waypost/gossip/ledger"
)

// errSlots means that an answer of /slots is not one that a server gives.
var errSlots = errors.New("/slots")

// slotPage is what /slots tells.
type slotPage struct {
	seen []slots.Seen
	busy int
}

// parseSlots reads an answer of /slots. A slot that was never used has no
// length; what is computed of a prompt, and what was there, means nothing when a
// slot is idle, and is all of it once the answer has begun.
func parseSlots(page []byte) (slotPage, error) {
	var list []struct {
		ID         *int64 `json:"id"`
		Processing *bool  `json:"is_processing"`
		Tokens     *int64 `json:"n_prompt_tokens"`
		Task       *int64 `json:"id_task"`
		Computed   int64  `json:"n_prompt_tokens_processed"`
		Cached     int64  `json:"n_prompt_tokens_cache"`
		Next       []struct {
			Decoded int64 `json:"n_decoded"`
		} `json:"next_token"`
	}
	if err := enginehttp.Widest(page, enginehttp.MaxMembers); err != nil {
		return slotPage{}, fmt.Errorf("%w: %w", errSlots, err)
	}
	if err := json.Unmarshal(page, &list); err != nil {
		return slotPage{}, fmt.Errorf("%w: answer is not a list of slots", errSlots)
	}
	if len(list) == 0 || len(list) > slots.MaxSlots {
		return slotPage{}, fmt.Errorf("%w: %d slots are not 1 to %d", errSlots, len(list), slots.MaxSlots)
	}
	out := slotPage{seen: make([]slots.Seen, len(list))}
	for i, s := range list {
		if s.ID == nil || *s.ID != int64(i) || s.Processing == nil {
			return slotPage{}, fmt.Errorf("%w: [%d]: id and is_processing must be there, in the order of the ids", errSlots, i)
		}
		seen := slots.Seen{Busy: *s.Processing, Tokens: -1}
		if s.Tokens != nil {
			if *s.Tokens < 0 || *s.Tokens > engine.MaxTokens {
				return slotPage{}, fmt.Errorf("%w: [%d].n_prompt_tokens: %d is not a length", errSlots, i, *s.Tokens)
			}
			seen.Tokens = int(*s.Tokens)
		}
		if s.Task != nil && *s.Task >= 0 {
			seen.Task = uint64(*s.Task) + 1 // they begin at 0
		}
		if seen.Busy {
			out.busy++
			whole := s.Computed >= 0 && s.Computed <= engine.MaxTokens && s.Cached >= 0 && s.Cached <= engine.MaxTokens
			if whole && len(s.Next) > 0 && s.Next[0].Decoded > 0 {
				seen.Prompt = int(s.Computed + s.Cached)
			}
		}
		out.seen[i] = seen
	}
	return out, nil
}

// counters is what /metrics tells. Its gauges of speeds are averages since the
// last reading, whoever made it, and are left alone.
type counters struct {
	running, deferred           promtext.Reading
	computed, cached, predicted promtext.Reading
	faults                      int
}

// parseMetrics reads a page of /metrics.
func parseMetrics(page []byte) (c counters) {
	for s := promtext.NewScanner(page); s.Next(); {
		name, ours := bytes.CutPrefix(s.Name(), []byte("llamacpp:"))
		if !ours {
			continue
		}
		var r *promtext.Reading
		switch string(name) {
		case "requests_processing":
			r = &c.running
		case "requests_deferred":
			r = &c.deferred
		case "prompt_tokens_total":
			r = &c.computed
		case "prompt_tokens_cached_total":
			r = &c.cached
		case "tokens_predicted_total":
			r = &c.predicted
		default:
			continue
		}
		v, ok := s.Value()
		if !ok {
			c.faults++
		}
		r.Add(v, ok)
	}
	return c
}

// load is the reading as the agent takes it. prompt_tokens_total leaves cached
// tokens out since the server counts those apart; before, it is not known what
// it counts.
func (c *counters) load(at time.Time) engine.Load {
	l := engine.Load{At: at, Running: c.running.Count(), Waiting: c.deferred.Count(), GenerationTokens: c.predicted.Float()}
	if all := c.computed.V + c.cached.V; c.cached.Known && c.computed.Known && promtext.Plausible(all) {
		l.PromptTokens, l.ComputedPromptTokens = &all, c.computed.Float()
	}
	return l
}

// startMark makes a mark of the header by which a process life is told: a
// monotonic clock whatever its name says, so only equality counts. 0: none.
func startMark(header string) uint64 {
	header = strings.TrimSpace(header)
	if header == "" || len(header) > 64 {
		return 0
	}
	return xxh3.HashString(header) | 1
}

// props is what /props tells that matters here.
type props struct {
	Slots    *int64 `json:"total_slots"`
	Build    string `json:"build_info"`
	Model    string `json:"model_path"`
	Sleeping bool   `json:"is_sleeping"`
	Settings struct {
		Context *int64 `json:"n_ctx"`
	} `json:"default_generation_settings"`
}

// models is what /v1/models tells that matters here.
type models struct {
	Data []struct {
		ID      string   `json:"id"`
		Aliases []string `json:"aliases"`
	} `json:"data"`
}

// whole is a count of JSON if it is one from 1 to limit, else 0.
func whole(v *int64, limit int) int {
	if v == nil || *v > math.MaxInt32 {
		return 0
	}
	return engine.Within(int(*v), limit)
}

// facts puts the answers together.
func facts(p *props, m *models) (engine.Facts, error) {
	f := engine.Facts{
		Version: p.Build, Ranks: 1, BlockTokens: ledger.PointTokens, MaxModelTokens: whole(p.Settings.Context, engine.MaxTokens),
		MaxRunning: whole(p.Slots, slots.MaxSlots), LeastReuseRatio: slots.DefaultSimilarity, Unordered: true,
		Capabilities: engine.ReportsCachedTokens | engine.TokenizesText | engine.TokenizesChats | engine.PinsSlots,
	}
	for i, d := range m.Data {
		if i == 0 {
			f.Model = d.ID
		} else {
			f.Aliases = append(f.Aliases, d.ID)
		}
		for _, a := range d.Aliases {
			if a != f.Model {
				f.Aliases = append(f.Aliases, a)
			}
		}
	}
	if f.Model == "" {
		return f, errors.New("/v1/models lists no model")
	}
	return f, nil
}
