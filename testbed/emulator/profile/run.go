package profile

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"
)

// query is one request of any kind.
type query struct {
	prompt    []uint32
	maxTokens int
	namespace string // what separates caches
	salt      string
	stream    bool
	usage     bool
	chat      bool
	pinned    int
	noReuse   bool
}

// outcome is what a request came to.
type outcome struct {
	cached int
	slot   int
	tokens []uint32
	finish string
	took   time.Duration
}

var (
	errTooLong = errors.New("the prompt and its answer are too long")
	errStopped = errors.New("the engine has stopped")
)

const alphabet = "etaoinshrdlucmfwypvbgkjqxz      "

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// generate runs a request; each is called with every token, the first once the
// prompt has been computed.
func (l *life) generate(ctx context.Context, q *query, each func(o *outcome, token uint32)) (outcome, error) {
	o := outcome{finish: "length"}
	if len(q.prompt) == 0 || len(q.prompt)+q.maxTokens > l.longest() {
		return o, errTooLong
	}
	arrived := time.Now()
	all := append([]uint32(nil), q.prompt...)
	var h held
	if err := l.admit(ctx, q, &h, all); err != nil {
		return o, err
	}
	o.cached, o.slot = h.cached, h.slot
	defer func() { l.release(&h, all) }()
	if err := l.compute(ctx, &h, all); err != nil {
		return o, err
	}
	seed := uint64(len(q.prompt))
	for _, t := range q.prompt {
		seed = mix(seed ^ uint64(t))
	}
	l.counts.prompt.Add(int64(len(q.prompt)))
	l.counts.cached.Add(int64(h.cached))
	for i := range q.maxTokens {
		if i > 0 {
			if err := l.sleep(ctx, l.opts.TokenTime); err != nil {
				return o, err
			}
			if !l.grow(ctx, q, &h, all) {
				return o, errStopped
			}
		}
		token := uint32(alphabet[mix(seed+uint64(i))%uint64(len(alphabet))])
		all = append(all, token)
		o.tokens = append(o.tokens, token)
		l.counts.generated.Add(1)
		if i == 0 {
			l.counts.firsts.Add(1)
			l.counts.firstMicros.Add(time.Since(arrived).Microseconds())
		}
		each(&o, token)
	}
	o.took = time.Since(arrived)
	l.counts.finished.Add(1)
	return o, nil
}

// longest is how long a prompt and its answer may be.
func (l *life) longest() int {
	if l.pages == nil {
		return l.opts.MaxModelTokens
	}
	return min(l.opts.MaxModelTokens, (l.pages.pool-1)*l.opts.PageTokens)
}

// admit waits for a place for a request of so many tokens, in no order.
func (l *life) admit(ctx context.Context, q *query, h *held, tokens []uint32) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting++
	l.backlog += len(tokens) // what is cached of them is not looked for
	defer func() {
		l.waiting--
		l.backlog -= len(tokens)
	}()
	for {
		if l.running < l.opts.MaxRunning {
			var got held
			var ok bool
			if l.slots != nil {
				got, ok = l.slots.begin(tokens, q.pinned, !q.noReuse)
			} else {
				got, ok = l.pages.begin(q.namespace, q.salt, tokens, len(q.prompt)+q.maxTokens-len(tokens))
			}
			if ok {
				*h = got
				h.prompt, h.output = len(q.prompt), len(tokens)-len(q.prompt)
				l.active = append(l.active, h)
				l.running++
				l.steps++
				l.publish()
				return nil
			}
		}
		if !l.await(ctx) {
			return ctx.Err()
		}
	}
}

// await waits until a request has ended or given up its pages; mu is held.
func (l *life) await(ctx context.Context) bool {
	freed := l.freed
	l.mu.Unlock()
	defer l.mu.Lock()
	select {
	case <-ctx.Done():
		return false
	case <-freed:
		return true
	}
}

// changed wakes who waits for memory; mu is held.
func (l *life) changed() {
	close(l.freed)
	l.freed = make(chan struct{})
}

// grow makes room for one more token. Where there is none the request with the
// shortest answer, of those the one with the longest prompt, gives up its pages, waits
// for others again and computes all anew.
func (l *life) grow(ctx context.Context, q *query, h *held, all []uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.steps++
	if l.slots != nil {
		s := &l.slots.slots[h.slot]
		s.tokens = append(s.tokens, all[len(all)-1])
		return true
	}
	for h.output = len(all) - h.prompt; !h.retract; {
		if l.pages.grow(h, len(all)-1) {
			return true
		}
		v := l.victim()
		if !v.retract {
			v.retract = true
			l.changed()
		}
		if v != h && !l.await(ctx) {
			return false
		}
	}
	return l.retracted(ctx, q, h, all)
}

// victim is the running request that gives up its pages next; mu is held.
func (l *life) victim() *held {
	return slices.MinFunc(l.active, func(a, b *held) int {
		return cmp.Or(cmp.Compare(a.output, b.output), cmp.Compare(b.prompt, a.prompt))
	})
}

// retracted gives up a request's pages and begins it again; mu is held.
func (l *life) retracted(ctx context.Context, q *query, h *held, all []uint32) bool {
	l.pages.retract(h)
	l.leave(h)
	l.retractions++
	l.mu.Unlock()
	defer l.mu.Lock()
	if l.admit(ctx, q, h, all) != nil {
		return false
	}
	return l.compute(ctx, h, all) == nil
}

// leave takes a request out of those that run; mu is held.
func (l *life) leave(h *held) {
	l.active = slices.DeleteFunc(l.active, func(o *held) bool { return o == h })
	l.running--
	l.changed()
}

// release ends a request; what its answer filled may be told of a moment later.
func (l *life) release(h *held, all []uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(all) == h.prompt {
		// No token: the prompt's pages stay, as of an answer that was left.
		all = append(all, 0)
	}
	l.counts.longest.Store(max(l.counts.longest.Load(), int64(len(all))))
	if h.away {
		return // its caller left while it waited for its pages again
	}
	switch {
	case l.slots != nil:
		l.slots.end(h, all)
	case h.computed:
		l.pages.end(h, all)
	default:
		l.pages.retract(h) // its caller left before
	}
	l.leave(h)
	if l.opts.StoresLag <= 0 {
		l.publish()
		return
	}
	l.wg.Go(func() {
		_ = l.sleepReal(l.ctx, l.opts.StoresLag)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.publish()
	})
}

// compute computes what is not cached of a request's tokens; then others find it.
func (l *life) compute(ctx context.Context, h *held, tokens []uint32) error {
	if err := l.prefill(ctx, len(tokens)-h.cached); err != nil || l.pages == nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pages.keep(h, tokens)
	l.publish()
	return nil
}

// prefill computes so many tokens, after those of others that came before.
func (l *life) prefill(ctx context.Context, tokens int) error {
	l.queue(1, tokens)
	select {
	case l.gpu <- struct{}{}:
		l.queue(-1, -tokens)
	case <-ctx.Done():
		l.queue(-1, -tokens)
		return ctx.Err()
	}
	began := time.Now()
	defer func() {
		l.counts.prefilled.Add(int64(tokens))
		l.counts.prefillMicros.Add(time.Since(began).Microseconds())
		<-l.gpu
	}()
	return l.sleep(ctx, time.Duration(float64(tokens)/l.opts.PrefillTokensPerSec*float64(time.Second)))
}

// queue counts requests that have their memory and wait to be computed, and their
// tokens.
func (l *life) queue(requests, tokens int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queued += requests
	l.backlog += tokens
}

func (l *life) sleep(ctx context.Context, d time.Duration) error {
	return l.sleepReal(ctx, time.Duration(float64(d)/l.opts.Speed))
}

func (l *life) sleepReal(ctx context.Context, d time.Duration) error {
	if d < 10*time.Microsecond {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

const maxBodyBytes = 64 << 20

func readBody(r *http.Request, v any) error {
	b, err := io.ReadAll(io.LimitReader(r.Body, maxBodyBytes))
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// text makes one token of each byte; detokenize is the inverse.
func tokenize(s string) []uint32 {
	out := make([]uint32, len(s))
	for i := range len(s) {
		out[i] = uint32(s[i])
	}
	return out
}

func detokenize(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		if t < 256 {
			b.WriteByte(byte(t))
		} else {
			b.WriteRune('\uFFFD')
		}
	}
	return b.String()
}

// chatMessage is one message of a chat; its content is text or parts of text.
type chatMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

func (m chatMessage) text() (string, error) {
	var s string
	if len(m.Content) == 0 || json.Unmarshal(m.Content, &s) == nil {
		return s, nil
	}
	var parts []struct{ Text string }
	if err := json.Unmarshal(m.Content, &parts); err != nil {
		return "", errors.New("content must be text or parts of text")
	}
	for _, p := range parts {
		s += p.Text
	}
	return s, nil
}

// render is the ChatML template.
func render(messages []chatMessage) (string, error) {
	if len(messages) == 0 {
		return "", errors.New("messages must not be empty")
	}
	var b strings.Builder
	for _, m := range messages {
		text, err := m.text()
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "<|im_start|>%s\n%s<|im_end|>\n", m.Role, text)
	}
	return b.String() + "<|im_start|>assistant\n", nil
}

// promptTokens reads a prompt: text or token ids.
func promptTokens(raw json.RawMessage) ([]uint32, error) {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return tokenize(s), nil
	}
	var ids []uint32
	if err := json.Unmarshal(raw, &ids); err != nil {
		return nil, errors.New("prompt must be text or a list of token ids")
	}
	return ids, nil
}

// openAI is what the OpenAI routes of all kinds take.
type openAI struct {
	Model          string          `json:"model"`
	Prompt         json.RawMessage `json:"prompt"`
	PromptTokenIDs []uint32        `json:"prompt_token_ids"`
	Messages       []chatMessage   `json:"messages"`
	MaxTokens      int             `json:"max_tokens"`
	MaxCompletion  int             `json:"max_completion_tokens"`
	Stream         bool            `json:"stream"`
	StreamOptions  struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	CacheSalt string `json:"cache_salt"`
	ExtraKey  string `json:"extra_key"`
	IDSlot    *int   `json:"id_slot"`
	Reuse     *bool  `json:"cache_prompt"`
	Verbose   bool   `json:"verbose"`
	Tokens    bool   `json:"return_tokens"`
	Details   bool   `json:"return_cached_tokens_details"`
	NPredict  int    `json:"n_predict"`
}

func (l *life) query(b *openAI, chat bool) (*query, error) {
	q := &query{stream: b.Stream, usage: b.StreamOptions.IncludeUsage, chat: chat, pinned: -1, salt: b.CacheSalt}
	q.maxTokens = max(b.MaxTokens, b.MaxCompletion, b.NPredict)
	if q.maxTokens == 0 {
		q.maxTokens = l.opts.NaturalTokens
	}
	q.namespace = b.CacheSalt
	if b.ExtraKey != "" {
		q.namespace += "\x00" + b.ExtraKey
	}
	if b.IDSlot != nil {
		q.pinned = *b.IDSlot
	}
	q.noReuse = b.Reuse != nil && !*b.Reuse
	var err error
	switch {
	case chat:
		var text string
		if text, err = render(b.Messages); err == nil {
			q.prompt = tokenize(text)
		}
	case len(b.PromptTokenIDs) > 0:
		q.prompt = b.PromptTokenIDs
	default:
		q.prompt, err = promptTokens(b.Prompt)
	}
	if err == nil && len(q.prompt) == 0 {
		err = errors.New("prompt must not be empty")
	}
	return q, err
}
