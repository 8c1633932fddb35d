package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// maxLineBytes bounds one line of a recording.
const maxLineBytes = 256 << 20

// eachLine calls f with each line that is not blank.
func eachLine(name string, r io.Reader, f func(number int, line []byte) error) error {
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxLineBytes)
	for n := 1; s.Scan(); n++ {
		line := bytes.TrimSpace(s.Bytes())
		if len(line) == 0 {
			continue
		}
		if err := f(n, line); err != nil {
			return fmt.Errorf("%s, line %d: %w", name, n, err)
		}
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// request is one recorded completion of which the token ids are known.
type request struct {
	number     int // of the exchange in the recording
	sent, done float64
	model      string
	salt       string
	tokens     []uint32
	rank       int // the data-parallel rank it asked for, -1: none
	actual     *int
	samples    int
	logprobs   bool // prompt_logprobs
	reportFull bool // kv_cache_report_mode
}

// clearing is a recorded call that empties the cache. The engine announces it
// with its next step only.
type clearing struct{ t float64 }

// exchange is one recorded HTTP exchange.
type exchange struct {
	N        int               `json:"n"`
	Sent     float64           `json:"t_send"`
	Done     float64           `json:"t_done"`
	Method   string            `json:"method"`
	Path     string            `json:"path"`
	Headers  map[string]string `json:"headers"`
	Request  json.RawMessage   `json:"request"`
	Status   int               `json:"status"`
	Response json.RawMessage   `json:"response"`
	SSE      []string          `json:"sse"`
	Tokens   []uint32          `json:"prompt_token_ids"`
}

type body struct {
	Model        string          `json:"model"`
	Prompt       json.RawMessage `json:"prompt"`
	Messages     json.RawMessage `json:"messages"`
	Tools        json.RawMessage `json:"tools"`
	Template     json.RawMessage `json:"chat_template"`
	TemplateArgs json.RawMessage `json:"chat_template_kwargs"`
	Generation   *bool           `json:"add_generation_prompt"`
	Continue     bool            `json:"continue_final_message"`
	Special      *bool           `json:"add_special_tokens"`
	Salt         string          `json:"cache_salt"`
	Samples      int             `json:"n"`
	Logprobs     *int            `json:"prompt_logprobs"`
	ExtraArgs    struct {
		ReportMode string `json:"kv_cache_report_mode"`
	} `json:"vllm_xargs"`
}

// inputs is what a requests file holds.
type inputs struct {
	requests  []request
	clearings []clearing
	withoutID int // completions whose token ids are not recorded
}

func readRequests(name string, r io.Reader) (in inputs, err error) {
	// Token ids by what /tokenize was asked.
	known := map[string][]uint32{}
	err = eachLine(name, r, func(number int, line []byte) error {
		var e exchange
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		if e.N == 0 {
			e.N = number
		}
		path, query, _ := strings.Cut(e.Path, "?")
		switch path {
		case "/tokenize":
			e.learn(known)
		case "/v1/chat/completions", "/v1/completions":
			in.add(&e, known)
		case "/reset_prefix_cache", "/sleep", "/pause":
			if e.clears(path, query) {
				in.clearings = append(in.clearings, clearing{e.Sent})
			}
		}
		return nil
	})
	slices.SortStableFunc(in.requests, func(a, b request) int { return cmp.Compare(a.sent, b.sent) })
	slices.SortStableFunc(in.clearings, func(a, b clearing) int { return cmp.Compare(a.t, b.t) })
	return in, err
}

// learn keeps the token ids that /tokenize gave for a prompt or for messages.
func (e *exchange) learn(known map[string][]uint32) {
	var b body
	var answer struct {
		Tokens []uint32 `json:"tokens"`
	}
	if e.Status == 200 && json.Unmarshal(e.Request, &b) == nil && json.Unmarshal(e.Response, &answer) == nil && answer.Tokens != nil {
		known[b.rendered()] = answer.Tokens
	}
}

// rendered names what decides the token ids of a prompt.
func (b *body) rendered() string {
	generation := b.Generation == nil || *b.Generation
	special := len(b.Messages) == 0
	if b.Special != nil {
		special = *b.Special
	}
	return fmt.Sprintf("%s|%s|%s|%s|%s|%v|%v|%v", b.Prompt, b.Messages, b.Tools, b.Template, b.TemplateArgs, generation, b.Continue, special)
}

// clears says whether a call emptied the cache.
func (e *exchange) clears(path, query string) bool {
	if e.Method != "POST" || e.Status != 200 {
		return false
	}
	q, _ := url.ParseQuery(query)
	switch path {
	case "/reset_prefix_cache":
		answer := struct {
			Success *bool `json:"success"`
		}{}
		return json.Unmarshal(e.Response, &answer) == nil && answer.Success != nil && *answer.Success
	case "/sleep":
		return q.Get("level") != "0"
	}
	return q.Get("clear_cache") != "false"
}

func (in *inputs) add(e *exchange, known map[string][]uint32) {
	var b body
	if e.Status != 200 || json.Unmarshal(e.Request, &b) != nil {
		return
	}
	r := request{
		number: e.N, sent: e.Sent, done: max(e.Done, e.Sent), model: b.Model, salt: b.Salt, rank: -1,
		samples: b.Samples, logprobs: b.Logprobs != nil, reportFull: b.ExtraArgs.ReportMode == "full",
	}
	u := e.usage()
	r.actual = u.cached()
	r.tokens = e.promptTokens(&b, known)
	if len(r.tokens) == 0 || u != nil && u.Prompt != len(r.tokens) {
		in.withoutID++ // none, or those of another prompt
		return
	}
	for name, v := range e.Headers {
		if n, err := strconv.Atoi(v); err == nil && n >= 0 && strings.EqualFold(name, "x-data-parallel-rank") {
			r.rank = n
		}
	}
	in.requests = append(in.requests, r)
}

// promptTokens finds the token ids: given as the prompt, recorded beside the
// request, returned by the engine, or by an earlier /tokenize.
func (e *exchange) promptTokens(b *body, known map[string][]uint32) []uint32 {
	var ids []uint32
	if json.Unmarshal(b.Prompt, &ids) == nil && len(ids) > 0 {
		return ids
	}
	if len(e.Tokens) > 0 {
		return e.Tokens
	}
	var answer struct {
		Tokens  []uint32 `json:"prompt_token_ids"`
		Choices []struct {
			Tokens []uint32 `json:"prompt_token_ids"`
		} `json:"choices"`
	}
	if json.Unmarshal(e.Response, &answer) == nil {
		if len(answer.Tokens) > 0 {
			return answer.Tokens
		}
		if len(answer.Choices) > 0 && len(answer.Choices[0].Tokens) > 0 {
			return answer.Choices[0].Tokens
		}
	}
	return known[b.rendered()]
}

type usage struct {
	Prompt  int `json:"prompt_tokens"`
	Details *struct {
		Cached *int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

func (u *usage) cached() *int {
	if u == nil || u.Details == nil {
		return nil
	}
	return u.Details.Cached
}

// usage finds the usage in the answer, or in the last chunk that has one.
func (e *exchange) usage() (u *usage) {
	var answer struct {
		Usage *usage `json:"usage"`
	}
	if len(e.Response) > 0 && json.Unmarshal(e.Response, &answer) == nil {
		u = answer.Usage
	}
	for _, line := range e.SSE {
		chunk, ok := strings.CutPrefix(line, "data: {")
		if !ok {
			continue
		}
		answer.Usage = nil
		if json.Unmarshal([]byte("{"+chunk), &answer) == nil && answer.Usage != nil {
			u = answer.Usage
		}
	}
	return u
}
