package profile

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"
)

func plainAuth(next http.HandlerFunc) http.HandlerFunc { return next }

func notFound(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusNotFound, object{"detail": "Not Found"})
}

func ok(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }

func (l *life) models(owner string) object {
	return object{"object": "list", "data": []any{object{
		"id": l.opts.Model, "object": "model", "created": l.began.Unix(), "owned_by": owner, "root": l.opts.Model, "parent": nil, "max_model_len": l.opts.MaxModelTokens,
	}}}
}

func serveJSON(f func() any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, f()) }
}

// sglFails words a refusal of SGLang.
func sglFails(w http.ResponseWriter, _ *query, err error) {
	writeJSON(w, http.StatusBadRequest, object{"object": "error", "message": err.Error(), "type": "BadRequestError", "param": nil, "code": http.StatusBadRequest})
}

func (l *life) sglRoutes(mux *http.ServeMux) {
	d := &dialect{
		fails:  sglFails,
		choice: object{"logprobs": nil, "matched_stop": nil}, chatChoice: object{"logprobs": nil, "matched_stop": nil},
		message: object{"reasoning_content": nil},
		usage: func(q *query, o *outcome) object {
			var details any = object{"cached_tokens": o.cached}
			if l.opts.Layout < SGMap && o.cached == 0 {
				details = nil // older releases leave out that none were
			}
			return object{
				"prompt_tokens": len(q.prompt), "total_tokens": len(q.prompt) + len(o.tokens), "completion_tokens": len(o.tokens),
				"prompt_tokens_details": details, "reasoning_tokens": 0, "completion_tokens_details": nil,
			}
		},
		last: func(b *openAI, q *query, o *outcome) object {
			if q.stream {
				return nil
			}
			out := object{"metadata": object{"weight_version": "default", "weight_versions": []any{object{"version": "default", "start": 0, "end": len(o.tokens)}}}}
			if b.Details {
				out["sglext"] = object{"cached_tokens_details": object{"device": o.cached, "host": 0}}
			}
			return out
		},
	}
	l.openAIRoutes(mux, d, plainAuth)
	mux.HandleFunc("/", notFound)
	mux.HandleFunc("GET /v1/models", serveJSON(func() any { return l.models("sglang") }))
	mux.HandleFunc("GET /health", ok)
	info := serveJSON(func() any { return l.serverInfo() })
	if l.opts.OldLoads {
		mux.HandleFunc("GET /get_load", serveJSON(func() any { return l.oldLoads() }))
		mux.HandleFunc("GET /get_server_info", info)
	} else {
		mux.HandleFunc("GET /v1/loads", serveJSON(func() any { return l.loads() }))
		mux.HandleFunc("GET /server_info", info)
		mux.HandleFunc("POST /tokenize", l.sglTokenize)
		mux.HandleFunc("POST /detokenize", func(w http.ResponseWriter, r *http.Request) {
			var b struct{ Tokens []uint32 }
			if err := readBody(r, &b); err != nil {
				sglFails(w, nil, err)
				return
			}
			writeJSON(w, http.StatusOK, object{"text": detokenize(b.Tokens)})
		})
	}
	mux.HandleFunc("/flush_cache", func(w http.ResponseWriter, _ *http.Request) {
		if !l.clear() {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		_, _ = w.Write([]byte("Cache flushed.\nPlease check backend logs for more details.\n"))
	})
	if !l.opts.HideMetrics {
		mux.HandleFunc("GET /metrics", l.sglMetrics)
	}
}

func (l *life) sglTokenize(w http.ResponseWriter, r *http.Request) {
	var b openAI
	if err := readBody(r, &b); err != nil {
		sglFails(w, nil, err)
		return
	}
	if (len(b.Prompt) == 0) == (len(b.Messages) == 0) {
		sglFails(w, nil, refusal("Exactly one of 'prompt' or 'messages' must be provided."))
		return
	}
	q, err := l.query(&b, len(b.Messages) > 0)
	if err != nil {
		sglFails(w, nil, err)
		return
	}
	// The length is the tokenizer's, not the server's.
	writeJSON(w, http.StatusOK, object{"tokens": q.prompt, "count": len(q.prompt), "max_model_len": 131072})
}

// pressure is the state that load and metrics show.
type pressure struct {
	running, waiting      int
	backlog, used, cached int // tokens
	usage                 float64
}

func (l *life) pressure() (p pressure) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p.running, p.waiting = l.running, l.waiting
	if l.pages != nil {
		p.used = l.pages.used() * l.opts.PageTokens
		p.cached = l.pages.tree.pages * l.opts.PageTokens
		p.usage = float64(p.used) / float64(l.opts.PoolTokens)
		// Who waits to be computed is in the queue, though its memory is set aside here.
		p.running, p.waiting, p.backlog = p.running-l.queued, p.waiting+l.queued, l.backlog
	}
	return p
}

func (l *life) loads() object {
	p, now := l.pressure(), time.Now()
	c := &l.counts
	return object{
		"timestamp": now.UTC().Format("2006-01-02T15:04:05.000000-07:00"), "version": l.opts.Version, "accelerator": nil, "num_accelerators": 1,
		"loads": []any{object{
			"timestamp": float64(now.UnixMicro()) / 1e6, "dp_rank": 0, "num_running_reqs": p.running, "num_waiting_reqs": p.waiting,
			"num_waiting_uncached_tokens": p.backlog, "num_used_tokens": p.used, "num_total_tokens": p.used, "num_active_tokens": p.used, "num_prealloc_ready_tokens": 0,
			"max_total_num_tokens": l.opts.PoolTokens, "max_running_requests": l.opts.MaxRunning, "token_usage": p.usage, "gen_throughput": 0.0,
			"cache_hit_rate": 0.0, "utilization": 0.0, "total_prefill_uncached_tokens": c.prefilled.Load(), "total_prefill_busy_us": c.prefillMicros.Load(),
			"decode_moments": []float64{0, 0, 0, 0, 0, 0},
			"memory":         object{"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": l.opts.PoolTokens},
			"disaggregation": object{
				"mode": "null", "prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": 0, "decode_prealloc_queue_reqs": 0,
				"decode_transfer_queue_reqs": 0, "decode_retracted_queue_reqs": 0, "kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0,
			},
			"queues": object{"waiting": p.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
		}},
	}
}

func (l *life) oldLoads() []any {
	p := l.pressure()
	return []any{object{"dp_rank": 0, "num_reqs": p.running + p.waiting, "num_waiting_reqs": p.waiting, "num_tokens": p.used, "num_pending_tokens": 0, "ts_tic": float64(time.Now().UnixMicro()) / 1e6}}
}

func portOf(address string) string {
	_, port, _ := net.SplitHostPort(address)
	return port
}

// serverInfo is the part of the settings that a reader of caches may use.
func (l *life) serverInfo() object {
	o := &l.opts
	var config, events any
	if !o.NoEvents {
		text := fmt.Sprintf(`{"publisher":"zmq","endpoint":"tcp://*:%s","topic":%q`, portOf(l.engine.events), o.Topic)
		if !o.NoReplay {
			text += fmt.Sprintf(`,"replay_endpoint":"tcp://*:%s"`, portOf(l.engine.replay))
		}
		config = text + "}"
		e := object{"publisher": "zmq", "endpoint_host": "*", "topic": o.Topic, "block_size": o.PageTokens, "dp_size": 1}
		var port int
		_, _ = fmt.Sscan(portOf(l.engine.events), &port)
		e["endpoint_port_base"] = port
		if !o.NoReplay {
			var port int
			_, _ = fmt.Sscan(portOf(l.engine.replay), &port)
			e["replay_endpoint_port_base"] = port
		}
		events = e
	}
	return object{
		"model_path": o.Model, "served_model_name": o.Model, "tokenizer_path": o.Model, "context_length": o.MaxModelTokens, "dtype": "bfloat16", "quantization": nil,
		"kv_cache_dtype": "auto", "revision": nil, "page_size": o.PageTokens, "dcp_size": 1, "dp_size": 1, "tp_size": 1, "pp_size": 1,
		"max_total_num_tokens": o.PoolTokens, "chunked_prefill_size": 8192, "max_prefill_tokens": 16384, "max_running_requests": o.MaxRunning,
		"enable_cache_report": true, "disable_radix_cache": false, "speculative_algorithm": nil, "random_seed": l.began.UnixNano() % 1e9,
		"startup_time": object{"scheduler_e2e": 7.2, "tokenizer_e2e": 55.5}, "disaggregation_mode": "null", "disaggregation_transfer_backend": "mooncake",
		"kv_events_config": config, "kv_events": events, "version": o.Version,
	}
}

func (l *life) sglMetrics(w http.ResponseWriter, _ *http.Request) {
	p, c := l.pressure(), &l.counts
	page := newPage(w, "sglang:", fmt.Sprintf(`engine_type="unified",model_name=%q,moe_ep_rank="0",pp_rank="0",tp_rank="0"`, l.opts.Model))
	page.put("num_running_reqs", "gauge", float64(p.running))
	page.put("num_queue_reqs", "gauge", float64(p.waiting))
	page.put("token_usage", "gauge", p.usage)
	page.put("num_used_tokens", "gauge", float64(p.used))
	page.put("kv_evictable_tokens", "gauge", float64(p.cached))
	page.put("max_total_num_tokens", "gauge", float64(l.opts.PoolTokens))
	page.put("page_size", "gauge", float64(l.opts.PageTokens))
	page.put("num_pages", "gauge", float64(l.opts.PoolTokens/l.opts.PageTokens))
	page.put("context_len", "gauge", float64(l.opts.MaxModelTokens))
	page.put("prompt_tokens_total", "counter", float64(c.prompt.Load()))
	page.put("cached_tokens_total", "counter", float64(c.cached.Load()))
	page.put("generation_tokens_total", "counter", float64(c.generated.Load()))
	page.put("num_requests_total", "counter", float64(c.finished.Load()))
	page.put("time_to_first_token_seconds_sum", "", float64(c.firstMicros.Load())/1e6)
	page.put("time_to_first_token_seconds_count", "", float64(c.firsts.Load()))
}

// page writes a page of metrics.
type page struct {
	w              http.ResponseWriter
	prefix, labels string
}

func newPage(w http.ResponseWriter, prefix, labels string) *page {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	return &page{w, prefix, labels}
}

// put writes one series; a family without a type has been begun before.
func (p *page) put(name, kind string, v float64) {
	name = p.prefix + name
	if kind != "" {
		_, _ = fmt.Fprintf(p.w, "# HELP %s %s\n# TYPE %s %s\n", name, strings.ReplaceAll(name, "_", " "), name, kind)
	}
	labels := ""
	if p.labels != "" {
		labels = "{" + p.labels + "}"
	}
	_, _ = fmt.Fprintf(p.w, "%s%s %v\n", name, labels, v)
}

// refusal is an error in the engine's words.
type refusal string

// Error implements error.
func (r refusal) Error() string { return string(r) }
