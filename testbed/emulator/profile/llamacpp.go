package profile

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

func llamaError(w http.ResponseWriter, status int, kind, text string) {
	writeJSON(w, status, object{"error": object{"code": status, "message": text, "type": kind}})
}

func (l *life) llamaFails(w http.ResponseWriter, q *query, err error) {
	if !errors.Is(err, errTooLong) {
		llamaError(w, http.StatusBadRequest, "invalid_request_error", err.Error())
		return
	}
	n := len(q.prompt)
	writeJSON(w, http.StatusBadRequest, object{"error": object{
		"code": 400, "message": fmt.Sprintf("request (%d tokens) exceeds the available context size (%d tokens), try increasing it", n, l.opts.MaxModelTokens),
		"type": "exceed_context_size_error", "n_prompt_tokens": n, "n_ctx": l.opts.MaxModelTokens,
	}})
}

// timings is what every answer has of its speed and its reuse.
func (l *life) timings(q *query, o *outcome) object {
	ms := float64(o.took) / float64(time.Millisecond)
	n := len(q.prompt) - o.cached
	return object{
		"cache_n": o.cached, "prompt_n": n, "prompt_ms": ms, "prompt_per_token_ms": ms / float64(n), "prompt_per_second": 1e3 * float64(n) / max(ms, 1e-6),
		"predicted_n": len(o.tokens), "predicted_ms": ms, "predicted_per_token_ms": ms / float64(len(o.tokens)), "predicted_per_second": 1e3 * float64(len(o.tokens)) / max(ms, 1e-6),
	}
}

func (l *life) llamaAuth(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if l.opts.APIKey != "" && r.Header.Get("Authorization") != "Bearer "+l.opts.APIKey {
			llamaError(w, http.StatusUnauthorized, "authentication_error", "Invalid API Key")
			return
		}
		next(w, r)
	}
}

func (l *life) llamaRoutes(mux *http.ServeMux) {
	auth := l.llamaAuth
	d := &dialect{
		fails: l.llamaFails,
		usage: func(q *query, o *outcome) object {
			return object{
				"completion_tokens": len(o.tokens), "prompt_tokens": len(q.prompt), "total_tokens": len(q.prompt) + len(o.tokens),
				"prompt_tokens_details": object{"cached_tokens": o.cached},
			}
		},
		last: func(b *openAI, q *query, o *outcome) object {
			out := object{"timings": l.timings(q, o), "system_fingerprint": l.opts.Version}
			if b.Verbose {
				v := l.native(q, o)
				if !b.Tokens || q.stream {
					v["tokens"] = []uint32{}
				}
				out["__verbose"] = v
			}
			return out
		},
	}
	l.openAIRoutes(mux, d, auth)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		llamaError(w, http.StatusNotFound, "not_found_error", "File Not Found")
	})
	mux.HandleFunc("GET /health", serveJSON(func() any { return object{"status": "ok"} }))
	models := serveJSON(func() any { return l.llamaModels() })
	if l.opts.ModelsNeedKey {
		models = auth(models)
	}
	mux.HandleFunc("GET /v1/models", models)
	mux.HandleFunc("GET /props", auth(serveJSON(func() any { return l.props() })))
	mux.HandleFunc("GET /slots", auth(l.serveSlots))
	mux.HandleFunc("POST /slots/{id}", auth(l.slotAction))
	mux.HandleFunc("GET /metrics", auth(l.llamaMetrics))
	mux.HandleFunc("POST /completion", auth(l.completion))
	l.llamaTokenRoutes(mux, auth)
}

func (l *life) llamaTokenRoutes(mux *http.ServeMux, auth func(http.HandlerFunc) http.HandlerFunc) {
	bad := func(w http.ResponseWriter, err error) {
		llamaError(w, http.StatusBadRequest, "invalid_request_error", err.Error())
	}
	mux.HandleFunc("POST /tokenize", auth(func(w http.ResponseWriter, r *http.Request) {
		var b struct{ Content string }
		if err := readBody(r, &b); err != nil {
			bad(w, err)
			return
		}
		writeJSON(w, http.StatusOK, object{"tokens": tokenize(b.Content)})
	}))
	mux.HandleFunc("POST /detokenize", auth(func(w http.ResponseWriter, r *http.Request) {
		var b struct{ Tokens []uint32 }
		if err := readBody(r, &b); err != nil {
			bad(w, err)
			return
		}
		writeJSON(w, http.StatusOK, object{"content": detokenize(b.Tokens)})
	}))
	templated := func(answer func(text string) object) http.HandlerFunc {
		return auth(func(w http.ResponseWriter, r *http.Request) {
			var b openAI
			if err := readBody(r, &b); err != nil {
				bad(w, err)
				return
			}
			text, err := render(b.Messages)
			if err != nil {
				bad(w, err)
				return
			}
			writeJSON(w, http.StatusOK, answer(text))
		})
	}
	mux.HandleFunc("POST /apply-template", templated(func(text string) object { return object{"prompt": text} }))
	mux.HandleFunc("POST /v1/chat/completions/input_tokens", templated(func(text string) object {
		return object{"input_tokens": len(text), "object": "response.input_tokens"}
	}))
}

// native is the answer of the server's own route.
func (l *life) native(q *query, o *outcome) object {
	return object{
		"index": 0, "content": detokenize(o.tokens), "tokens": o.tokens, "id_slot": o.slot, "stop": true, "model": l.opts.Model,
		"tokens_predicted": len(o.tokens), "tokens_evaluated": len(q.prompt), "tokens_cached": len(q.prompt) + len(o.tokens) - 1,
		"truncated": false, "stop_type": "limit", "timings": l.timings(q, o),
	}
}

func (l *life) completion(w http.ResponseWriter, r *http.Request) {
	var b openAI
	if err := readBody(r, &b); err != nil {
		l.llamaFails(w, nil, err)
		return
	}
	q, err := l.query(&b, false)
	if err != nil {
		l.llamaFails(w, nil, err)
		return
	}
	o, err := l.generate(r.Context(), q, func(*outcome, uint32) {})
	if err != nil {
		l.llamaFails(w, q, err)
		return
	}
	v := l.native(q, &o)
	if !b.Tokens {
		v["tokens"] = []uint32{}
	}
	writeJSON(w, http.StatusOK, v)
}

func (l *life) llamaModels() object {
	return object{
		"object": "list",
		"data": []any{object{
			"id": l.opts.Model, "aliases": []string{l.opts.Model}, "tags": []string{}, "object": "model", "created": l.began.Unix(), "owned_by": "llamacpp",
			"meta": object{"vocab_type": 2, "n_vocab": 512, "n_ctx": l.opts.MaxModelTokens, "n_ctx_train": 32768, "n_embd": 64, "n_params": 139584, "size": 279808, "ftype": "F16"},
		}},
	}
}

func (l *life) props() object {
	return object{
		"default_generation_settings": object{"params": object{"seed": 1, "temperature": 0.8, "max_tokens": -1, "n_predict": -1, "stream": false}, "n_ctx": l.opts.MaxModelTokens},
		"total_slots":                 l.opts.Slots, "model_alias": l.opts.Model, "model_path": l.opts.Model, "modalities": object{"vision": false, "audio": false},
		"chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "bos_token": "", "eos_token": "<|im_end|>",
		"build_info": l.opts.Version, "is_sleeping": false,
	}
}

func (l *life) serveSlots(w http.ResponseWriter, r *http.Request) {
	if l.opts.HideSlots {
		llamaError(w, http.StatusNotImplemented, "not_supported_error", "This server does not support slots endpoint. Start it with `--slots`")
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	out, idle := []any{}, false
	for i := range l.slots.slots {
		s := &l.slots.slots[i]
		idle = idle || !s.busy
		v := object{"id": i, "n_ctx": l.opts.MaxModelTokens, "speculative": false, "is_processing": s.busy}
		if s.used > 0 {
			v["id_task"], v["n_prompt_tokens"] = s.task, len(s.tokens)
			v["n_prompt_tokens_processed"], v["n_prompt_tokens_cache"] = s.computed, s.cached
			v["params"] = object{"seed": 1, "n_predict": -1, "stream": false}
			v["next_token"] = []any{object{"has_next_token": s.busy, "has_new_line": false, "n_remain": -1, "n_decoded": 0}}
		}
		out = append(out, v)
	}
	if !idle && r.URL.Query().Get("fail_on_no_slot") == "1" {
		llamaError(w, http.StatusServiceUnavailable, "unavailable_error", "no slot available")
		return
	}
	writeJSON(w, http.StatusOK, out)
}

// slotAction saves, restores or empties a slot.
func (l *life) slotAction(w http.ResponseWriter, r *http.Request) {
	var b struct{ Filename string }
	_ = readBody(r, &b) // erase has no body
	id, err := strconv.Atoi(r.PathValue("id"))
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || id < 0 || id >= len(l.slots.slots) {
		llamaError(w, http.StatusBadRequest, "invalid_request_error", "Invalid slot ID")
		return
	}
	s := &l.slots.slots[id]
	switch r.URL.Query().Get("action") {
	case "save":
		l.files[b.Filename] = s.tokens
		writeJSON(w, http.StatusOK, object{"id_slot": id, "filename": b.Filename, "n_saved": len(s.tokens), "n_written": 272 * len(s.tokens), "timings": object{"save_ms": .3}})
	case "restore":
		tokens, ok := l.files[b.Filename]
		if !ok {
			llamaError(w, http.StatusBadRequest, "invalid_request_error", "Unable to restore slot: No available space in KV cache or invalid slot save file")
			return
		}
		s.tokens = tokens
		writeJSON(w, http.StatusOK, object{"id_slot": id, "filename": b.Filename, "n_restored": len(tokens), "n_read": 272 * len(tokens), "timings": object{"restore_ms": .3}})
	case "erase":
		writeJSON(w, http.StatusOK, object{"id_slot": id, "n_erased": l.slots.erase(id)})
	default:
		llamaError(w, http.StatusBadRequest, "invalid_request_error", "Invalid action")
	}
}

func (l *life) llamaMetrics(w http.ResponseWriter, _ *http.Request) {
	if l.opts.HideMetrics {
		llamaError(w, http.StatusNotImplemented, "not_supported_error", "This server does not support metrics endpoint. Start it with `--metrics`")
		return
	}
	p, c := l.pressure(), &l.counts
	// Whatever its name says, it is a monotonic clock: only equality counts.
	w.Header().Set("Process-Start-Time-Unix", strings.TrimLeft(l.startToken(), "0"))
	page := newPage(w, "llamacpp:", "")
	computed := c.prompt.Load()
	if l.opts.CountsCached {
		computed -= c.cached.Load()
	}
	page.put("prompt_tokens_total", "counter", float64(computed))
	if l.opts.CountsCached {
		page.put("prompt_tokens_cached_total", "counter", float64(c.cached.Load()))
	}
	page.put("prompt_seconds_total", "counter", 0)
	page.put("tokens_predicted_total", "counter", float64(c.generated.Load()))
	page.put("tokens_predicted_seconds_total", "counter", 0)
	page.put("n_decode_total", "counter", float64(c.generated.Load()))
	page.put("n_tokens_max", "counter", float64(c.longest.Load()))
	page.put("prompt_tokens_seconds", "gauge", 0)
	page.put("predicted_tokens_seconds", "gauge", 0)
	page.put("requests_processing", "gauge", float64(p.running))
	page.put("requests_deferred", "gauge", float64(p.waiting))
	page.put("n_busy_slots_per_decode", "gauge", 1)
}
