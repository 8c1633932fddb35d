package trtllm

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/kvevents"
	"waypost/agent/engine/poller"
	"waypost/agent/engine/promtext"
)

// source asks one TensorRT-LLM server.
type source struct {
	*enginehttp.Client
	o      engine.Options
	log    *slog.Logger
	target engine.Target

	// Of the goroutine that delivers events.
	eventBuf bytes.Buffer
	// What that goroutine tells the one that polls.
	noEvents, factsDue atomic.Bool
	ranks              atomic.Int32
	pool               atomic.Int64

	buf        bytes.Buffer
	page       page
	noPage     bool
	iterations []iteration
	at         []time.Time
	noStats    bool
	faults     int // of the records of steps
}

// streams says that the server streams its events, to where the configuration
// says: the server does not tell.
func (s *source) streams() bool { return s.target.Events != "" }

// FactsDue implements poller.Changer.
func (s *source) FactsDue() bool { return s.factsDue.Swap(false) }

// Health implements poller.Source.
func (s *source) Health(ctx context.Context) error {
	var buf bytes.Buffer
	_, err := s.Ask(ctx, enginehttp.Question{Path: "/health"}, &buf)
	if enginehttp.Missing(err) {
		return nil
	}
	return err
}

// page is what the page of metrics tells.
type page struct {
	running, waiting, usage        promtext.Reading
	prompt, cached, generated      promtext.Reading
	firsts, firstTimes, finished   promtext.Reading
	maxBlocks, blockTokens, starts promtext.Reading
	faults                         int
}

func (p *page) scan(text []byte) {
	*p = page{}
	for s := promtext.NewScanner(text); s.Next(); {
		to := p.family(s.Name())
		if to == nil {
			s.Skip()
			continue
		}
		v, ok := s.Value()
		if !ok {
			p.faults++
		}
		if !s.Broken() {
			to.Add(v, ok)
		}
	}
}

func (p *page) family(name []byte) *promtext.Reading {
	switch string(name) {
	case "trtllm_num_requests_running":
		return &p.running
	case "trtllm_num_requests_waiting":
		return &p.waiting
	case "trtllm_kv_cache_utilization":
		return &p.usage
	case "trtllm_prompt_tokens_total":
		return &p.prompt
	case "trtllm_prompt_cached_tokens_total":
		return &p.cached
	case "trtllm_generation_tokens_total":
		return &p.generated
	case "trtllm_time_to_first_token_seconds_count":
		return &p.firsts
	case "trtllm_time_to_first_token_seconds_sum":
		return &p.firstTimes
	case "trtllm_request_success_total":
		return &p.finished
	case "trtllm_kv_cache_max_blocks":
		return &p.maxBlocks
	case "trtllm_kv_cache_tokens_per_block":
		return &p.blockTokens
	case "process_start_time_seconds":
		return &p.starts
	}
	return nil
}

// iteration is a record of one step of the engine.
type iteration struct {
	Rank      promtext.Reading `json:"attentionDpRank"`
	Active    promtext.Reading `json:"numActiveRequests"`
	Queued    promtext.Reading `json:"numQueuedRequests"`
	MaxActive promtext.Reading `json:"maxNumActiveRequests"`
	Cache     struct {
		MaxBlocks   promtext.Reading `json:"maxNumBlocks"`
		UsedBlocks  promtext.Reading `json:"usedNumBlocks"`
		BlockTokens promtext.Reading `json:"tokensPerBlock"`
	} `json:"kvCacheStats"`
}

// Counters implements poller.Source: from the page of metrics, or else from the
// records of the latest steps, which the server hands out once.
func (s *source) Counters(ctx context.Context) (poller.Counters, error) {
	if !s.noPage {
		_, err := s.Ask(ctx, enginehttp.Question{Path: "/prometheus/metrics", MaxBytes: enginehttp.MaxPageBytes, Timeout: s.o.PageTimeout}, &s.buf)
		switch {
		case err == nil:
			s.page.scan(s.buf.Bytes())
		case enginehttp.Missing(err):
			s.noPage, s.page = true, page{}
		default:
			return poller.Counters{}, err
		}
	}
	s.faults = 0
	out := poller.Counters{Faults: s.page.faults}
	if s.page.starts.Known && s.page.starts.V > 0 {
		out.StartMark = math.Float64bits(s.page.starts.V)
	}
	if !s.page.running.Known && !s.noStats {
		if err := s.readIterations(ctx); err != nil {
			return poller.Counters{}, err
		}
	}
	out.Faults += s.faults
	if s.noPage && s.noStats {
		// Neither is there: whether it serves, its list of models tells.
		var models json.RawMessage
		return out, s.GetJSON(ctx, "/v1/models", &models)
	}
	now := time.Now()
	for i := range max(1, len(s.iterations)) {
		out.Loads = append(out.Loads, s.load(i, now))
	}
	return out, nil
}

// readIterations reads the records of the steps since the last call. No record
// means no step: then a server whose last step left requests active may have
// finished or be stuck, and how many there are is not known.
func (s *source) readIterations(ctx context.Context) error {
	_, err := s.Ask(ctx, enginehttp.Question{Path: "/metrics", MaxBytes: enginehttp.MaxPageBytes, Timeout: s.o.PageTimeout}, &s.buf)
	if enginehttp.Missing(err) {
		s.noStats, s.iterations = true, nil
		return nil
	}
	if err != nil {
		return err
	}
	var list []iteration
	b := bytes.TrimSpace(s.buf.Bytes())
	if len(b) > 0 && b[0] != '[' {
		s.noStats = true // a page of another kind
		return nil
	}
	if len(b) > 0 {
		odd, err := enginehttp.Decode(b, &list)
		if err != nil {
			return err
		}
		if odd {
			s.faults++
		}
	}
	now := time.Now()
	for i := range s.iterations {
		if r := &s.iterations[i]; len(list) == 0 && r.Active.V > 0 {
			r.Active, r.Queued = promtext.Reading{}, promtext.Reading{}
		}
		s.at[i] = now
	}
	for _, it := range list {
		// One that names no rank is of the only one.
		rank := it.Rank.Whole(engine.MaxRanks - 1)
		if it.Rank.Bad() || it.Rank.Known && float64(rank) != it.Rank.V {
			s.faults++
			continue
		}
		for _, v := range []promtext.Reading{it.Active, it.Queued, it.MaxActive, it.Cache.MaxBlocks, it.Cache.UsedBlocks, it.Cache.BlockTokens} {
			if v.Bad() {
				s.faults++
			}
		}
		for len(s.iterations) <= rank {
			s.iterations, s.at = append(s.iterations, iteration{}), append(s.at, now)
		}
		s.iterations[rank] = it
	}
	return nil
}

func (s *source) load(rank int, now time.Time) engine.Load {
	p := &s.page
	l := engine.Load{At: now}
	if rank < len(s.iterations) {
		it := &s.iterations[rank]
		l.Running, l.Waiting = it.Active.Count(), it.Queued.Count()
		if used, all := it.Cache.UsedBlocks, it.Cache.MaxBlocks; used.Known && all.Known && all.V > 0 && used.V <= all.V {
			share := used.V / all.V
			l.KVUsedRatio = &share
		}
	}
	if rank > 0 || len(s.iterations) > 1 {
		return l // the page is of all ranks together
	}
	if p.running.Known {
		l.Running, l.Waiting, l.KVUsedRatio = p.running.Count(), p.waiting.Count(), p.usage.Share()
	}
	l.PromptTokens, l.GenerationTokens, l.Finished = p.prompt.Float(), p.generated.Float(), p.finished.Float()
	l.FirstTokens, l.FirstTokenSeconds = p.firsts.Float(), p.firstTimes.Float()
	if p.prompt.Known && p.cached.Known && p.cached.V <= p.prompt.V {
		computed := p.prompt.V - p.cached.V
		l.ComputedPromptTokens = &computed
	}
	return l
}

// Facts implements poller.Source.
func (s *source) Facts(ctx context.Context, latest *poller.Counters) (poller.Known, error) {
	// Routes that were missing may be there after an upgrade.
	s.noPage, s.noStats = false, false
	k := poller.Known{StartMark: latest.StartMark}
	f := &k.Facts
	if err := poller.LearnModels(ctx, s.Client, f); err != nil {
		return k, err
	}
	var version struct {
		Version string `json:"version"`
	}
	if err := s.GetJSON(ctx, "/version", &version); err == nil {
		f.Version = version.Version
	} else if !enginehttp.Missing(err) {
		return k, err
	}
	f.Ranks = max(1, len(s.iterations), int(s.ranks.Load()))
	f.BlockTokens, f.PoolBlocks = s.page.blockTokens.Whole(engine.MaxBlockTokens), s.page.maxBlocks.Whole(engine.MaxPoolBlocks)
	if len(s.iterations) > 0 {
		it := &s.iterations[0]
		f.MaxRunning = it.MaxActive.Whole(engine.MaxRequests)
		if f.BlockTokens == 0 {
			f.BlockTokens = it.Cache.BlockTokens.Whole(engine.MaxBlockTokens)
		}
		if f.PoolBlocks == 0 {
			f.PoolBlocks = it.Cache.MaxBlocks.Whole(engine.MaxPoolBlocks)
		}
	}
	if f.PoolBlocks == 0 {
		f.PoolBlocks = int(s.pool.Load())
	}
	// Its second level of blocks is in host memory, and events tell what moves.
	f.Capabilities = engine.ReportsCachedTokens | engine.ReadsHostTier
	k.Faults = s.Odd()
	for n := range min(f.Ranks, engine.MaxRanks) {
		k.Plans = append(k.Plans, s.plan(n))
	}
	return k, nil
}

func (s *source) plan(rank int) kvevents.Plan {
	switch {
	case s.streams():
		return dialect.PlanFor(kvevents.Configured{Events: s.target.Events, Replay: s.target.Replay, Listen: s.target.ListenEvents}, nil, s.Host(), rank)
	case s.noEvents.Load():
		return kvevents.Plan{Named: rank, Hint: dialect.HintNoEvents()}
	}
	return kvevents.Plan{Named: rank, Events: eventsPath, Pulled: true}
}
