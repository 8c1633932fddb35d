package profile

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// pollWait is how long a poll waits for the first event.
const pollWait = 2 * time.Second

func (l *life) trtRoutes(mux *http.ServeMux) {
	d := &dialect{
		fails: sglFails,
		usage: func(q *query, o *outcome) object {
			return object{
				"prompt_tokens": len(q.prompt), "total_tokens": len(q.prompt) + len(o.tokens), "completion_tokens": len(o.tokens),
				"prompt_tokens_details": object{"cached_tokens": o.cached},
			}
		},
		last: func(*openAI, *query, *outcome) object { return nil },
	}
	l.openAIRoutes(mux, d, plainAuth)
	mux.HandleFunc("/", notFound)
	mux.HandleFunc("GET /v1/models", serveJSON(func() any { return l.models("tensorrt_llm") }))
	mux.HandleFunc("GET /version", serveJSON(func() any { return object{"version": l.opts.Version} }))
	mux.HandleFunc("GET /health", ok)
	if !l.opts.NoEvents {
		mux.HandleFunc("POST /kv_cache_events", func(w http.ResponseWriter, r *http.Request) {
			out := []json.RawMessage{}
			if l.polled != nil {
				out = append(out, l.polled.take(r.Context().Done(), pollWait)...)
			}
			writeJSON(w, http.StatusOK, out)
		})
	}
	if !l.opts.HideMetrics {
		mux.HandleFunc("GET /prometheus/metrics", l.trtMetrics)
	}
	if l.opts.IterationStats {
		seen := int64(-1)
		mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
			p := l.pressure()
			l.mu.Lock()
			steps := l.steps
			fresh := steps != seen
			seen = steps
			l.mu.Unlock()
			out := []any{}
			if fresh {
				blocks := l.opts.PoolTokens / l.opts.PageTokens
				out = append(out, object{
					"iter": steps, "iterLatencyMS": 10.0, "numActiveRequests": p.running, "numQueuedRequests": p.waiting, "maxNumActiveRequests": l.opts.MaxRunning,
					"kvCacheStats": object{
						"maxNumBlocks": blocks, "usedNumBlocks": p.used / l.opts.PageTokens, "freeNumBlocks": blocks - p.used/l.opts.PageTokens, "tokensPerBlock": l.opts.PageTokens,
					},
				})
			}
			writeJSON(w, http.StatusOK, out)
		})
	}
}

func (l *life) trtMetrics(w http.ResponseWriter, _ *http.Request) {
	p, c := l.pressure(), &l.counts
	page := newPage(w, "trtllm_", fmt.Sprintf(`engine_type="pytorch",model_name=%q`, l.opts.Model))
	page.put("num_requests_running", "gauge", float64(p.running))
	page.put("num_requests_waiting", "gauge", float64(p.waiting))
	page.put("kv_cache_utilization", "gauge", p.usage)
	page.put("kv_cache_max_blocks", "gauge", float64(l.opts.PoolTokens/l.opts.PageTokens))
	page.put("kv_cache_tokens_per_block", "gauge", float64(l.opts.PageTokens))
	page.put("prompt_tokens_total", "counter", float64(c.prompt.Load()))
	page.put("prompt_cached_tokens_total", "counter", float64(c.cached.Load()))
	page.put("generation_tokens_total", "counter", float64(c.generated.Load()))
	page.put("request_success_total", "counter", float64(c.finished.Load()))
	page.put("time_to_first_token_seconds_sum", "", float64(c.firstMicros.Load())/1e6)
	page.put("time_to_first_token_seconds_count", "", float64(c.firsts.Load()))
	page.prefix, page.labels = "", ""
	page.put("process_start_time_seconds", "gauge", float64(l.began.UnixMilli())/1e3)
}
