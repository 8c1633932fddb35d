package emulator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"waypost/testbed/emulator/core"
)

const (
	maxPrompts        = 64
	maxChoices        = 128
	defaultCompletion = 16
)

// commonRequest are the fields of completions and chats that matter here; all
// others are accepted and ignored.
type commonRequest struct {
	Model          string          `json:"model"`
	N              *int            `json:"n"`
	Stream         bool            `json:"stream"`
	StreamOptions  *streamOptions  `json:"stream_options"`
	IgnoreEOS      bool            `json:"ignore_eos"`
	ReturnTokenIDs bool            `json:"return_token_ids"`
	CacheSalt      *string         `json:"cache_salt"`
	RequestID      string          `json:"request_id"`
	SessionID      string          `json:"session_id"`
	PromptLogprobs json.RawMessage `json:"prompt_logprobs"`
	// KVTransferParams names the peer that holds the prompt's blocks.
	KVTransferParams *transferParams `json:"kv_transfer_params"`
	XArgs            struct {
		ReportMode string `json:"kv_cache_report_mode"`
	} `json:"vllm_xargs"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
	Continuous   bool `json:"continuous_usage_stats"`
}

type completionRequest struct {
	commonRequest
	Prompt    prompts `json:"prompt"`
	MaxTokens *int    `json:"max_tokens"`
}

type chatRequest struct {
	commonRequest
	rendering
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"`
}

// prompts are one or more prompts, each text or token ids.
type prompts [][]uint32

// UnmarshalJSON reads a string, a list of strings, a list of token ids or a
// list of such lists.
func (p *prompts) UnmarshalJSON(b []byte) error {
	b = bytes.TrimSpace(b)
	bad := badRequest("prompt", "prompt must be a string, a list of token ids, or a list of either")
	if len(b) == 0 || bytes.Equal(b, []byte("null")) {
		return bad
	}
	if b[0] == '"' {
		var text string
		if json.Unmarshal(b, &text) != nil {
			return bad
		}
		*p = prompts{tokenize(text)}
		return nil
	}
	if b[0] != '[' {
		return bad
	}
	inner := bytes.TrimSpace(b[1:])
	if len(inner) == 0 {
		return bad
	}
	switch inner[0] {
	case '"':
		var texts []string
		if json.Unmarshal(b, &texts) != nil {
			return bad
		}
		for _, t := range texts {
			*p = append(*p, tokenize(t))
		}
	case '[':
		var lists []json.RawMessage
		if json.Unmarshal(b, &lists) != nil {
			return bad
		}
		for _, l := range lists {
			ids, err := tokenIDs(bytes.TrimSpace(l))
			if err != nil {
				return err
			}
			*p = append(*p, ids)
		}
	default:
		ids, err := tokenIDs(b)
		if err != nil {
			return err
		}
		*p = prompts{ids}
	}
	return nil
}

// tokenIDs reads a JSON list of integers from 0 to 2^32-1. It is written by
// hand because prompts of 100,000 ids are common.
func tokenIDs(b []byte) ([]uint32, error) {
	bad := badRequest("prompt", "prompt must be a list of integers from 0 to 4294967295")
	if len(b) < 2 || b[0] != '[' || b[len(b)-1] != ']' {
		return nil, bad
	}
	ids := make([]uint32, 0, bytes.Count(b, []byte{','})+1)
	b = b[1 : len(b)-1]
	i := 0
	space := func() {
		for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
			i++
		}
	}
	if space(); i == len(b) {
		return ids, nil
	}
	for {
		space()
		from, v := i, uint64(0)
		for i < len(b) && b[i] >= '0' && b[i] <= '9' && i-from < 11 {
			v = v*10 + uint64(b[i]-'0')
			i++
		}
		if i == from || v > 1<<32-1 || (b[from] == '0' && i-from > 1) {
			return nil, bad
		}
		ids = append(ids, uint32(v))
		if space(); i == len(b) {
			return ids, nil
		}
		if b[i] != ',' {
			return nil, bad
		}
		i++
	}
}

// generation is one checked request.
type generation struct {
	common    commonRequest
	chat      bool
	id        string
	prompts   [][]uint32
	samples   int
	maxTokens int
	adapter   *core.Adapter
	rank      *rank
}

// modelName is what the answer says served it.
func (g *generation) modelName(l *life) string {
	if g.common.Model != "" {
		return g.common.Model
	}
	return l.opts.Model
}

// check makes a generation of a decoded request. maxTokens nil means as much as
// the model can.
func (l *life) check(r *http.Request, c commonRequest, list [][]uint32, maxTokens *int) (*generation, error) {
	g := &generation{common: c, prompts: list, samples: 1}
	adapter, err := l.model(c.Model)
	if err != nil {
		return nil, err
	}
	g.adapter = l.adapter(adapter)
	if g.rank, err = l.chooseRank(r); err != nil {
		return nil, err
	}
	if c.CacheSalt != nil && *c.CacheSalt == "" {
		return nil, badRequest("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)")
	}
	if c.N != nil {
		g.samples = *c.N
	}
	if g.samples < 1 || len(list)*g.samples > maxChoices {
		return nil, badRequest("n", "n must be at least 1, and at most %d answers are made at once, got %d.", maxChoices, g.samples)
	}
	if c.StreamOptions != nil && !c.Stream {
		return nil, badRequest("stream_options", "Stream options can only be defined when `stream=True`.")
	}
	if err := c.KVTransferParams.check(); err != nil {
		return nil, err
	}
	if len(list) == 0 || len(list) > maxPrompts {
		return nil, badRequest("prompt", "%d prompts: want 1 to %d", len(list), maxPrompts)
	}
	longest := 0
	for _, p := range list {
		if err := l.checkPrompt(p); err != nil {
			return nil, err
		}
		longest = max(longest, len(p))
	}
	return g, l.checkLength(g, longest, maxTokens)
}

func (l *life) checkPrompt(p []uint32) error {
	if len(p) == 0 {
		return badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	}
	for _, t := range p {
		if int64(t) >= int64(l.opts.VocabularyTokens) {
			return badRequest("prompt", "Token id %d is out of vocabulary", t)
		}
	}
	return nil
}

func (l *life) checkLength(g *generation, prompt int, maxTokens *int) error {
	limit := l.opts.MaxModelTokens
	if prompt >= limit {
		return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)", limit, prompt, prompt)
	}
	g.maxTokens = limit - prompt
	if maxTokens == nil {
		return nil
	}
	if *maxTokens < 1 {
		return badRequest("max_tokens", "max_tokens must be at least 1, got %d. (parameter=max_tokens, value=%d)", *maxTokens, *maxTokens)
	}
	if *maxTokens > limit-prompt {
		return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains at least %d input tokens, for a total of at least %d tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=%d)", limit, *maxTokens, prompt, prompt+*maxTokens, prompt)
	}
	g.maxTokens = *maxTokens
	return nil
}

func (l *life) serveCompletion(w http.ResponseWriter, r *http.Request) {
	var q completionRequest
	if err := readBody(w, r, &q); err != nil {
		writeError(w, err)
		return
	}
	maxTokens := q.MaxTokens
	if maxTokens == nil {
		d := defaultCompletion
		maxTokens = &d
	}
	if q.Prompt == nil {
		writeError(w, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty."))
		return
	}
	g, err := l.check(r, q.commonRequest, q.Prompt, maxTokens)
	if err != nil {
		writeError(w, err)
		return
	}
	g.id = "cmpl-" + l.requestID(r, q.RequestID)
	l.generate(w, r, g)
}

func (l *life) serveChat(w http.ResponseWriter, r *http.Request) {
	var q chatRequest
	if err := readBody(w, r, &q); err != nil {
		writeError(w, err)
		return
	}
	text, err := q.render()
	if err != nil {
		writeError(w, err)
		return
	}
	maxTokens := q.MaxTokens
	if q.MaxCompletionTokens != nil {
		maxTokens = q.MaxCompletionTokens
	}
	g, err := l.check(r, q.commonRequest, [][]uint32{tokenize(text)}, maxTokens)
	if err != nil {
		writeError(w, err)
		return
	}
	g.chat = true
	g.id = "chatcmpl-" + l.requestID(r, q.RequestID)
	l.generate(w, r, g)
}

// coreRequests are the core's requests for every choice, in order.
func (l *life) coreRequests(r *http.Request, g *generation) []core.Request {
	salt := ""
	skew, ignoreSalt := l.promptFaults()
	if g.common.CacheSalt != nil && !ignoreSalt {
		salt = *g.common.CacheSalt
	}
	session := g.common.SessionID
	if h := r.Header.Get("X-Session-ID"); h != "" && session == "" {
		session = h
	}
	unique := strconv.FormatUint(l.requests.Add(1), 16)
	var list []core.Request
	for i, p := range g.prompts {
		if skew != 0 {
			p = append([]uint32{skew}, p[1:]...)
		}
		for s := range g.samples {
			list = append(list, core.Request{
				ID: fmt.Sprintf("%s-%d-%s", g.id, i*g.samples+s, unique), Prompt: p, MaxTokens: g.maxTokens,
				Generate: newGenerator(p, s, l.opts.NaturalTokens, g.common.IgnoreEOS).token,
				Salt:     salt, Adapter: g.adapter, SessionID: session,
				SkipCacheRead: wanted(g.common.PromptLogprobs), ReportHits: g.common.XArgs.ReportMode == "full",
			})
		}
	}
	return list
}

func wanted(raw json.RawMessage) bool {
	return len(raw) > 0 && !bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}
