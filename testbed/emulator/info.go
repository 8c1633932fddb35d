package emulator

import (
	"context"
	"fmt"
	"net/http"
	"strconv"

	"waypost/testbed/emulator/core"
)

type modelCard struct {
	ID          string       `json:"id"`
	Object      string       `json:"object"`
	Created     int64        `json:"created"`
	OwnedBy     string       `json:"owned_by"`
	Root        string       `json:"root"`
	Parent      *string      `json:"parent"`
	MaxModelLen *int         `json:"max_model_len"`
	Permission  []permission `json:"permission"`
}

type permission struct {
	ID                 string  `json:"id"`
	Object             string  `json:"object"`
	Created            int64   `json:"created"`
	AllowCreateEngine  bool    `json:"allow_create_engine"`
	AllowSampling      bool    `json:"allow_sampling"`
	AllowLogprobs      bool    `json:"allow_logprobs"`
	AllowSearchIndices bool    `json:"allow_search_indices"`
	AllowView          bool    `json:"allow_view"`
	AllowFineTuning    bool    `json:"allow_fine_tuning"`
	Organization       string  `json:"organization"`
	Group              *string `json:"group"`
	IsBlocking         bool    `json:"is_blocking"`
}

func (l *life) serveModels(w http.ResponseWriter, _ *http.Request) {
	now := l.opts.Clock.Now().Unix()
	card := func(id, root string) modelCard {
		return modelCard{ID: id, Object: "model", Created: now, OwnedBy: "vllm", Root: root, Permission: []permission{{
			ID: fmt.Sprintf("modelperm-%016x", mix(uint64(now)+uint64(len(id)))), Object: "model_permission", Created: now,
			AllowSampling: true, AllowLogprobs: true, AllowView: true, Organization: "*",
		}}}
	}
	base := card(l.opts.Model, l.opts.Model)
	base.MaxModelLen = &l.opts.MaxModelTokens
	cards := []modelCard{base}
	for _, a := range l.opts.Adapters {
		c := card(a.Name, a.Path)
		c.Parent = &l.opts.Model
		cards = append(cards, c)
	}
	writeJSON(w, struct {
		Object string      `json:"object"`
		Data   []modelCard `json:"data"`
	}{"list", cards})
}

func (l *life) serveSources(w http.ResponseWriter, _ *http.Request) {
	sources := make(map[string]any)
	if !l.opts.NoEvents {
		for i := range l.ranks {
			sources[strconv.Itoa(i)] = l.sourceOf(i)
		}
	}
	writeJSON(w, sources)
}

type tokenizeRequest struct {
	Model            string  `json:"model"`
	Prompt           *string `json:"prompt"`
	ReturnTokenStrs  bool    `json:"return_token_strs"`
	AddSpecialTokens *bool   `json:"add_special_tokens"` // the tokenizer has none to add
	rendering
}

func (q tokenizeRequest) text() (string, error) {
	if len(q.Messages) > 0 {
		return q.render()
	}
	if q.Prompt == nil {
		return "", &apiError{
			http.StatusBadRequest, "Bad Request", "body.prompt",
			"2 validation errors:\n  {'type': 'missing', 'loc': 'body.prompt', 'msg': 'Field required'}\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}",
		}
	}
	return *q.Prompt, nil
}

func (l *life) serveTokenize(w http.ResponseWriter, r *http.Request) {
	var q tokenizeRequest
	if err := readBody(w, r, &q); err != nil {
		writeError(w, err)
		return
	}
	if _, err := l.model(q.Model); err != nil {
		writeError(w, err)
		return
	}
	text, err := q.text()
	if err != nil {
		writeError(w, err)
		return
	}
	tokens := tokenize(text)
	var strs []string
	if q.ReturnTokenStrs {
		strs = make([]string, len(tokens))
		for i, t := range tokens {
			strs[i] = string(rune(t))
		}
	}
	writeJSON(w, struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []uint32 `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{len(tokens), l.opts.MaxModelTokens, tokens, strs})
}

func (l *life) serveDetokenize(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Model  string   `json:"model"`
		Tokens []uint32 `json:"tokens"`
	}
	if err := readBody(w, r, &q); err != nil {
		writeError(w, err)
		return
	}
	if _, err := l.model(q.Model); err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, map[string]string{"prompt": detokenize(q.Tokens)})
}

// developmentRoutes exist in the real engine with VLLM_SERVER_DEV_MODE=1.
func (l *life) developmentRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /server_info", l.serveServerInfo)
	mux.HandleFunc("POST /reset_prefix_cache", l.serveReset)
	mux.HandleFunc("POST /sleep", l.serveSleep)
	mux.HandleFunc("POST /wake_up", func(w http.ResponseWriter, _ *http.Request) {
		l.setHeld(func() { l.level = 0 })
		writeJSON(w, map[string]any{"status": "awake", "tags": nil})
	})
	mux.HandleFunc("GET /is_sleeping", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, map[string]bool{"is_sleeping": l.sleepLevel() > 0})
	})
	mux.HandleFunc("POST /pause", l.servePause)
	mux.HandleFunc("POST /resume", func(w http.ResponseWriter, _ *http.Request) {
		l.setHeld(func() { l.paused = false })
		writeJSON(w, map[string]string{"status": "resumed"})
	})
	mux.HandleFunc("GET /is_paused", func(w http.ResponseWriter, _ *http.Request) {
		l.mu.Lock()
		paused := l.paused
		l.mu.Unlock()
		writeJSON(w, map[string]bool{"is_paused": paused})
	})
}

func (l *life) serveReset(w http.ResponseWriter, r *http.Request) {
	done, err := l.reset(r.Context(), r.URL.Query().Get("reset_running_requests") == "true")
	if err != nil {
		return // the client or the engine is gone
	}
	writeJSON(w, map[string]bool{"success": done})
}

// clearAndHold ends all requests and forgets the cache of every rank.
func (l *life) clearAndHold(ctx context.Context) {
	for _, r := range l.ranks {
		_ = r.call(ctx, func() {
			r.abortAll()
			r.core.Reset(true)
			r.stats.record(l.opts.Clock.Now(), r.core.Status())
		})
	}
}

func (l *life) serveSleep(w http.ResponseWriter, r *http.Request) {
	level := 1
	if v := r.URL.Query().Get("level"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > 2 {
			writeError(w, badRequest("level", "level %q: want 1 or 2", v))
			return
		}
		level = n
	}
	l.setHeld(func() { l.level = level })
	l.clearAndHold(r.Context())
	writeJSON(w, map[string]any{"status": "sleeping", "level": level})
}

func (l *life) servePause(w http.ResponseWriter, r *http.Request) {
	l.setHeld(func() { l.paused = true })
	if r.URL.Query().Get("clear_cache") != "false" {
		l.clearAndHold(r.Context())
	}
	writeJSON(w, map[string]string{"status": "paused"})
}

func (l *life) serveServerInfo(w http.ResponseWriter, _ *http.Request) {
	o := l.opts
	var events any
	if !o.NoEvents {
		events = l.sourceOf(0)
	}
	cache := map[string]any{
		"block_size": l.claimedBlockTokens(), "num_gpu_blocks": o.PoolBlocks * o.Ranks, "enable_prefix_caching": true,
		"prefix_caching_hash_algo": "sha256", "kv_cache_size_tokens": o.PoolBlocks * o.BlockTokens, "cache_dtype": "auto",
	}
	config := map[string]any{
		"instance_id":  strconv.FormatInt(l.began.UnixNano(), 10),
		"model_config": map[string]any{"model": o.Model, "tokenizer": o.Model, "served_model_name": o.Model, "max_model_len": o.MaxModelTokens},
		"cache_config": cache,
		"scheduler_config": map[string]any{
			"max_num_batched_tokens": o.StepTokens, "max_num_seqs": o.MaxRunning, "enable_chunked_prefill": true,
			"policy": "fcfs", "scheduler_reserve_full_isl": true, "watermark": 0.0, "async_scheduling": false,
		},
		"parallel_config":  map[string]any{"data_parallel_size": o.Ranks, "tensor_parallel_size": 1},
		"kv_events_config": events,
	}
	info := map[string]any{"vllm_config": config}
	l.describeTransfer(info, config, cache)
	writeJSON(w, info)
}

// adapter is the core's form of adapter i; nil for -1.
func (l *life) adapter(i int) *core.Adapter {
	if i < 0 {
		return nil
	}
	return &core.Adapter{ID: i + 1, Name: l.opts.Adapters[i].Name, Path: l.opts.Adapters[i].Path}
}
