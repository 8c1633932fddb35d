package vllm

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/engines"
)

// The phases of the run.
const (
	phaseLate     = "agent came late"
	phaseAlone    = "one at a time"
	phaseSalt     = "salts"
	phaseAdapter  = "LoRA adapter"
	phaseEight    = "eight at once"
	phaseReset    = "after a reset"
	phaseAgent    = "after the agent's kill -9"
	phaseEngine   = "after the engine's kill -9"
	phaseFrontEnd = "after the API server's kill -9"
)

// keptMs is how much newer than a request's end a view must be to replace what
// was predicted of it.
const keptMs = 100

// longest is the prompt from which on a chat is given up for another, tokens.
const longest = 2800

// render is the token ids that the server makes of a chat.
func (r *rig) render(c *engines.Chat) []uint32 {
	r.t.Helper()
	var ids struct{ Tokens []uint32 }
	r.post("/tokenize", map[string]any{"model": model, "messages": c.Messages}, &ids)
	return ids.Tokens
}

// begin begins some chats.
func (r *rig) begin(n int) []*engines.Chat {
	chats := make([]*engines.Chat, n)
	for i := range chats {
		chats[i] = r.writer.Begin(80 + r.writer.Rand().IntN(270))
	}
	return chats
}

// next makes the question after an answer, or another chat when one is long.
func (r *rig) next(c *engines.Chat) *engines.Chat {
	if len(r.render(c)) > longest {
		return r.begin(1)[0]
	}
	last := c.Messages[len(c.Messages)-1]
	c.Messages = c.Messages[:len(c.Messages)-1]
	r.writer.Continue(c, last.Content, 20+r.writer.Rand().IntN(60))
	return c
}

// request is the next turn of a chat: as a chat, or as token ids, streamed or
// not.
func (r *rig) request(c *engines.Chat, adapterName, salt string) *engines.Request {
	n := r.n.Add(1)
	q := &engines.Request{ID: fmt.Sprintf("r-%d", n), Tokens: r.render(c), Adapter: adapterName, Salt: salt, Output: 12, Stream: n%2 == 1}
	q.Body = map[string]any{"model": model, "max_tokens": q.Output, "temperature": 0, "ignore_eos": true}
	if adapterName != "" {
		q.Body["model"] = adapterName
	}
	if salt != "" {
		q.Body["cache_salt"] = salt
	}
	if n%3 == 2 {
		q.Path, q.Body["prompt"] = "/v1/completions", q.Tokens
	} else {
		q.Path, q.Body["messages"] = "/v1/chat/completions", c.Messages
	}
	return q
}

// serve places, sends and reports the next turn of a chat. excuse is the kind of
// a difference that this request may have.
func (r *rig) serve(phase string, c *engines.Chat, q *engines.Request, excuse string) engines.Result {
	p, err := r.Place(r.t.Context(), q)
	if err != nil {
		r.t.Errorf("%s: place: %v", q.ID, err)
		return engines.Result{}
	}
	block, removed := r.mirror.match(q.Tokens, q.Adapter, q.Salt)
	span := r.overlaps.begin(q)
	a, sent := r.Send(r.t.Context(), p, q)
	others := r.overlaps.end(span)
	_, removedSince := r.mirror.match(nil, "", "")
	class, err := r.Report(r.t.Context(), p, &a, sent)
	if sent != nil || err != nil {
		r.t.Errorf("%s: %v, %v", q.ID, sent, err)
		return engines.Result{}
	}
	if a.Prompt != len(q.Tokens) || a.Cached < 0 {
		r.t.Errorf("%s: the server saw %d prompt tokens and reused %d, placed were %d", q.ID, a.Prompt, a.Cached, len(q.Tokens))
	}
	res := engines.Result{Phase: phase, Prompt: a.Prompt, Expected: -1, Actual: a.Cached, Class: class}
	if e := p.GetExpected(); e.ReuseTokens != nil {
		res.Expected = int(e.GetReuseTokens())
	}
	r.placed.Add(res)
	kind := kindOther
	switch {
	case block == a.Cached:
		kind = kindNone
	case excuse != "":
		kind = excuse
	case block < a.Cached && sharing(q, others) >= a.Cached:
		kind = kindInFlight
	case block > a.Cached && removedSince > removed:
		kind = kindEvicted
	}
	r.blocks.Add(engines.Result{Phase: phase, Prompt: a.Prompt, Expected: block, Actual: a.Cached, Class: kind})
	if kind != kindNone || res.Expected > res.Actual {
		r.t.Logf("%s, %s: prompt %d, expected %d, block table %d, reused %d: %s, %s", phase, q.ID, res.Prompt, res.Expected, block, res.Actual, kind, class)
	}
	c.Messages = append(c.Messages, engines.Message{Role: "assistant", Content: a.Text})
	return res
}

// expects is the reuse that would be expected of a request now, and how old the
// view is that this rests on, in ms; -1: unknown.
func (r *rig) expects(q *engines.Request) (reuse int, viewAgeMs float64) {
	resp, err := r.Client.Placement.Place(r.t.Context(), &waypostv1.PlaceRequest{
		Input: &waypostv1.Input{TokenIds: q.Tokens}, Adapter: &q.Adapter, CacheSalt: &q.Salt, Reserve: proto.Bool(false),
	})
	if err != nil || resp.GetPlacement().GetExpected() == nil || resp.GetPlacement().GetExpected().ReuseTokens == nil {
		return -1, -1
	}
	return int(resp.GetPlacement().GetExpected().GetReuseTokens()), resp.GetPlacement().GetBasis().GetCacheViewAgeMs()
}

// settle waits until views have caught up with the latest request: what it left
// is expected, by a view that is newer than its end. Where it did not fit, that
// never comes, so this gives up.
func (r *rig) settle(q *engines.Request) {
	want := (len(q.Tokens) - 1) / blockTokens * blockTokens
	end := time.Now()
	for range 300 {
		block, _ := r.mirror.match(q.Tokens, q.Adapter, q.Salt)
		reuse, viewAgeMs := r.expects(q)
		if block >= want && reuse >= want && viewAgeMs >= 0 && viewAgeMs+keptMs < float64(time.Since(end).Milliseconds()) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// alone sends the next turn of a chat and lets views catch up.
func (r *rig) alone(phase string, c *engines.Chat, adapterName, salt, excuse string) (*engines.Chat, engines.Result) {
	q := r.request(c, adapterName, salt)
	res := r.serve(phase, c, q, excuse)
	r.settle(q)
	return r.next(c), res
}

// some sends so many requests of a set of chats, one at a time. Some chats are
// livelier than others.
func (r *rig) some(phase string, chats []*engines.Chat, requests int) (results []engines.Result) {
	for range requests {
		at := r.writer.Rand().IntN(1 + r.writer.Rand().IntN(len(chats)))
		c, res := r.alone(phase, chats[at], "", "", "")
		chats[at], results = c, append(results, res)
	}
	return results
}

// noStaleCredit wants nothing expected in vain after the first report of a new
// life, and returns the tokens that were before it.
func (r *rig) noStaleCredit(phase string, results []engines.Result) int {
	for i, res := range results {
		if i > 0 && res.Expected > res.Actual {
			r.t.Errorf("%s: request %d: %d tokens expected, %d reused, after a report said what is true", phase, i, res.Expected, res.Actual)
		}
	}
	return max(0, results[0].Expected-results[0].Actual)
}

func TestReuse(t *testing.T) {
	r := prepare(t)
	r.late()
	chats := r.begin(14)
	r.steady(chats)
	r.salts()
	r.adapters()
	r.eight()
	r.reset(chats)
	r.agentDies(chats)
	r.engineDies(chats)
	r.frontEndDies(chats)
	r.judge()
}

// late lets the agent come after some requests: the replay tells it of them.
func (r *rig) late() {
	chats := r.begin(5)
	for _, c := range chats {
		var out struct {
			Choices []struct{ Message engines.Message }
		}
		r.post("/v1/chat/completions", map[string]any{"model": model, "messages": c.Messages, "max_tokens": 4, "ignore_eos": true}, &out)
		c.Messages = append(c.Messages, engines.Message{Role: "assistant", Content: out.Choices[0].Message.Content})
	}
	r.startAgent()
	reused := 0
	for _, c := range chats {
		_, res := r.alone(phaseLate, r.next(c), "", "", "")
		reused += res.Expected
	}
	if reused <= 0 {
		r.t.Error("nothing is expected of what was there before the agent")
	}
}

// steady is the long phase, with what the agent costs.
func (r *rig) steady(chats []*engines.Chat) {
	t := r.t
	before, err := r.agent.Used()
	if err != nil {
		t.Fatal(err)
	}
	load, facts := r.asked()
	stores, removals := r.mirror.counts()
	begin := time.Now()
	r.some(phaseAlone, chats, 150)
	seconds := time.Since(begin).Seconds()
	after, err := r.agent.Used()
	if err != nil {
		t.Fatal(err)
	}
	loadNow, factsNow := r.asked()
	storesNow, removalsNow := r.mirror.counts()
	load, facts, stores, removals = loadNow-load, factsNow-facts, storesNow-stores, removalsNow-removals
	t.Logf("agent: %.2f %% of a core for one worker at %.1f blocks/s stored and %.1f evicted; resident %d MB, at most %d MB",
		100*(after.CPU-before.CPU).Seconds()/seconds, float64(stores)/seconds, float64(removals)/seconds, after.RSSBytes>>20, after.MostRSSBytes>>20)
	t.Logf("asked of the engine in %.1f s: load %d times, %.2f/s; facts and health %d times, %.2f/s", seconds, load, float64(load)/seconds, facts, float64(facts)/seconds)
	// One more may fall into the window at its beginning.
	if load == 0 || float64(load-1) > 4*seconds {
		t.Errorf("load was asked %d times in %.1f s, want at most 4/s", load, seconds)
	}
	if facts == 0 || float64(facts-6) > seconds {
		t.Errorf("facts were asked %d times in %.1f s, want at most 1/s", facts, seconds)
	}
	if after.MostRSSBytes > 60<<20 {
		t.Errorf("the agent took %d bytes", after.MostRSSBytes)
	}
	if removals == 0 {
		t.Error("nothing was evicted: the test proves little")
	}
}

// salts sends the same chats under salts and none.
func (r *rig) salts() {
	for range 3 {
		c := r.begin(1)[0]
		for i, salt := range []string{"tenant-a", "tenant-b", "", "tenant-a", ""} {
			same := &engines.Chat{Messages: slices.Clone(c.Messages)}
			_, res := r.alone(phaseSalt, same, "", salt, "")
			if i >= 3 && res.Actual == 0 || i < 2 && res.Actual > 600 {
				r.t.Errorf("%d tokens reused under salt %q, try %d", res.Actual, salt, i)
			}
		}
	}
}

// adapters sends the same chats to the model and to its adapter, with and
// without a salt.
func (r *rig) adapters() {
	for range 3 {
		c := r.begin(1)[0]
		for i, as := range []struct{ adapter, salt string }{{"", ""}, {adapter, ""}, {adapter, ""}, {"", ""}, {adapter, "tenant-a"}, {adapter, "tenant-a"}} {
			same := &engines.Chat{Messages: slices.Clone(c.Messages)}
			_, res := r.alone(phaseAdapter, same, as.adapter, as.salt, "")
			if again := i == 2 || i == 3 || i == 5; again && res.Actual == 0 {
				r.t.Errorf("nothing reused by adapter %q and salt %q, try %d", as.adapter, as.salt, i)
			}
		}
	}
}

// eight lets eight callers send chats of their own at the same time, with system
// prompts that all share.
func (r *rig) eight() {
	var callers sync.WaitGroup
	for k := range 8 {
		own := *r
		own.writer = r.writer.Fork(uint64(k))
		callers.Go(func() {
			chats := own.begin(2)
			for i := range 9 {
				c := chats[i%2]
				own.serve(phaseEight, c, own.request(c, "", ""), "")
				chats[i%2] = own.next(c)
			}
		})
	}
	callers.Wait()
}

// reset empties the engine's cache, which the engine tells with its next step.
func (r *rig) reset(chats []*engines.Chat) {
	r.post("/reset_prefix_cache", map[string]any{}, nil)
	var results []engines.Result
	for i := range 12 {
		excuse := ""
		if i == 0 {
			excuse = kindReset
		}
		c, res := r.alone(phaseReset, chats[i], "", "", excuse)
		chats[i], results = c, append(results, res)
	}
	if results[0].Actual != 0 {
		r.t.Errorf("%d tokens reused right after a reset", results[0].Actual)
	}
	r.t.Logf("reset: %d tokens were expected in vain before the first report", r.noStaleCredit(phaseReset, results))
}

// agentDies kills the agent and starts it again: the engine's replay tells it
// all.
func (r *rig) agentDies(chats []*engines.Chat) {
	if err := r.agent.Kill(); err != nil {
		r.t.Fatal(err)
	}
	r.waitBlind()
	r.startAgent()
	r.some(phaseAgent, chats, 25)
}

// engineDies kills the process of the engine, which ends its API server too, and
// starts both again.
func (r *rig) engineDies(chats []*engines.Chat) {
	former, pid := r.worker().GetIncarnation(), r.server.PID()
	if len(r.server.Children()) == 0 {
		r.t.Fatal("the engine has no process of its own")
	}
	if err := r.server.KillChildren(); err != nil {
		r.t.Fatal(err)
	}
	r.waitDown()
	r.killServer(pid)
	r.again(phaseEngine, chats, former)
}

// frontEndDies kills the API server alone: the engine lives on, publishes and
// answers replays, but nobody can use it.
func (r *rig) frontEndDies(chats []*engines.Chat) {
	former, pid := r.worker().GetIncarnation(), r.server.PID()
	if err := r.server.KillAlone(); err != nil {
		r.t.Fatal(err)
	}
	r.waitDown()
	if len(r.server.Children()) == 0 {
		r.t.Error("the engine ended with its API server: this tests nothing")
	}
	q := &engines.Request{ID: "orphan", Tokens: make([]uint32, 100)}
	if p, err := r.Place(r.t.Context(), q); err == nil {
		r.t.Errorf("an engine without API server is given a request: %v", p)
	}
	r.killServer(pid)
	r.again(phaseFrontEnd, chats, former)
}

// again starts the server again and sends requests to its new life.
func (r *rig) again(phase string, chats []*engines.Chat, former string) {
	t := r.t
	r.startServer()
	live := r.liveAt(t.Context(), former)
	r.waitLife(former)
	var results []engines.Result
	for i := range 12 {
		c, res := r.alone(phase, chats[i], "", "", "")
		chats[i], results = c, append(results, res)
	}
	results = append(results, r.some(phase, chats, 13)...)
	if results[0].Expected > 0 {
		t.Errorf("%s: %d tokens are expected of a cache that ended with its process", phase, results[0].Expected)
	}
	r.noStaleCredit(phase, results)
	select {
	case at := <-live:
		t.Logf("%s: full coverage %.2f s after the first event of the new life", phase, at.Sub(r.mirror.began()).Seconds())
	case <-time.After(patience):
		t.Fatalf("%s: no live view: %v", phase, r.worker())
	}
	found := 0
	for _, res := range results[1:] {
		found += max(0, res.Expected)
	}
	if found == 0 {
		t.Errorf("%s: nothing of the new life is expected", phase)
	}
}

// judge prints the tables and holds them to the figures.
func (r *rig) judge() {
	t := r.t
	var b strings.Builder
	b.WriteString("block table\n")
	r.blocks.Print(&b)
	b.WriteString("placements\n")
	r.placed.Print(&b)
	t.Logf("vLLM\n%s", b.String())

	all := r.placed.Row("")
	if all.Requests < 300 {
		t.Errorf("%d requests, want at least 300", all.Requests)
	}
	if all.Actual < all.Prompt/3 {
		t.Errorf("only %d of %d tokens were reused: the test proves little", all.Actual, all.Prompt)
	}
	single, eight := r.blocks.Row("", phaseEight), r.blocks.Row(phaseEight)
	if n := single.Requests - single.Classes[kindNone] - single.Classes[kindReset]; n != 0 || single.Classes[kindReset] > 1 {
		t.Errorf("the block table was wrong about %d of %d requests sent one at a time", n, single.Requests)
	}
	if n := eight.Classes[kindNone]; float64(n) < .98*float64(eight.Requests) || eight.Classes[kindOther] > 0 {
		t.Errorf("the block table was right about %d of %d requests at eight at once: %v", n, eight.Requests, eight.Classes)
	}
	// A placement is as right as the block table, whose reports it has.
	still := r.placed.Row("", phaseEight, phaseReset)
	if still.Over > 0 {
		t.Errorf("%d tokens were expected in vain of requests sent one at a time", still.Over)
	}
	if at := r.placed.Row(phaseEight); at.OverRatio() > .01 {
		t.Errorf("%.2f %% of the prompts' tokens were expected in vain at eight at once, want at most 1 %%", 100*at.OverRatio())
	}
	if all.Recall() < .97 {
		t.Errorf("%.2f %% of what was reused was expected, want 97 %%", 100*all.Recall())
	}
	if at := r.placed.Row(phaseEight); at.Recall() < .97 {
		t.Errorf("%.2f %% of what was reused at eight at once was expected, want 97 %%", 100*at.Recall())
	}
	// Between the worker's first hello and its first list of prefixes nothing is
	// known.
	for _, phase := range []string{phaseLate, phaseAgent, phaseEngine, phaseFrontEnd} {
		if n := r.placed.Row(phase).Unknown; n > 1 {
			t.Errorf("%s: nothing was known of %d requests", phase, n)
		}
	}
	if n := r.placed.Row("", phaseLate, phaseAgent, phaseEngine, phaseFrontEnd).Unknown; n > 0 {
		t.Errorf("nothing was known of %d requests of a life that is known", n)
	}
}
