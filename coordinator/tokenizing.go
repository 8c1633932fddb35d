package coordinator

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of asking engines for token ids.
const (
	// tokenizeAbove is the size of the unknown part, in estimated tokens, above
	// which an engine is asked at all; firstPrompt that above which it is asked
	// before the decision, if nothing is known of the prompt.
	tokenizeAbove = 512
	firstPrompt   = 1024
	// tokenizeBudget is the time for that unless the request says another, and
	// msPerTokens what 1,000 tokens cost an engine's API server: who cannot make
	// it in time is not asked.
	tokenizeBudget   = 30 * time.Millisecond
	msPer1000Tokens  = 1.7
	tokenizeBaseMs   = 2.
	tokenizeWithin   = 5 * time.Second
	tokenizeAtOnce   = 8
	maxTextsWaiting  = 256
	maxBytesWaiting  = 16 << 20
	byEngineLearning = .1
	// teachWait is how long better sources are waited for: the ids of a pool's
	// engines, and events of what is stored.
	teachWait = 2 * time.Second
)

// tokenizing asks engines, through the agents of their hosts, what tokens a text
// becomes.
type tokenizing struct {
	m    *memos
	asks agentAsks[*waypostv1.TokenizeReply]

	mu      sync.Mutex
	waiting []waitingText
	bytes   int
	wake    chan struct{}
	room    chan struct{}
	turn    int
}

// waitingText is a text that waits to be tokenised.
type waitingText struct {
	tp     *taughtPrompt
	worker string
	at     time.Time
	ask    question
}

// question is a text as an engine is asked about it.
type question struct {
	chat    bool
	text    string // a chat's body, or a completion's prompt
	special bool
}

func newTokenizing(m *memos) *tokenizing {
	return &tokenizing{m: m, wake: make(chan struct{}, 1), room: make(chan struct{}, tokenizeAtOnce)}
}

func (t *text) question() question {
	if t.chat {
		return question{chat: true, text: t.body}
	}
	return question{text: t.prompt, special: t.special}
}

func (q *question) source() string {
	if q.chat {
		return fromRender
	}
	return fromTokenize
}

// first asks an engine about a long prompt of which nothing is known, within the
// request's budget, before it is placed. What comes too late is not waited for.
func (a *tokenizing) first(w *work, req *waypostv1.PlaceRequest, keyer *prefix.Keyer) {
	t, p := &w.text, &w.prompt
	budget := tokenizeBudget
	if req.TokenizeBudgetMs != nil {
		budget = time.Duration(req.GetTokenizeBudgetMs() * float64(time.Millisecond))
	}
	if budget <= 0 || p.keyed || t.request == nil || !t.ordered || t.request.Opaque() || p.tokens < firstPrompt {
		return
	}
	if float64(p.tokens)/1000*msPer1000Tokens+tokenizeBaseMs > ms(budget) {
		return
	}
	select {
	case a.room <- struct{}{}:
	default:
		return
	}
	defer func() { <-a.room }()
	ctx, cancel := context.WithTimeout(a.m.c.ctx, budget)
	defer cancel()
	q := t.question()
	ids := a.one(ctx, a.anyWorker(t.name), &q)
	if len(ids) == 0 || tooMany(t.request, len(ids)) || p.ofTokens("input", ids, keyer) != nil {
		return
	}
	w.tokens = append(w.tokens[:0], ids...)
	p.probe.ResetTokens(w.tokens, keyer)
	p.source, p.estimated = "render", false
	a.m.learn(&taughtPrompt{pool: t.pool, name: t.name, request: t.request, given: t.given}, ids, q.source())
	t.learnt = true
}

// anyWorker is a worker of a pool whose host has a lane, another one each time;
// empty: there is none. One that turns text into other tokens than its pool is
// not asked.
func (a *tokenizing) anyWorker(pool string) string {
	a.mu.Lock()
	a.turn = (a.turn + 1) % math.MaxInt32
	turn := a.turn
	a.mu.Unlock()
	c := a.m.c
	for tried, of := 0, 1; tried < of; tried++ {
		name, host, ready, members := c.fleet.Member(pool, turn+tried)
		of = members
		if ready && c.boundaries.credited(name) && c.lanes.session(host) != nil {
			return name
		}
	}
	return ""
}

// later has a text tokenised in the background if much of it is unknown. Where
// engines' ids are taught, or events come, these are waited for first.
func (a *tokenizing) later(tp *taughtPrompt, t *text, now time.Time) {
	if t.learnt || !t.ordered || tp.request.Opaque() || tp.given.BehindTokens <= tokenizeAbove {
		return
	}
	tp.pool.mu.Lock()
	taught := tp.pool.byEngine >= byEngineLearning
	tp.pool.mu.Unlock()
	if taught || t.asked {
		now = now.Add(teachWait)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	q := t.question()
	if len(a.waiting) >= maxTextsWaiting || a.bytes+len(q.text) > maxBytesWaiting {
		a.m.c.metrics.memoUnasked.Inc()
		return
	}
	a.bytes += len(q.text)
	a.waiting = append(a.waiting, waitingText{tp: tp, at: now, ask: q, worker: t.worker})
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// run asks for what waits, until the coordinator ends.
func (a *tokenizing) run() {
	var group sync.WaitGroup
	defer group.Wait()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		next, wait := a.next(time.Now())
		if next == nil {
			timer.Reset(wait)
			select {
			case <-a.m.c.ctx.Done():
				return
			case <-a.wake:
			case <-timer.C:
			}
			continue
		}
		if a.m.learnStored(next.tp, -1); next.tp.over() {
			continue
		}
		select {
		case <-a.m.c.ctx.Done():
			return
		case a.room <- struct{}{}:
			group.Go(func() {
				defer func() { <-a.room }()
				ctx, cancel := context.WithTimeout(a.m.c.ctx, tokenizeWithin)
				defer cancel()
				if !a.m.c.boundaries.credited(next.worker) {
					next.worker = a.anyWorker(next.tp.name)
				}
				if ids := a.one(ctx, next.worker, &next.ask); len(ids) > 0 && !tooMany(next.tp.request, len(ids)) {
					a.m.learn(next.tp, ids, next.ask.source())
					a.m.extend(next.tp, ids)
					next.tp.pool.taughtBy(false)
				}
			})
		}
	}
}

// next takes the first text that is due, or says how long to wait.
func (a *tokenizing) next(now time.Time) (*waitingText, time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	wait := time.Hour
	for i := range a.waiting {
		if d := a.waiting[i].at.Sub(now); d > 0 {
			wait = min(wait, d)
			continue
		}
		next := a.waiting[i]
		a.bytes -= len(next.ask.text)
		a.waiting = slices.Delete(a.waiting, i, i+1) // which clears the text behind
		return &next, 0
	}
	return nil, wait
}

// one asks one worker's engine; nil: no answer.
func (a *tokenizing) one(ctx context.Context, worker string, q *question) []uint32 {
	host, index, ok := a.m.c.lanes.where(worker)
	if !ok {
		return nil
	}
	id, answer, done := a.asks.begin(host)
	defer done()
	f := &waypostv1.ConnectResponse{}
	if q.chat {
		f.Frame = &waypostv1.ConnectResponse_Render{Render: &waypostv1.RenderAsk{AskId: &id, Index: &index, ChatJson: &q.text}}
	} else {
		f.Frame = &waypostv1.ConnectResponse_Tokenize{Tokenize: &waypostv1.TokenizeAsk{AskId: &id, Index: &index, Prompt: &q.text, AddSpecialTokens: proto.Bool(q.special)}}
	}
	if !a.m.c.lanes.send(host, f) {
		return nil
	}
	select {
	case reply := <-answer:
		if e := reply.GetError(); e != "" {
			a.m.c.metrics.memoRefused.Inc()
		}
		return reply.GetTokenIds()
	case <-ctx.Done():
		return nil
	}
}
