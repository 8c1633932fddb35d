package emulator

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"waypost/testbed/emulator/core"
)

// metricsPage writes the Prometheus text as the engine's Python client does:
// labels in order of their names, floats in Python's spelling.
type metricsPage struct {
	b strings.Builder
}

type label struct{ name, value string }

func (p *metricsPage) family(name, kind, help string) {
	fmt.Fprintf(&p.b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

func (p *metricsPage) sample(name string, labels []label, v float64) {
	p.b.WriteString(name)
	if len(labels) > 0 {
		labels = slices.Clone(labels)
		slices.SortFunc(labels, func(a, b label) int { return strings.Compare(a.name, b.name) })
		for i, l := range labels {
			sep := byte(',')
			if i == 0 {
				sep = '{'
			}
			p.b.WriteByte(sep)
			fmt.Fprintf(&p.b, `%s="%s"`, l.name, labelEscaper.Replace(l.value))
		}
		p.b.WriteByte('}')
	}
	p.b.WriteByte(' ')
	p.b.WriteString(pythonFloat(v))
	p.b.WriteByte('\n')
}

var labelEscaper = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// pythonFloat writes a float as Python's Prometheus client: 16.0, 0.64,
// 1.79597389631e+09.
func pythonFloat(v float64) string {
	switch {
	case math.IsInf(v, 1):
		return "+Inf"
	case math.IsInf(v, -1):
		return "-Inf"
	case math.IsNaN(v):
		return "NaN"
	}
	s := strconv.FormatFloat(v, 'f', -1, 64)
	if v != 0 && (math.Abs(v) < 1e-4 || math.Abs(v) >= 1e16) {
		return strconv.FormatFloat(v, 'e', -1, 64)
	}
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	if dot := strings.IndexByte(s, '.'); v > 0 && dot > 6 {
		digits := strings.TrimRight(s[:dot]+s[dot+1:], "0")
		mantissa := digits[:1] + "." + digits[1:]
		return fmt.Sprintf("%se+%02d", strings.TrimRight(mantissa, "."), dot-1)
	}
	return s
}

// rankView is one rank's part of the page.
type rankView struct {
	labels []label
	stats  *rankStats
	gauges core.Status
	totals core.Counters
}

// gauge writes a family with one value per rank.
func (p *metricsPage) gauge(name, help string, ranks []rankView, value func(v rankView) float64) {
	p.family(name, "gauge", help)
	for _, v := range ranks {
		p.sample(name, v.labels, value(v))
	}
}

// part is one series of a family that has more than one per rank.
type part struct {
	value string
	of    func(v rankView) float64
}

func (p *metricsPage) gaugeBy(name, help, by string, ranks []rankView, parts []part) {
	p.family(name, "gauge", help)
	for _, v := range ranks {
		for _, x := range parts {
			p.sample(name, with(v.labels, by, x.value), x.of(v))
		}
	}
}

// counterBy writes a counter and when its series began.
func (p *metricsPage) counterBy(name, help, by string, ranks []rankView, parts []part) {
	p.family(name+"_total", "counter", help)
	for _, v := range ranks {
		for _, x := range parts {
			p.sample(name+"_total", with(v.labels, by, x.value), x.of(v))
		}
	}
	p.family(name+"_created", "gauge", help)
	for _, v := range ranks {
		for _, x := range parts {
			p.sample(name+"_created", with(v.labels, by, x.value), seconds(v.stats.began))
		}
	}
}

func (p *metricsPage) counter(name, help string, ranks []rankView, value func(v rankView) float64) {
	p.counterBy(name, help, "", ranks, []part{{of: value}})
}

func (p *metricsPage) histogram(name, help string, ranks []rankView, of func(s *rankStats) *histogram) {
	p.family(name, "histogram", help)
	for _, v := range ranks {
		h := of(v.stats)
		total := uint64(0)
		for i, n := range h.counts {
			bound := math.Inf(1)
			if i < len(h.bounds) {
				bound = h.bounds[i]
			}
			total += n
			p.sample(name+"_bucket", with(v.labels, "le", pythonFloat(bound)), float64(total))
		}
		p.sample(name+"_count", v.labels, float64(total))
		p.sample(name+"_sum", v.labels, h.sum)
	}
	p.gauge(name+"_created", help, ranks, func(v rankView) float64 { return seconds(v.stats.began) })
}

func with(labels []label, name, value string) []label {
	if name == "" {
		return labels
	}
	return append(slices.Clone(labels), label{name, value})
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

func (l *life) serveMetrics(w http.ResponseWriter, _ *http.Request) {
	var p metricsPage
	p.family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	p.sample("process_start_time_seconds", nil, math.Floor(seconds(l.began)*100)/100)
	now := l.opts.Clock.Now()
	ranks := make([]rankView, len(l.ranks))
	for i, r := range l.ranks {
		r.stats.mu.Lock()
		defer r.stats.mu.Unlock()
		ranks[i] = rankView{
			labels: []label{{"engine", strconv.Itoa(i)}, {"model_name", l.opts.Model}},
			stats:  r.stats, gauges: r.stats.shownLocked(now), totals: r.stats.latestLocked().Counters,
		}
	}
	l.writeGauges(&p, ranks)
	writeCounters(&p, ranks)
	writeHistograms(&p, ranks)
	l.writeInfo(&p, ranks)
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write([]byte(p.b.String()))
}

func (l *life) writeGauges(p *metricsPage, ranks []rankView) {
	p.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", ranks, func(v rankView) float64 { return float64(v.gauges.Running) })
	p.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", ranks, func(v rankView) float64 { return float64(v.gauges.Waiting) })
	p.gaugeBy("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", "reason", ranks, []part{
		{"capacity", func(v rankView) float64 { return float64(v.gauges.Waiting) }},
		{"deferred", nothing},
	})
	level := l.sleepLevel()
	state := func(on bool) func(rankView) float64 {
		return func(rankView) float64 {
			if on {
				return 1
			}
			return 0
		}
	}
	p.gaugeBy("vllm:engine_sleep_state", "Engine sleep state.", "sleep_state", ranks, []part{
		{"awake", state(level == 0)}, {"weights_offloaded", state(level == 1)}, {"discard_all", state(level == 2)},
	})
	p.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", ranks, func(v rankView) float64 {
		if v.gauges.UsableBlocks == 0 {
			return 0
		}
		return float64(v.gauges.UsedBlocks) / float64(v.gauges.UsableBlocks)
	})
}

func nothing(rankView) float64 { return 0 }

func writeCounters(p *metricsPage, ranks []rankView) {
	total := func(of func(c core.Counters) int64) func(rankView) float64 {
		return func(v rankView) float64 { return float64(of(v.totals)) }
	}
	hits := total(func(c core.Counters) int64 { return c.HitTokens })
	cached := total(func(c core.Counters) int64 { return c.CachedPromptTokens })
	p.counter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", ranks, total(func(c core.Counters) int64 { return c.QueriedTokens }))
	p.counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", ranks, hits)
	p.counter("vllm:external_prefix_cache_queries", "External prefix cache queries, in terms of number of queried tokens.", ranks, nothing)
	p.counter("vllm:external_prefix_cache_hits", "External prefix cache hits, in terms of number of cached tokens.", ranks, nothing)
	p.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", ranks, total(func(c core.Counters) int64 { return c.Preemptions }))
	p.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", ranks, total(func(c core.Counters) int64 { return c.PromptTokens }))
	p.counterBy("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", "source", ranks, []part{
		{"local_compute", total(func(c core.Counters) int64 { return c.PromptTokens - c.CachedPromptTokens })},
		{"local_cache_hit", cached},
		{"external_kv_transfer", nothing},
	})
	p.counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", ranks, cached)
	p.counterBy("vllm:prompt_tokens_cached_by_source", "Prefix-cache hit tokens by the cache tier that supplied them.", "source", ranks, []part{
		{"device", hits}, {"host", nothing}, {"p2p", nothing}, {"disk", nothing}, {"external_unspecified", nothing},
	})
	p.counter("vllm:generation_tokens", "Number of generation tokens processed.", ranks, total(func(c core.Counters) int64 { return c.GeneratedTokens }))
	var reasons []part
	for _, f := range []core.Finish{core.FinishStop, core.FinishLength, core.FinishAbort, "error", "repetition"} {
		reasons = append(reasons, part{string(f), func(v rankView) float64 { return float64(v.stats.finished[f]) }})
	}
	p.counterBy("vllm:request_success", "Count of successfully processed requests.", "finished_reason", ranks, reasons)
}

func writeHistograms(p *metricsPage, ranks []rankView) {
	for _, h := range []struct {
		name, help string
		of         func(s *rankStats) *histogram
	}{
		{"request_prompt_tokens", "Number of prefill tokens processed.", func(s *rankStats) *histogram { return s.promptTokens }},
		{"request_generation_tokens", "Number of generation tokens processed.", func(s *rankStats) *histogram { return s.outputTokens }},
		{"iteration_tokens_total", "Histogram of number of tokens per engine_step.", func(s *rankStats) *histogram { return s.iteration }},
		{"request_params_n", "Histogram of the n request parameter.", func(s *rankStats) *histogram { return s.samplesAsked }},
		{"request_params_max_tokens", "Histogram of the max_tokens request parameter.", func(s *rankStats) *histogram { return s.tokensAsked }},
		{"time_to_first_token_seconds", "Histogram of time to first token in seconds.", func(s *rankStats) *histogram { return s.firstToken }},
		{"inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", func(s *rankStats) *histogram { return s.tokenGap }},
		{"request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", func(s *rankStats) *histogram { return s.perToken }},
		{"e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", func(s *rankStats) *histogram { return s.total }},
		{"request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", func(s *rankStats) *histogram { return s.queued }},
		{"request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", func(s *rankStats) *histogram { return s.inference }},
		{"request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", func(s *rankStats) *histogram { return s.prefill }},
		{"request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", func(s *rankStats) *histogram { return s.decode }},
		{"request_num_preemptions", "Histogram of the number of times a request was preempted.", func(s *rankStats) *histogram { return s.preemptCount }},
		{"request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).", func(s *rankStats) *histogram { return s.computedTokens }},
	} {
		p.histogram("vllm:"+h.name, h.help, ranks, h.of)
	}
}

// writeInfo writes the families that carry text in their labels.
func (l *life) writeInfo(p *metricsPage, ranks []rankView) {
	if len(l.opts.Adapters) > 0 {
		const name = "vllm:lora_requests_info"
		p.family(name, "gauge", "Running stats on lora requests.")
		for _, v := range ranks {
			for _, u := range v.stats.adapters {
				p.sample(name, []label{
					{"max_lora", strconv.Itoa(len(l.opts.Adapters))}, {"running_lora_adapters", u.running}, {"waiting_lora_adapters", u.waiting},
				}, seconds(u.at))
			}
		}
	}
	const name = "vllm:cache_config_info"
	p.family(name, "gauge", "Information of the LLMEngine CacheConfig")
	block := l.claimedBlockTokens()
	for i := range ranks {
		p.sample(name, []label{
			{"engine", strconv.Itoa(i)},
			{"block_size", strconv.Itoa(block)},
			{"effective_attention_block_size", strconv.Itoa(block)},
			{"user_specified_block_size", "True"},
			{"hash_block_size", "None"},
			{"cache_dtype", "auto"},
			{"enable_prefix_caching", "True"},
			{"prefix_caching_hash_algo", "sha256"},
			{"gpu_memory_utilization", "0.92"},
			// The engine states the blocks of all ranks together here, and the
			// tokens of one.
			{"num_gpu_blocks", strconv.Itoa(l.opts.PoolBlocks * l.opts.Ranks)},
			{"num_gpu_blocks_override", strconv.Itoa(l.opts.PoolBlocks)},
			{"kv_cache_size_tokens", strconv.Itoa(l.opts.PoolBlocks * l.opts.BlockTokens)},
			{"kv_cache_max_concurrency", pythonFloat(float64(l.opts.PoolBlocks*l.opts.BlockTokens) / float64(l.opts.MaxModelTokens))},
			{"num_cpu_blocks", "None"},
			{"sliding_window", "None"},
			{"is_attention_free", "False"},
		}, 1)
	}
}
