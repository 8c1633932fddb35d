package vllm

import (
	"math"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/promtext"
)

// rankReadings is what a page says about one rank.
type rankReadings struct {
	seen                              bool
	running, waiting                  promtext.Reading
	kvUsed, kvUsedOld                 promtext.Reading
	prompt, promptComputed, promptHit promtext.Reading
	generated                         promtext.Reading
	firstTokenSum, firstTokenCount    promtext.Reading
	finished, preempted               promtext.Reading
	asleep                            promtext.Reading
	blockTokens, poolBlocks           promtext.Reading
	poolOverride, poolTokens          promtext.Reading
	attentionBlockTokens              promtext.Reading
	cachingOff                        bool
}

// metricsPage is a scanned page of /metrics. Only the families that the agent
// uses are looked at. It keeps its memory from page to page.
type metricsPage struct {
	ranks        []rankReadings // of the ranks that were seen, in order
	startSeconds promtext.Reading
	faults       int // values that cannot be
}

// scan reads a page in the Prometheus text format.
func (p *metricsPage) scan(page []byte) {
	p.ranks = p.ranks[:0]
	p.startSeconds, p.faults = promtext.Reading{}, 0
	for s := promtext.NewScanner(page); s.Next(); {
		family := familyOf(s.Name())
		if family == familyNone {
			s.Skip()
			continue
		}
		p.series(&s, family)
	}
	// A server that is one of several ranks shows its own only, under the
	// number it has among them.
	seen := p.ranks[:0]
	for _, r := range p.ranks {
		if r.seen {
			seen = append(seen, r)
		}
	}
	p.ranks = seen
}

// The families by name. The two that tell several numbers by a label are
// handled where their labels are read.
const (
	familyNone = iota
	familyStart
	familyRunning
	familyWaiting
	familyKVUsed
	familyKVUsedOld
	familyPrompt
	familyPromptBySource
	familyPromptCached
	familyGenerated
	familyFirstTokenSum
	familyFirstTokenCount
	familyFinished
	familyPreempted
	familySleep
	familyCacheConfig
)

func familyOf(name []byte) int {
	if name[0] == 'p' {
		if string(name) == "process_start_time_seconds" {
			return familyStart
		}
		return familyNone
	}
	const prefix = "vllm:"
	if len(name) < len(prefix) || string(name[:len(prefix)]) != prefix {
		return familyNone
	}
	switch string(name[len(prefix):]) {
	case "num_requests_running":
		return familyRunning
	case "num_requests_waiting":
		return familyWaiting
	case "kv_cache_usage_perc":
		return familyKVUsed
	case "gpu_cache_usage_perc":
		return familyKVUsedOld
	case "prompt_tokens_total":
		return familyPrompt
	case "prompt_tokens_by_source_total":
		return familyPromptBySource
	case "prompt_tokens_cached_total":
		return familyPromptCached
	case "generation_tokens_total":
		return familyGenerated
	case "time_to_first_token_seconds_sum":
		return familyFirstTokenSum
	case "time_to_first_token_seconds_count":
		return familyFirstTokenCount
	case "request_success_total":
		return familyFinished
	case "num_preemptions_total":
		return familyPreempted
	case "engine_sleep_state":
		return familySleep
	case "cache_config_info":
		return familyCacheConfig
	}
	return familyNone
}

// series reads the labels and the number of a series.
func (p *metricsPage) series(s *promtext.Scanner, family int) {
	rank, source := 0, []byte(nil)
	var config rankReadings
	for s.Label() {
		switch string(s.LabelName()) {
		case "engine":
			rank = promtext.Small(s.LabelValue(), engine.MaxRanks)
		case "source", "sleep_state":
			source = s.LabelValue()
		default:
			if family == familyCacheConfig {
				config.configure(s.LabelName(), s.LabelValue())
			}
		}
	}
	v, ok := s.Value()
	if !ok || rank < 0 {
		p.faults++
	}
	if s.Broken() || rank < 0 {
		return
	}
	if family == familyStart {
		p.startSeconds.Add(v, ok)
		return
	}
	r := p.rank(rank)
	r.take(family, source, v, ok)
	if family == familyCacheConfig {
		r.blockTokens, r.poolBlocks, r.poolOverride = config.blockTokens, config.poolBlocks, config.poolOverride
		r.poolTokens, r.attentionBlockTokens = config.poolTokens, config.attentionBlockTokens
		r.cachingOff = config.cachingOff
	}
}

func (p *metricsPage) rank(i int) *rankReadings {
	for len(p.ranks) <= i {
		p.ranks = append(p.ranks, rankReadings{})
	}
	p.ranks[i].seen = true
	return &p.ranks[i]
}

func (r *rankReadings) take(family int, source []byte, v float64, ok bool) {
	switch family {
	case familyRunning:
		r.running.Add(v, ok)
	case familyWaiting:
		r.waiting.Add(v, ok)
	case familyKVUsed:
		r.kvUsed.Add(v, ok)
	case familyKVUsedOld:
		r.kvUsedOld.Add(v, ok)
	case familyPrompt:
		r.prompt.Add(v, ok)
	case familyPromptBySource:
		if string(source) == "local_compute" {
			r.promptComputed.Add(v, ok)
		}
	case familyPromptCached:
		r.promptHit.Add(v, ok)
	case familyGenerated:
		r.generated.Add(v, ok)
	case familyFirstTokenSum:
		r.firstTokenSum.Add(v, ok)
	case familyFirstTokenCount:
		r.firstTokenCount.Add(v, ok)
	case familyFinished:
		r.finished.Add(v, ok)
	case familyPreempted:
		r.preempted.Add(v, ok)
	case familySleep:
		if string(source) != "awake" {
			r.asleep.Add(v, ok)
		}
	}
}

// configure takes a label of cache_config_info: Python's text of a setting,
// "None" where it is not set.
func (r *rankReadings) configure(name, text []byte) {
	var to *promtext.Reading
	switch string(name) {
	case "block_size":
		to = &r.blockTokens
	case "effective_attention_block_size":
		to = &r.attentionBlockTokens
	case "num_gpu_blocks":
		to = &r.poolBlocks
	case "num_gpu_blocks_override":
		to = &r.poolOverride
	case "kv_cache_size_tokens":
		to = &r.poolTokens
	case "enable_prefix_caching":
		r.cachingOff = string(text) == "False"
		return
	default:
		return
	}
	if v, ok := promtext.Number(text); ok && v == math.Trunc(v) {
		*to = promtext.Reading{V: v, Known: true}
	}
}

// load turns the readings of one rank into a load.
func (p *metricsPage) load(rank int, at time.Time) engine.Load {
	if rank >= len(p.ranks) {
		return engine.Load{At: at}
	}
	r := &p.ranks[rank]
	used := r.kvUsed
	if !used.Known {
		used = r.kvUsedOld
	}
	computed := r.promptComputed
	if !computed.Known && r.prompt.Known && r.promptHit.Known && r.promptHit.V <= r.prompt.V {
		computed = promtext.Reading{V: r.prompt.V - r.promptHit.V, Known: true}
	}
	l := engine.Load{
		At: at, Running: r.running.Count(), Waiting: r.waiting.Count(), KVUsedRatio: used.Share(),
		PromptTokens: r.prompt.Float(), ComputedPromptTokens: computed.Float(), GenerationTokens: r.generated.Float(),
		FirstTokens: r.firstTokenCount.Float(), FirstTokenSeconds: r.firstTokenSum.Float(),
		Finished: r.finished.Float(), Preemptions: r.preempted.Float(),
	}
	if r.asleep.Known {
		asleep := r.asleep.V > 0
		l.Sleeping = &asleep
	}
	return l
}

// startMark is the process life, 0 if the page does not tell.
func (p *metricsPage) startMark() uint64 {
	if !p.startSeconds.Known || p.startSeconds.V == 0 {
		return 0
	}
	return math.Float64bits(p.startSeconds.V)
}

// blockTokens is the number of tokens per block, 0 if unknown.
func (p *metricsPage) blockTokens() int {
	if len(p.ranks) == 0 {
		return 0
	}
	r := &p.ranks[0]
	// Models of several kinds of layers may have longer blocks than were asked
	// for.
	if n := r.attentionBlockTokens.Whole(engine.MaxBlockTokens); n > 0 {
		return n
	}
	return r.blockTokens.Whole(engine.MaxBlockTokens)
}

// cachingOff says that the engine keeps no prefixes.
func (p *metricsPage) cachingOff() bool { return len(p.ranks) > 0 && p.ranks[0].cachingOff }

// usableBlocks is the number of blocks of one rank that can hold tokens, 0 if
// unknown. One block of the pool never does. With several ranks behind one
// server num_gpu_blocks is their sum, as the size in tokens shows.
func (p *metricsPage) usableBlocks() int {
	if len(p.ranks) == 0 {
		return 0
	}
	r := &p.ranks[0]
	pool := r.poolBlocks.V
	if max(pool, r.poolOverride.V) > engine.MaxPoolBlocks {
		return 0
	}
	switch n := float64(len(p.ranks)); {
	case r.poolOverride.Known:
		pool = r.poolOverride.V
	case n > 1 && r.poolTokens.Known && r.blockTokens.Known && r.poolTokens.V*n == pool*r.blockTokens.V:
		pool /= n
	}
	return max(0, int(pool)-1)
}
