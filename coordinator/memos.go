package coordinator

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	"waypost/coordinator/api"
	"waypost/coordinator/memo"
	"waypost/coordinator/placement"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of the text memo.
const (
	// memoBytes bounds what is kept of a pool, memoPools the number of pools.
	memoBytes = 32 << 20
	memoPools = 16
	// maxTaught bounds the placements that may still be taught, teachFor how
	// long, maxTaughtTokens the ids kept of them until the answer is reported.
	maxTaught       = 16_384
	teachFor        = 15 * time.Minute
	maxTaughtTokens = 4 << 20
	// tokensPerByte is the guess of a prompt's length before any was learnt, and
	// lengthRate the weight of the newest. Of one of less than lengthBytes, what
	// templates write around texts is too much to tell how long others are.
	tokensPerByte = 1. / bytesPerToken
	lengthRate    = 1. / 32
	lengthBytes   = 1 << 10
	// aroundTokens is what a template may write around a text.
	aroundTokens = 16 << 10
)

// memos keeps the text memo of each pool, and what is needed to teach it: the
// hashes of the texts that were placed. Text stays in memory for the call, and
// while it waits to be tokenised.
type memos struct {
	c   *Coordinator
	key memo.Key
	ask *tokenizing

	// copied says that a peer's memo was taken over.
	copied atomic.Bool

	mu     sync.Mutex
	pools  map[string]*poolMemo
	taught map[string]*taughtPrompt
	order  []*taughtPrompt
	tokens int // ids kept
}

// poolMemo is the memo of one pool.
type poolMemo struct {
	mu       sync.Mutex
	memo     *memo.Memo
	perByte  float64
	learnt   map[string]float64 // prompts by source
	byEngine float64            // moving share of placements taught with ids of the engine
}

// taughtPrompt is a placed text that ids may come for.
type taughtPrompt struct {
	placement string
	at        time.Time
	pool      *poolMemo
	name      string
	request   *memo.Request
	given     memo.Prediction

	worker string
	domain prefix.Domain // of its cache

	mu     sync.Mutex
	done   string // what its prompt was learnt from; empty: it was not
	closed bool   // nothing more is taught
	ids    []uint32
	// points are what an engine stored of it: chain values.
	points []prefix.Chain
}

// text is a prompt given as text, while it is placed.
type text struct {
	pool    *poolMemo
	name    string
	request *memo.Request
	given   memo.Prediction
	reader  memo.Reader
	// body is a chat's JSON; prompt the text of a completion.
	body   string
	prompt string
	// ordered is false if the order of keys was lost: then another prompt would be
	// rendered.
	ordered, chat bool
	special       bool // special tokens are added to a completion
	// learnt says that it was tokenised before the decision; worker is who was
	// chosen.
	learnt bool
	worker string
	// session says that the client names a session of its own, asked that the
	// worker's agent was asked to tell what is stored.
	session, asked bool
	// several says that several answers are asked for: usage tells the reuse of one
	// of them. afresh says that the prompt's log probabilities are: engines compute
	// all of it for them.
	several, afresh bool
	domain          prefix.Domain
}

func newMemos(c *Coordinator) *memos {
	m := &memos{c: c, key: memo.KeyOf(c.prefixKey), pools: map[string]*poolMemo{}, taught: map[string]*taughtPrompt{}}
	m.ask = newTokenizing(m)
	return m
}

// of returns the memo of a pool; nil: there are too many. A pool that has workers
// takes the place of one that has none any more.
func (m *memos) of(pool string) *poolMemo {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pools[pool]
	if p == nil && len(m.pools) >= memoPools && m.c.hasPool(pool) {
		for name := range m.pools {
			if !m.c.hasPool(name) {
				delete(m.pools, name)
				break
			}
		}
	}
	if p == nil && len(m.pools) < memoPools {
		// The bound is a constant that is never refused.
		mm, err := memo.New(memo.Options{MaxBytes: memoBytes})
		if err != nil {
			return nil
		}
		p = &poolMemo{memo: mm, perByte: tokensPerByte, learnt: map[string]float64{}}
		m.pools[pool] = p
	}
	return p
}

// all returns the pools by name.
func (m *memos) all() map[string]*poolMemo {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.pools)
}

// forget lets go of the text: what is kept of it are hashes.
func (t *text) forget() {
	t.body, t.prompt, t.request, t.pool, t.several, t.afresh = "", "", nil, nil, false, false
}

// readText takes the text of an input in; ok is false if it is none.
func (t *text) readText(in *waypostv1.Input) (ok bool, err error) {
	t.body, t.prompt, t.ordered, t.chat, t.special, t.session = "", "", true, false, true, false
	switch {
	case in.GetBodyJson() != "":
		return true, t.readBody(in.GetBodyJson())
	case in.Prompt != nil:
		if t.prompt = in.GetPrompt(); t.prompt == "" {
			return true, api.BadField("input.prompt", "the prompt is empty")
		}
		return true, nil
	case len(in.GetMessages()) > 0:
		t.chat, t.ordered = true, len(in.GetTools()) == 0
		var b strings.Builder
		b.WriteString(`{"messages":`)
		if err := list(&b, in.GetMessages()); err != nil {
			return true, api.BadField("input.messages", err.Error())
		}
		if len(in.GetTools()) > 0 {
			b.WriteString(`,"tools":`)
			if err := list(&b, in.GetTools()); err != nil {
				return true, api.BadField("input.tools", err.Error())
			}
		}
		b.WriteByte('}')
		t.body = b.String()
		return true, nil
	}
	return false, nil
}

func list(b *strings.Builder, of []*structpb.Struct) error {
	b.WriteByte('[')
	for i, s := range of {
		if i > 0 {
			b.WriteByte(',')
		}
		j, err := protojson.Marshal(s)
		if err != nil {
			return fmt.Errorf("[%d]: not a JSON object", i)
		}
		b.Write(j)
	}
	b.WriteByte(']')
	return nil
}

// readBody tells a chat from a completion.
func (t *text) readBody(body string) error {
	var top struct {
		Messages json.RawMessage `json:"messages"`
		Prompt   json.RawMessage `json:"prompt"`
		Special  *bool           `json:"add_special_tokens"`
		Session  json.RawMessage `json:"session_id"`
		Answers  json.RawMessage `json:"n"`
		Logprobs json.RawMessage `json:"prompt_logprobs"`
	}
	if err := json.Unmarshal([]byte(body), &top); err != nil {
		return api.BadField("input.body_json", "not the JSON body of a request")
	}
	t.body, t.chat, t.session = body, top.Messages != nil, top.Session != nil
	if top.Special != nil {
		t.special = *top.Special
	}
	answers, err := strconv.ParseFloat(string(top.Answers), 64)
	t.several = err == nil && answers > 1
	t.afresh = len(top.Logprobs) > 0 && string(top.Logprobs) != "null"
	switch {
	case t.chat && top.Prompt != nil:
		return api.BadField("input.body_json", "it has messages and a prompt; give one of them")
	case t.chat:
	case top.Prompt == nil:
		return api.BadField("input.body_json", "it has neither messages nor a prompt")
	case json.Unmarshal(top.Prompt, &t.prompt) != nil:
		return api.BadField("input.body_json", "its prompt is not a text; give token ids as token_ids, and place several prompts one by one")
	case t.prompt == "":
		return api.BadField("input.body_json", "the prompt is empty")
	}
	return nil
}

// look asks the memo of a pool for the first tokens of a text.
func (m *memos) look(w *work, pool string, keyer *prefix.Keyer) error {
	t, p := &w.text, &w.prompt
	t.name, t.request = pool, nil
	t.pool = m.of(pool)
	if t.pool == nil {
		p.tokens, p.estimated = max(1, (len(t.body)+len(t.prompt))/bytesPerToken), true
		return nil
	}
	t.pool.mu.Lock()
	defer t.pool.mu.Unlock()
	if err := t.read(m.key, t.pool.memo.Epoch()); err != nil {
		return err
	}
	hit := t.pool.memo.Lookup(t.request, &t.given)
	guess := max(1, int(float64(t.request.TextBytes())*t.pool.perByte))
	if !hit {
		p.tokens, p.estimated = guess, true
	} else {
		p.ofMemo(&t.given, guess, keyer)
	}
	if p.tokens > placement.MaxPromptTokens {
		return api.BadField("input", fmt.Sprintf("about %d tokens are more than %d", p.tokens, placement.MaxPromptTokens))
	}
	return nil
}

func (t *text) read(key memo.Key, epoch uint32) (err error) {
	if t.chat {
		t.request, err = t.reader.Chat(key, t.name, epoch, []byte(t.body))
	} else {
		var body []byte
		if t.body != "" {
			body = []byte(t.body)
		}
		t.request, err = t.reader.Completion(key, t.name, epoch, body, t.prompt)
	}
	if err != nil {
		return api.BadField("input", err.Error())
	}
	return nil
}

// ofMemo makes the prompt of what the memo knows of it.
func (p *prompt) ofMemo(given *memo.Prediction, guess int, keyer *prefix.Keyer) {
	p.tokens, p.sure, p.estimated, p.source, p.keyed = max(guess, given.Tokens+1), given.Tokens, true, "memo", true
	p.probe.ResetChains(max(p.tokens, given.Depth()), given.Chains, given.Points, keyer)
}

// remember keeps what is needed to teach the memo when ids come for a
// placement, and has the engine asked if they may not.
func (m *memos) remember(w *work, placement string, now time.Time) {
	t := &w.text
	if t.request == nil {
		return
	}
	tp := &taughtPrompt{placement: placement, at: now, pool: t.pool, name: t.name, request: t.request, given: t.given, worker: t.worker, domain: t.domain}
	if t.learnt {
		q := t.question()
		tp.done = q.source()
	}
	tp.given.Chains, tp.given.Points = slices.Clone(t.given.Chains), slices.Clone(t.given.Points)
	m.mu.Lock()
	m.taught[placement] = tp
	m.order = append(m.order, tp)
	for len(m.order) > 0 {
		oldest := m.order[0]
		_, open := m.taught[oldest.placement]
		if open && len(m.taught) <= maxTaught && len(m.order) <= 4*maxTaught && now.Sub(oldest.at) <= teachFor {
			break
		}
		m.forgetLocked(oldest)
		m.order[0] = nil
		m.order = m.order[1:]
	}
	m.mu.Unlock()
	m.ask.later(tp, t, now)
}

func (m *memos) forgetLocked(tp *taughtPrompt) {
	if m.taught[tp.placement] == tp {
		delete(m.taught, tp.placement)
	}
	tp.mu.Lock()
	m.tokens -= len(tp.ids) + len(tp.points)*idsPerPoint
	tp.ids, tp.points, tp.closed = nil, nil, true
	tp.mu.Unlock()
}

// Sources of ids, the most trusted first.
const (
	fromEngine   = "engine"
	fromRender   = "render"
	fromEvents   = "events"
	fromTokenize = "tokenize"
)

// learn teaches the memo a placement's prompt. It reports false with the reason
// if it cannot be learnt.
func (m *memos) learn(tp *taughtPrompt, ids []uint32, source string) (bool, string) {
	switch {
	case len(ids) == 0:
		return false, "no prompt token ids"
	case tooMany(tp.request, len(ids)):
		return false, fmt.Sprintf("%d prompt token ids cannot be of a text of %d bytes", len(ids), tp.request.TextBytes())
	}
	return m.learnFrom(tp, source, len(ids), func(mm *memo.Memo) memo.Learnt { return mm.Learn(tp.request, ids, &tp.given) })
}

// tooMany says that a text cannot become so many tokens: none is of less than a
// byte. Who tells of more must not make the prompts that begin so too long for
// every worker.
func tooMany(r *memo.Request, tokens int) bool {
	return !r.Opaque() && tokens > r.TextBytes()+aroundTokens
}

// learnFrom teaches the memo a prompt of so many tokens.
func (m *memos) learnFrom(tp *taughtPrompt, source string, tokens int, learn func(*memo.Memo) memo.Learnt) (bool, string) {
	tp.mu.Lock()
	if tp.done != "" || tp.closed {
		tp.mu.Unlock()
		return false, "the prompt was learnt before"
	}
	tp.done = source
	tp.mu.Unlock()
	p := tp.pool
	p.mu.Lock()
	got := learn(p.memo)
	p.learnt[source]++
	if n := tp.request.TextBytes(); n >= lengthBytes && tokens <= n && !tp.request.Opaque() {
		p.perByte += lengthRate * (float64(tokens)/float64(n) - p.perByte)
	}
	open, share, _ := p.memo.Breaker()
	entries, epoch := p.memo.Share(m.key, maxSharedBytes, true), p.memo.Epoch()
	p.mu.Unlock()
	m.c.exchange.TellMemo(tp.name, epoch, entries)
	m.c.metrics.memoLearnt.WithLabelValues(tp.name, source).Inc()
	switch {
	case got.BreakerChanged && open:
		m.c.log.Warn("text memo switched off", "event", "view_disagrees", "pool", tp.name, "wrong_share", fmt.Sprintf("%.2f", share), "action", "texts of the pool are placed without prefix credit; learning goes on")
	case got.BreakerChanged:
		m.c.log.Info("text memo switched on again", "event", "view_resync", "pool", tp.name)
	case got.NewEpoch:
		m.c.log.Warn("text memo begins anew: prompts differ near their start", "event", "view_resync", "pool", tp.name, "epoch", epoch, "cause", "chat template or date changed")
	}
	return true, ""
}

// teach takes what an engine returned for a placement.
func (m *memos) teach(placement string, prompt, output []uint32, message string) (bool, string) {
	m.mu.Lock()
	tp := m.taught[placement]
	m.mu.Unlock()
	if tp == nil {
		return false, "no text is remembered of this placement: it was given as tokens or keys, was not reserved, or is too old"
	}
	learnt, reason := false, ""
	if len(prompt) > 0 {
		if learnt, reason = m.learn(tp, prompt, fromEngine); learnt || tp.upgrade() {
			tp.pool.taughtBy(true)
			m.extend(tp, prompt)
		}
		m.keep(tp, prompt)
	}
	if len(output) == 0 || message == "" {
		return learnt, reason
	}
	tp.mu.Lock()
	ids := tp.ids
	tp.mu.Unlock()
	if ids == nil {
		return learnt, "the prompt token ids are not known any more; send them with the output's"
	}
	tp.pool.mu.Lock()
	err := tp.pool.memo.Answer(tp.request, slices.Concat(ids, output), []byte(message))
	tp.pool.mu.Unlock()
	if err != nil {
		return learnt, "message_json: " + err.Error()
	}
	m.mu.Lock()
	m.forgetLocked(tp)
	m.mu.Unlock()
	return true, ""
}

// extend predicts of a placement's worker what it will hold of the prompt, now
// that its ids are known: a request that follows at once is sent there. An agent
// that follows the worker's cache by its claims is told the whole prompt.
func (m *memos) extend(tp *taughtPrompt, ids []uint32) {
	claim, open := m.c.fleet.Open(tp.placement)
	if !open || claim.Decode != nil {
		return
	}
	w, err := m.c.fleet.Worker(time.Now(), tp.worker)
	if err != nil {
		return // it is gone, and so is what it holds
	}
	keyer := m.c.keyers.of(tp.domain)
	var p prompt
	if err := p.ofTokens("prompt_token_ids", ids, keyer); err != nil {
		return // it is longer than prompts are
	}
	p.probe.ResetTokens(ids, keyer)
	if m.c.fleet.Followed(w.ID) {
		m.c.fleet.Learn(tp.placement, len(ids), p.claimPoints())
		m.c.wakeShipping()
		return
	}
	held := min(claim.ReusedTokens(), len(ids))
	keys, depths := p.newPart(held, w.Facts.BlockTokens, nil, nil)
	m.c.fleet.Extend(tp.placement, uint64(p.after(held)), keys, depths)
}

// follow has the agent that follows a placement's worker told of the prompt before
// it is told of its end, after which nothing is added.
func (m *memos) follow(placement string, ids []uint32) {
	m.mu.Lock()
	tp := m.taught[placement]
	m.mu.Unlock()
	if tp == nil || len(ids) == 0 {
		return
	}
	if w, err := m.c.fleet.Worker(time.Now(), tp.worker); err == nil && m.c.fleet.Followed(w.ID) {
		m.extend(tp, ids)
	}
}

// keep holds a prompt's ids until its answer comes.
func (m *memos) keep(tp *taughtPrompt, ids []uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tokens+len(ids) > maxTaughtTokens || m.taught[tp.placement] != tp {
		return
	}
	tp.mu.Lock()
	defer tp.mu.Unlock()
	if tp.ids == nil {
		tp.ids = slices.Clone(ids)
		m.tokens += len(ids)
	}
}

// ended says that nothing more comes for a placement, and how long its prompt
// was; -1: that was not told.
func (m *memos) ended(placement string, promptTokens int) {
	m.mu.Lock()
	tp := m.taught[placement]
	m.mu.Unlock()
	if tp == nil {
		return
	}
	m.learnStored(tp, promptTokens)
	m.mu.Lock()
	defer m.mu.Unlock()
	tp.mu.Lock()
	held := tp.ids != nil || tp.points != nil
	tp.mu.Unlock()
	if held {
		m.forgetLocked(tp)
	}
}

// taughtBy notes whether a placement was taught by the engine's ids.
func (p *poolMemo) taughtBy(engine bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	x := 0.
	if engine {
		x = 1
	}
	p.byEngine += (x - p.byEngine) / 16
}

// state says whether the memo of a pool is used, in words.
func (p *poolMemo) state() string {
	open, share, _ := p.memo.Breaker()
	if !open {
		return "on"
	}
	return fmt.Sprintf("off: %.0f%% of its latest predictions were wrong, as with chat templates that move text", 100*share)
}

// reuse tells how texts found their tokens; nil: none came.
func (p *poolMemo) reuse() *waypostv1.MemoReuse {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.memo.Stats()
	if s.Lookups == 0 {
		return nil
	}
	_, _, opened := p.memo.Breaker()
	state := p.state()
	f := func(n uint64) *float64 { v := float64(n); return &v }
	bytes := float64(p.memo.Bytes())
	return &waypostv1.MemoReuse{
		State: &state, Lookups: f(s.Lookups), Hits: f(s.Hits), Learnt: maps.Clone(p.learnt), PromptTokens: f(s.PromptTokens), KnownTokens: f(s.KnownTokens),
		CoveredTokens: f(s.CoveredTokens), OverTokens: f(s.OverTokens), Bytes: &bytes, Opened: f(opened), Epochs: f(s.Epochs),
	}
}
