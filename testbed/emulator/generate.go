package emulator

import (
	"encoding/json"
	"io"
	"net/http"

	"waypost/testbed/emulator/core"
)

// generate runs a request and writes its answer.
func (l *life) generate(w http.ResponseWriter, r *http.Request, g *generation) {
	requests := l.coreRequests(r, g)
	signal := make(chan struct{}, 1)
	answers := make([]*answer, len(requests))
	arrived := l.opts.Clock.Now()
	g.rank.stats.asked(g.samples, g.maxTokens)
	for i := range requests {
		answers[i] = &answer{index: i, arrived: arrived, streamed: g.common.Stream, interval: l.opts.StreamInterval, signal: signal, cached: -1}
	}
	l.pull(r.Context(), g, requests)
	for i, q := range requests {
		g.rank.add(q, answers[i])
	}
	out := &response{l: l, g: g, w: w, choices: make([]choiceState, len(answers))}
	defer func() {
		if out.done() || l.apiIsDead() {
			return // an engine whose API died goes on generating
		}
		for _, q := range requests {
			g.rank.abort(q.ID)
		}
	}()
	if g.common.Stream {
		out.begin(arrived.Unix())
	}
	for !out.done() {
		select {
		case <-r.Context().Done():
			return
		case <-signal:
		}
		if err := out.takeAll(answers); err != nil {
			out.broken()
			return
		}
	}
	out.finish(arrived.Unix())
}

// choiceState is what has come of one answer.
type choiceState struct {
	tokens []uint32
	finish core.Finish
	cached int
}

// response writes an answer, whole or streamed.
type response struct {
	l        *life
	g        *generation
	w        http.ResponseWriter
	choices  []choiceState
	finished int
	created  int64
	shown    []bool // the choices whose first chunk is out
}

func (o *response) done() bool { return o.finished == len(o.choices) }

// takeAll takes what is new of every choice.
func (o *response) takeAll(answers []*answer) error {
	defer o.flush()
	for i, a := range answers {
		for o.choices[i].finish == "" {
			p, ok, err := a.take()
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			o.add(i, p)
		}
	}
	return nil
}

func (o *response) add(i int, p portion) {
	c := &o.choices[i]
	c.tokens = append(c.tokens, p.tokens...)
	c.cached = p.cached
	if p.finish != "" {
		c.finish = p.finish
		o.finished++
	}
	if o.g.common.Stream {
		o.chunk(i, p)
	}
}

// usage is counted over all choices; cached tokens are those of the last one,
// as in the engine.
func (o *response) usage() usage {
	u := usage{}
	for i := range o.choices {
		if i%o.g.samples == 0 {
			u.PromptTokens += len(o.g.prompts[i/o.g.samples])
		}
		u.CompletionTokens += len(o.choices[i].tokens)
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}

func (o *response) cached() int { return max(o.choices[len(o.choices)-1].cached, 0) }

// created is the number of prompt tokens whose blocks the request stored.
func (o *response) createdTokens() int {
	prompt := len(o.g.prompts[len(o.g.prompts)-1])
	block := o.l.opts.BlockTokens
	return max(prompt/block*block-o.cached(), 0)
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	TotalTokens      int `json:"total_tokens"`
	CompletionTokens int `json:"completion_tokens"`
}

// plainUsage is the usage of an answer in one piece.
type plainUsage struct {
	usage
	PromptTokensDetails     *plainDetails `json:"prompt_tokens_details"`
	CompletionTokensDetails *struct{}     `json:"completion_tokens_details"`
}

type plainDetails struct {
	CachedTokens       int  `json:"cached_tokens"`
	CreatedCacheTokens *int `json:"created_cache_tokens"`
	MultimodalTokens   *int `json:"multimodal_tokens"`
}

// finalUsage is the usage of a stream's last chunk.
type finalUsage struct {
	usage
	PromptTokensDetails *streamDetails `json:"prompt_tokens_details,omitempty"`
}

type streamDetails struct {
	CachedTokens       int  `json:"cached_tokens"`
	CreatedCacheTokens *int `json:"created_cache_tokens,omitempty"`
}

// runningUsage is that of the other chunks, if asked for.
type runningUsage struct {
	usage
	CompletionTokensDetails *struct{} `json:"completion_tokens_details"`
}

// details are the cached and the created tokens; the engine counts the latter
// for chats only.
func (o *response) details() (cached int, created *int) {
	if o.g.chat {
		n := o.createdTokens()
		created = &n
	}
	return o.cached(), created
}

// finish writes what is left: the whole answer, or the end of the stream.
func (o *response) finish(created int64) {
	if o.g.common.Stream {
		o.end()
		return
	}
	u := plainUsage{usage: o.usage()}
	if !o.l.opts.HidePromptTokensDetails {
		cached, stored := o.details()
		u.PromptTokensDetails = &plainDetails{CachedTokens: cached, CreatedCacheTokens: stored}
	}
	if o.g.chat {
		writeJSON(o.w, o.chatAnswer(created, u))
	} else {
		writeJSON(o.w, o.completionAnswer(created, u))
	}
}

// broken is an engine that died under the request.
func (o *response) broken() {
	e := &apiError{http.StatusInternalServerError, "InternalServerError", "", "EngineCore encountered an issue. See stack trace (above) for the root cause."}
	if !o.g.common.Stream {
		writeError(o.w, e)
		return
	}
	o.event(e.body())
	o.text("data: [DONE]\n\n")
	o.flush()
}

func (o *response) event(v any) {
	b, err := json.Marshal(v)
	if err != nil {
		return
	}
	o.text("data: " + string(b) + "\n\n")
}

func (o *response) text(s string) { _, _ = io.WriteString(o.w, s) }

// flush sends the chunks written so far.
func (o *response) flush() {
	if f, ok := o.w.(http.Flusher); ok && o.g.common.Stream {
		f.Flush()
	}
}

// tokenIDs are the ids of an answer, if the client asked for them.
func (o *response) tokenIDs(ids []uint32) []uint32 {
	if !o.g.common.ReturnTokenIDs {
		return nil
	}
	return ids
}

func (o *response) promptIDs(choice int) []uint32 {
	return o.tokenIDs(o.g.prompts[choice/o.g.samples])
}

func finishReason(f core.Finish) *string {
	if f == "" {
		return nil
	}
	s := string(f)
	return &s
}
