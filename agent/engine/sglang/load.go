package sglang

import (
	"bytes"
	"context"
	"encoding/json"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/poller"
	"waypost/agent/engine/promtext"
)

const (
	loadsPath    = "/v1/loads"
	oldLoadsPath = "/get_load"
	pagePath     = "/metrics"

	// pageEvery is how many readings of load stand for one of the page of
	// metrics, which is large and tells totals only.
	pageEvery = 4
	// maxLag bounds how old the engine may say that its load is.
	maxLag = time.Minute
)

// rankLoad is the load of one rank, in the newest form and in the old one.
type rankLoad struct {
	Rank       whole            `json:"dp_rank"`
	Taken      promtext.Reading `json:"timestamp"`
	Running    promtext.Reading `json:"num_running_reqs"`
	Waiting    promtext.Reading `json:"num_waiting_reqs"`
	All        promtext.Reading `json:"num_reqs"`
	Usage      promtext.Reading `json:"token_usage"`
	Computed   promtext.Reading `json:"total_prefill_uncached_tokens"`
	MaxRunning promtext.Reading `json:"max_running_requests"`
	MaxTokens  promtext.Reading `json:"max_total_num_tokens"`
}

// whole is a rank of JSON: -1 if there is something else in its place.
type whole int

// UnmarshalJSON implements json.Unmarshaler.
func (w *whole) UnmarshalJSON(b []byte) error {
	*w = whole(promtext.Small(b, engine.MaxRanks))
	return nil
}

// clock is the engine's time, zero if there is something else in its place.
type clock struct{ time.Time }

// UnmarshalJSON implements json.Unmarshaler.
func (c *clock) UnmarshalJSON(b []byte) error {
	if c.Time.UnmarshalJSON(b) != nil {
		c.Time = time.Time{}
	}
	return nil
}

// readings are those of the load that are used.
func (r *rankLoad) readings() []*promtext.Reading {
	return []*promtext.Reading{&r.Running, &r.Waiting, &r.All, &r.Usage, &r.Computed, &r.MaxRunning, &r.MaxTokens}
}

// loads is an answer about load by rank, with what cannot be counted.
type loads struct {
	byRank []rankLoad
	at     []time.Time
	faults int
}

// parseLoads reads either form: an object with a list and the engine's time, or
// a list. now is when the answer came.
func parseLoads(b []byte, now time.Time) (loads, error) {
	if err := enginehttp.Widest(b, enginehttp.MaxMembers); err != nil {
		return loads{}, err
	}
	var body struct {
		Now   clock      `json:"timestamp"`
		Loads []rankLoad `json:"loads"`
	}
	var err error
	if len(b) > 0 && b[0] == '[' {
		err = json.Unmarshal(b, &body.Loads)
	} else {
		err = json.Unmarshal(b, &body)
	}
	if err != nil {
		return loads{}, err
	}
	var out loads
	for _, r := range body.Loads {
		if r.Rank < 0 {
			out.faults++
			continue
		}
		for len(out.byRank) <= int(r.Rank) {
			out.byRank, out.at = append(out.byRank, rankLoad{}), append(out.at, now)
		}
		for _, v := range r.readings() {
			if v.Bad() {
				out.faults++
			}
		}
		if r.All.Known && r.Waiting.Known && r.All.V >= r.Waiting.V && !r.Running.Known {
			r.Running = promtext.Reading{V: r.All.V - r.Waiting.V, Known: true}
		}
		if r.Taken.Known && !body.Now.IsZero() {
			// Both times are of the engine's clock.
			lag := time.Duration((float64(body.Now.UnixNano())/1e9 - r.Taken.V) * float64(time.Second))
			if lag > 0 && lag <= maxLag {
				out.at[r.Rank] = now.Add(-lag)
			}
		}
		out.byRank[r.Rank] = r
	}
	return out, nil
}

// totals are what a page of metrics tells. Only the gauges are told by rank.
type totals struct {
	gauges                             []gauges
	prompt, cached, generated          promtext.Reading
	finished, firstTokens, firstTimes  promtext.Reading
	pageTokens, poolPages, contextSize promtext.Reading
	faults                             int
}

// gauges are those of one rank. Several schedulers of a rank tell the same, so
// the largest counts.
type gauges struct{ running, waiting, usage promtext.Reading }

func largest(r *promtext.Reading, v float64, ok bool) {
	switch {
	case !ok:
		r.Add(0, false)
	case !r.Known:
		r.Add(v, true)
	case v > r.V:
		r.V = v
	}
}

// scan reads a page.
func (t *totals) scan(page []byte) {
	*t = totals{gauges: t.gauges[:0]}
	const prefix = "sglang:"
	for s := promtext.NewScanner(page); s.Next(); {
		if len(s.Name()) <= len(prefix) || string(s.Name()[:len(prefix)]) != prefix {
			s.Skip()
			continue
		}
		to, gauge := t.family(s.Name()[len(prefix):])
		if to == nil && gauge == nil {
			s.Skip()
			continue
		}
		t.series(&s, to, gauge)
	}
}

// family gives where the series of a name are summed, or which gauge they are.
func (t *totals) family(name []byte) (sum *promtext.Reading, gauge func(*gauges) *promtext.Reading) {
	switch string(name) {
	case "num_running_reqs":
		return nil, func(g *gauges) *promtext.Reading { return &g.running }
	case "num_queue_reqs":
		return nil, func(g *gauges) *promtext.Reading { return &g.waiting }
	case "token_usage":
		return nil, func(g *gauges) *promtext.Reading { return &g.usage }
	case "page_size":
		return nil, func(*gauges) *promtext.Reading { return &t.pageTokens }
	case "num_pages":
		return nil, func(*gauges) *promtext.Reading { return &t.poolPages }
	case "context_len":
		return nil, func(*gauges) *promtext.Reading { return &t.contextSize }
	case "prompt_tokens_total":
		return &t.prompt, nil
	case "cached_tokens_total":
		return &t.cached, nil
	case "generation_tokens_total":
		return &t.generated, nil
	case "num_requests_total":
		return &t.finished, nil
	case "time_to_first_token_seconds_count":
		return &t.firstTokens, nil
	case "time_to_first_token_seconds_sum":
		return &t.firstTimes, nil
	}
	return nil, nil
}

func (t *totals) series(s *promtext.Scanner, sum *promtext.Reading, gauge func(*gauges) *promtext.Reading) {
	rank, part := 0, false
	for s.Label() {
		switch string(s.LabelName()) {
		case "dp_rank":
			rank = promtext.Small(s.LabelValue(), engine.MaxRanks)
		case "priority":
			part = len(s.LabelValue()) > 0 // the total is the series without one
		}
	}
	v, ok := s.Value()
	if !ok || rank < 0 {
		t.faults++
	}
	switch {
	case s.Broken() || rank < 0 || part:
	case sum != nil:
		sum.Add(v, ok)
	default:
		for len(t.gauges) <= rank {
			t.gauges = append(t.gauges, gauges{})
		}
		largest(gauge(&t.gauges[rank]), v, ok)
	}
}

// Counters implements poller.Source: the load at each call, the totals at every
// fourth instead, with the load of the call before.
func (s *source) Counters(ctx context.Context) (poller.Counters, error) {
	s.turn++
	s.faults = 0
	readPage := s.turn%pageEvery == 0 && !s.noPage || s.noLoads
	if !readPage || s.turn == 1 {
		if err := s.readLoads(ctx); err != nil {
			return poller.Counters{}, err
		}
	}
	if readPage || s.turn == 1 {
		if err := s.readPage(ctx); err != nil {
			return poller.Counters{}, err
		}
	}
	if s.noLoads && s.noPage {
		// Neither is there: whether it serves, its list of models tells.
		var models json.RawMessage
		return poller.Counters{}, s.GetJSON(ctx, "/v1/models", &models)
	}
	out := poller.Counters{Faults: s.faults}
	for i := range max(len(s.loads.byRank), len(s.totals.gauges)) {
		out.Loads = append(out.Loads, s.load(i))
	}
	return out, nil
}

// readLoads reads the load by the newest route that the engine has.
func (s *source) readLoads(ctx context.Context) error {
	for !s.noLoads {
		path := loadsPath
		if s.oldLoads {
			path = oldLoadsPath
		}
		_, err := s.Ask(ctx, enginehttp.Question{Path: path, Timeout: s.timeout}, &s.buf)
		if enginehttp.Missing(err) {
			s.noLoads, s.oldLoads, s.loads = s.oldLoads, true, loads{}
			continue
		}
		if err != nil {
			return err
		}
		s.loads, err = parseLoads(enginehttp.Finite(bytes.TrimSpace(s.buf.Bytes())), time.Now())
		s.faults += s.loads.faults
		return err
	}
	return nil
}

func (s *source) readPage(ctx context.Context) error {
	_, err := s.Ask(ctx, enginehttp.Question{Path: pagePath, MaxBytes: enginehttp.MaxPageBytes, Timeout: s.timeout}, &s.buf)
	if enginehttp.Missing(err) {
		s.noPage, s.totals = true, totals{}
		return nil
	}
	if err != nil {
		return err
	}
	s.totals.scan(s.buf.Bytes())
	s.totalsAt = time.Now()
	s.faults += s.totals.faults
	return nil
}

// load is the load of one rank from both.
func (s *source) load(rank int) engine.Load {
	l := engine.Load{At: s.totalsAt}
	if rank < len(s.totals.gauges) && len(s.loads.byRank) == 0 {
		g := &s.totals.gauges[rank]
		l.Running, l.Waiting, l.KVUsedRatio = g.running.Count(), g.waiting.Count(), g.usage.Share()
	}
	if rank < len(s.loads.byRank) {
		r := &s.loads.byRank[rank]
		l.At, l.Running, l.Waiting, l.KVUsedRatio = s.loads.at[rank], r.Running.Count(), r.Waiting.Count(), r.Usage.Share()
		l.ComputedPromptTokens = r.Computed.Float()
	}
	if len(s.loads.byRank) > 1 || len(s.totals.gauges) > 1 {
		return l // totals are those of all ranks together
	}
	t := &s.totals
	l.PromptTokens, l.GenerationTokens, l.Finished = t.prompt.Float(), t.generated.Float(), t.finished.Float()
	l.FirstTokens, l.FirstTokenSeconds = t.firstTokens.Float(), t.firstTimes.Float()
	if l.ComputedPromptTokens == nil && t.prompt.Known && t.cached.Known && t.cached.V <= t.prompt.V {
		computed := t.prompt.V - t.cached.V
		l.ComputedPromptTokens = &computed
	}
	return l
}
