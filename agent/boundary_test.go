package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/sglang"
	"waypost/agent/engine/vllm"
	"waypost/gossip/boundary"
	"waypost/gossip/prefix"
)

// textEngine is a tokenizer and a chat template, as engines have them. It is
// written for these tests and knows nothing of how boundaries are measured.
type textEngine struct {
	// digits is how many digits make one token, letters how many letters;
	// revision moves the ids of the vocabulary.
	digits, letters, revision int
	// specials are parsed in text; lower folds case, as some normalisers do.
	specials []string
	lower    bool
	// bos is added to completions, templateBOS written by the template.
	bos, templateBOS bool
	template         func(e *textEngine, c *chat) string
	// zone is the time zone of the engine's clock.
	zone *time.Location
	// noTools and noSystem are refused by the template.
	noTools, noSystem bool

	asked atomic.Int64
	// revised moves the ids as revision does, while the engine is asked.
	revised atomic.Int64
}

type chat struct {
	Messages []struct{ Role, Content string }
	Tools    json.RawMessage
}

func (e *textEngine) tokens(text string, special bool) (ids []uint32) {
	id := func(s string) uint32 {
		h := fnv.New32a()
		_, _ = fmt.Fprintf(h, "%d %s", int64(e.revision)+e.revised.Load(), s)
		return h.Sum32()
	}
	if special && e.bos {
		ids = append(ids, id("<s>"))
	}
	if e.lower {
		text = strings.ToLower(text)
	}
	kind := func(r rune) int {
		switch {
		case unicode.IsDigit(r):
			return e.digits
		case unicode.IsLetter(r):
			return e.letters
		}
		return 1
	}
next:
	for text != "" {
		for _, s := range e.specials {
			if strings.HasPrefix(text, s) {
				ids, text = append(ids, id(s)), text[len(s):]
				continue next
			}
		}
		runes, n := []rune(text), 1
		for n < len(runes) && n < kind(runes[0]) && kind(runes[n]) == kind(runes[0]) && unicode.IsDigit(runes[n]) == unicode.IsDigit(runes[0]) {
			n++
		}
		piece := string(runes[:n])
		ids, text = append(ids, id(piece)), text[len(piece):]
	}
	return ids
}

// Tokenize implements engine.Tokenizer.
func (e *textEngine) Tokenize(_ context.Context, text string, special bool) ([]uint32, error) {
	e.asked.Add(1)
	return e.tokens(text, special), nil
}

// Render implements engine.Tokenizer.
func (e *textEngine) Render(_ context.Context, body []byte) ([]uint32, error) {
	e.asked.Add(1)
	var c chat
	if err := json.Unmarshal(body, &c); err != nil {
		return nil, err
	}
	if e.noTools && len(c.Tools) > 0 || e.noSystem && c.Messages[0].Role == "system" {
		return nil, errors.New("the template refuses it")
	}
	text := e.template(e, &c)
	if e.templateBOS {
		text = "<s>" + text
	}
	return e.tokens(text, false), nil
}

func (e *textEngine) today(form string) string {
	zone := e.zone
	if zone == nil {
		zone = time.UTC
	}
	return time.Now().In(zone).Format(form)
}

// chatML and headers are two families of templates; the others are theirs with a
// change.
func chatML(_ *textEngine, c *chat) string {
	var b strings.Builder
	for _, m := range c.Messages {
		fmt.Fprintf(&b, "<|im_start|>%s\n%s<|im_end|>\n", m.Role, m.Content)
		if m.Role == "system" && len(c.Tools) > 0 {
			fmt.Fprintf(&b, "# Tools\n%s\n", c.Tools)
		}
	}
	return b.String() + "<|im_start|>assistant\n"
}

func headers(form string) func(*textEngine, *chat) string {
	return func(e *textEngine, c *chat) string {
		b := &strings.Builder{}
		fmt.Fprintf(b, "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: %s\n\n", e.today(form))
		if len(c.Tools) > 0 {
			fmt.Fprintf(b, "You have tools: %s\n", c.Tools)
		}
		for _, m := range c.Messages {
			fmt.Fprintf(b, "<|start_header_id|>%s<|end_header_id|>\n\n%s<|eot_id|>", m.Role, strings.TrimSpace(m.Content))
		}
		return b.String() + "<|start_header_id|>assistant<|end_header_id|>\n\n"
	}
}

// changed is a template whose text is changed.
func changed(template func(*textEngine, *chat) string, old, now string) func(*textEngine, *chat) string {
	return func(e *textEngine, c *chat) string { return strings.ReplaceAll(template(e, c), old, now) }
}

var mlSpecials = []string{"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>"}

func qwenLike() *textEngine {
	return &textEngine{digits: 1, letters: 5, specials: mlSpecials, template: chatML}
}

func llamaLike() *textEngine {
	return &textEngine{
		digits: 3, letters: 4, bos: true, templateBOS: true, template: headers("02 Jan 2006"),
		specials: []string{"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<s>"},
	}
}

// pairOf runs two probers and a judge as agents and a coordinator do, for a
// time, and returns the first verdict that counts and when it came. Asks and
// vectors take a while on their way.
type pairOf struct {
	a, b   engine.Tokenizer
	capsA  engine.Capability
	capsB  engine.Capability
	lateB  time.Duration // when B comes up
	start  time.Duration // time of the day at which A comes up
	runFor time.Duration
}

type pairResult struct {
	verdict boundary.Verdict
	after   time.Duration // since both were up
	split   bool
	vectors [2]*boundary.Vector
}

func (p pairOf) run(t *testing.T) (out pairResult) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(p.start)
		ctx, cancel := context.WithCancel(t.Context())
		began := time.Now()
		var probers [2]*prober
		done := make(chan struct{})
		for i, tok := range [2]engine.Tokenizer{p.a, p.b} {
			caps, late := [2]engine.Capability{p.capsA, p.capsB}[i], [2]time.Duration{0, p.lateB}[i]
			probers[i] = newProber(proberOptions{
				tokenizer: tok, hasher: boundary.NewHasher(prefix.ClusterKey{5}), changed: func() {}, log: slog.New(slog.DiscardHandler),
				state: func() probedState {
					return probedState{life: engineLife{mark: uint64(i) + 1, model: "m"}, up: time.Since(began) >= late, capabilities: caps, eventsSeen: caps.Has(engine.PublishesEvents)}
				},
			})
			go func() { probers[i].run(ctx); done <- struct{}{} }()
		}
		var judge boundary.Judge
		for time.Since(began) < p.runFor {
			time.Sleep(200 * time.Millisecond)
			if alone := p.lateB - time.Since(began); alone > time.Minute {
				time.Sleep(alone - time.Minute) // nobody to compare with
			}
			out.vectors = [2]*boundary.Vector{probers[0].vector(), probers[1].vector()}
			verdicts, asks := judge.Judge(time.Now(), []boundary.Worker{{Name: "a", Pool: "p", Vector: out.vectors[0]}, {Name: "b", Pool: "p", Vector: out.vectors[1]}})
			for _, v := range verdicts {
				if v.State == boundary.StateDiffers && !out.split {
					out.verdict, out.after, out.split = v, time.Since(began)-p.lateB, true
				}
			}
			time.Sleep(50 * time.Millisecond)
			for _, a := range asks {
				probers[strings.Index("ab", a.Worker)].again(a.Part, a.Number)
			}
		}
		cancel()
		<-done
		<-done
	})
	return out
}

const events = engine.PublishesEvents

// Thirty pairs of engines that differ in what a boundary is made of are found
// within ten seconds and named.
func TestBoundaryDifferencesAreNamed(t *testing.T) {
	type change func(*textEngine)
	template := func(f func(*textEngine, *chat) string) change { return func(e *textEngine) { e.template = f } }
	worst, named, pairs := time.Duration(0), 0, 0
	try := func(name string, base func() *textEngine, c change, caps engine.Capability, want string) {
		a, b := base(), base()
		c(b)
		r := pairOf{a: a, b: b, capsA: events, capsB: events | caps, lateB: time.Duration(pairs%4) * 300 * time.Millisecond, start: 9 * time.Hour, runFor: 14 * time.Second}.run(t)
		pairs++
		got := r.verdict.Difference.String()
		if !r.split || r.after > 10*time.Second || !strings.HasPrefix(got, want) {
			t.Errorf("%s: found %v after %v as %q, want %q", name, r.split, r.after, got, want)
			return
		}
		named++
		worst = max(worst, r.after)
	}
	none := func(*textEngine) {}
	for name, c := range map[string]struct {
		base   func() *textEngine
		change change
		want   string
	}{
		"template: another family":             {qwenLike, template(headers("2006-01-02")), "chat rendering, probe 1"},
		"template: default system prompt":      {qwenLike, template(func(e *textEngine, c *chat) string { return defaultSystem(chatML)(e, c) }), "chat rendering, probe 2"},
		"template: content trimmed":            {qwenLike, template(changed(chatML, "  <|im_end|>", "<|im_end|>")), "chat rendering, probe 2"},
		"template: tools elsewhere":            {qwenLike, template(changed(chatML, "# Tools\n", "# Functions\n")), "chat rendering, probe 3"},
		"template: generation prompt thinks":   {qwenLike, template(changed(chatML, "assistant\n", "assistant\n<think>\n")), "chat rendering, probe 1"},
		"template: typed specials escaped":     {qwenLike, template(changed(chatML, "</s> and <bos>", "< /s> and <bos>")), "chat rendering, probe 4"},
		"template: newline behind role":        {llamaLike, template(changed(headers("02 Jan 2006"), "<|end_header_id|>\n\n", "<|end_header_id|>\n")), "chat rendering, probe 1"},
		"template: knowledge date":             {llamaLike, template(changed(headers("02 Jan 2006"), "December 2023", "October 2023")), "chat rendering, probe 1"},
		"template: writes no date":             {llamaLike, template(func(e *textEngine, c *chat) string { return withoutDate(e, c) }), "chat rendering, probe 1"},
		"template: double begin of sequence":   {qwenLike, func(e *textEngine) { e.templateBOS = true }, "chat rendering, probe 1"},
		"template: no begin of sequence":       {llamaLike, func(e *textEngine) { e.templateBOS = false }, "chat rendering, probe 1"},
		"template: role of the assistant":      {qwenLike, template(changed(chatML, "<|im_start|>assistant", "<|im_start|>model")), "chat rendering, probe 1"},
		"tokenizer: another revision":          {qwenLike, func(e *textEngine) { e.revision = 2 }, "raw text tokenisation, probe 1"},
		"tokenizer: another revision, dates":   {llamaLike, func(e *textEngine) { e.revision = 2 }, "raw text tokenisation, probe 1"},
		"tokenizer: digits by three":           {qwenLike, func(e *textEngine) { e.digits = 3 }, "raw text tokenisation, probe 1"},
		"tokenizer: digits one by one":         {llamaLike, func(e *textEngine) { e.digits = 1 }, "raw text tokenisation, probe 1"},
		"tokenizer: other merges":              {qwenLike, func(e *textEngine) { e.letters = 6 }, "raw text tokenisation, probe 1"},
		"tokenizer: other merges, dates":       {llamaLike, func(e *textEngine) { e.letters = 3 }, "raw text tokenisation, probe 1"},
		"tokenizer: folds case":                {qwenLike, func(e *textEngine) { e.lower = true }, "raw text tokenisation, probe 1"},
		"tokenizer: added special token":       {qwenLike, func(e *textEngine) { e.specials = append(slices.Clone(e.specials), "<think>") }, "raw text tokenisation, probe 2"},
		"tokenizer: typed specials are text":   {llamaLike, func(e *textEngine) { e.specials = e.specials[:3] }, "raw text tokenisation, probe 2"},
		"begin of sequence: none any more":     {llamaLike, func(e *textEngine) { e.bos = false }, "completions rendering, probe 1"},
		"begin of sequence: added":             {qwenLike, func(e *textEngine) { e.bos = true }, "completions rendering, probe 1"},
		"begin of sequence: both":              {qwenLike, func(e *textEngine) { e.bos, e.templateBOS = true, true }, "completions rendering, probe 1"},
		"begin of sequence: neither, by dates": {llamaLike, func(e *textEngine) { e.bos, e.templateBOS = false, false }, "completions rendering, probe 1"},
	} {
		try(name, c.base, c.change, 0, c.want)
	}
	for name, caps := range map[string]engine.Capability{"adapters omitted": engine.OmitsAdapters, "salts omitted": engine.OmitsSalts, "both omitted": engine.OmitsAdapters | engine.OmitsSalts} {
		try("rule: "+name, qwenLike, none, caps, "adapter and salt rule")
	}
	try("rule: by dates", llamaLike, none, engine.OmitsAdapters, "adapter and salt rule")
	try("rule: salts by dates", llamaLike, none, engine.OmitsSalts, "adapter and salt rule")
	t.Logf("%d of %d pairs named, the last after %v", named, pairs, worst)
	if pairs != 30 {
		t.Errorf("%d pairs", pairs)
	}
}

func defaultSystem(template func(*textEngine, *chat) string) func(*textEngine, *chat) string {
	return func(e *textEngine, c *chat) string {
		if c.Messages[0].Role == "system" {
			return template(e, c)
		}
		return "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + template(e, c)
	}
}

func withoutDate(e *textEngine, c *chat) string {
	text := headers("02 Jan 2006")(e, c)
	from := strings.Index(text, "Today Date")
	return text[:from] + text[from+strings.IndexByte(text[from:], '\n')+1:]
}

// Thirty pairs of equal engines are never split: through midnight, in other time
// zones, on other days, with dates of every form.
func TestEqualBoundariesAreNeverSplit(t *testing.T) {
	forms := []string{"02 Jan 2006", "2006-01-02", "January 2, 2006", "2 January 2006", "02/01/2006", "Monday, January 2, 2006"}
	zones := []*time.Location{time.UTC, time.FixedZone("east", 14*3600), time.FixedZone("west", -11*3600)}
	split, dated, pairs := 0, 0, 0
	for i := range 30 {
		make := func(zone *time.Location) *textEngine {
			e := qwenLike()
			if i%5 != 0 {
				e = llamaLike()
				e.template, e.digits = headers(forms[i%len(forms)]), 1+i%3
			}
			e.zone = zone
			return e
		}
		p := pairOf{a: make(zones[0]), b: make(zones[i%3]), capsA: events, capsB: events, runFor: 20 * time.Second, start: 12 * time.Hour}
		switch i % 4 {
		case 0: // midnight comes while they are measured
			p.start, p.lateB = 24*time.Hour-time.Duration(1+i/4)*time.Second, time.Duration(i%3)*time.Second
		case 1: // one is measured before midnight and one after
			p.start, p.lateB = 24*time.Hour-15*time.Second, 16*time.Second
			p.runFor = 40 * time.Second
		case 2: // one runs for days
			p.lateB, p.runFor = 36*time.Hour, 36*time.Hour+20*time.Second
		}
		r := p.run(t)
		pairs++
		if r.split {
			split++
			t.Errorf("pair %d: split after %v: %s", i, r.after, r.verdict.Why)
		}
		for _, v := range r.vectors {
			if len(v.Probes) != len(boundary.Published()) || v.DateDependent() != (i%5 != 0) {
				t.Errorf("pair %d: %d probes, date-dependent %v", i, len(v.Probes), v.DateDependent())
			}
		}
		if r.vectors[0].DateDependent() {
			dated++
		}
	}
	t.Logf("%d of %d equal pairs split, %d of them write the date", split, pairs, dated)
}

// costlyEngine renders a chat with two requests, as llama.cpp does.
type costlyEngine struct{ *textEngine }

func (costlyEngine) RenderRequests() int { return 2 }

func (e costlyEngine) Render(ctx context.Context, chatJSON []byte) ([]uint32, error) {
	e.asked.Add(1)
	return e.textEngine.Render(ctx, chatJSON)
}

// What only the last probe shows is found in time, too, where rendering takes
// two requests; afterwards there is at most one request a second.
func TestBoundaryOfCostlyRendering(t *testing.T) {
	a, b := costlyEngine{llamaLike()}, costlyEngine{llamaLike()}
	b.template = func(e *textEngine, c *chat) string {
		text := headers("02 Jan 2006")(e, c)
		if strings.Contains(text, "literally") {
			text += "!"
		}
		return text
	}
	r := pairOf{a: a, b: b, capsA: events, capsB: events, start: 9 * time.Hour, runFor: 14 * time.Second}.run(t)
	if got := r.verdict.Difference.String(); !r.split || r.after > 10*time.Second || !strings.HasPrefix(got, "chat rendering, probe 4") {
		t.Errorf("found %v after %v as %q", r.split, r.after, got)
	}
	synctest.Test(t, func(t *testing.T) {
		e := costlyEngine{qwenLike()}
		p := newProber(proberOptions{
			tokenizer: e, hasher: boundary.NewHasher(prefix.ClusterKey{5}), changed: func() {}, log: slog.New(slog.DiscardHandler),
			state: func() probedState { return probedState{life: engineLife{mark: 1, model: "m"}, up: true} },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { p.run(ctx); close(done) }()
		time.Sleep(20 * time.Second)
		first := e.asked.Load()
		for range 100 { // a coordinator that asks all the time
			p.again(boundary.PartChat, 1)
			time.Sleep(100 * time.Millisecond)
		}
		if n := e.asked.Load() - first; first > 12 || n > 12 {
			t.Errorf("%d requests at first, then %d in 10 s", first, n)
		}
		if n := p.requests.Load(); n != e.asked.Load() {
			t.Errorf("%d requests are told, %d were sent", n, e.asked.Load())
		}
		cancel()
		<-done
	})
}

// The date is found though no form of it is known, once it changes.
func TestUnknownDateFormIsLearnt(t *testing.T) {
	e := func() *textEngine {
		e := llamaLike()
		e.template = headers("Mon .02. day 15")
		return e
	}
	r := pairOf{a: e(), b: e(), capsA: events, capsB: events, start: 24*time.Hour - 15*time.Second, runFor: 40 * time.Minute}.run(t)
	if r.split || !r.vectors[0].DateDependent() {
		t.Errorf("split %v, date-dependent %v", r.split, r.vectors[0].DateDependent())
	}
}

// An engine is asked at most once a second, a template that refuses tools is
// measured in all else, and one life after the other.
func TestProberAsksAtMostOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := qwenLike()
		e.noTools = true
		var mark atomic.Uint64
		mark.Store(1)
		p := newProber(proberOptions{
			tokenizer: e, hasher: boundary.NewHasher(prefix.ClusterKey{5}), changed: func() {}, log: slog.New(slog.DiscardHandler),
			state: func() probedState { return probedState{life: engineLife{mark: mark.Load(), model: "m"}, up: true} },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { p.run(ctx); close(done) }()
		for range 100 { // a coordinator that asks all the time
			p.again(boundary.PartChat, 1)
			p.again(boundary.PartChat, 99)
			time.Sleep(100 * time.Millisecond)
		}
		if n := e.asked.Load(); n > 11 {
			t.Errorf("%d questions in 10 s", n)
		}
		time.Sleep(time.Minute)
		if n := len(p.vector().Probes); n != len(boundary.Published())-1 {
			t.Errorf("%d probes measured of a template without tools", n)
		}
		quiet := e.asked.Load()
		time.Sleep(10 * time.Minute)
		if n := e.asked.Load() - quiet; n < 3 || n > 30 {
			t.Errorf("%d questions in 10 quiet minutes", n)
		}
		if n := p.requests.Load(); n != e.asked.Load() {
			t.Errorf("%d requests are told, %d were sent", n, e.asked.Load())
		}
		before := p.vector()
		e.revised.Store(7)
		mark.Store(2)
		time.Sleep(15 * time.Second)
		if r, d := boundary.Compare(before, p.vector()); r != boundary.Differ || d.Part != boundary.PartRaw {
			t.Errorf("the next life: %v %v", r, d)
		}
		cancel()
		<-done
	})
}

// noTokenizer answers as an engine without the route does.
type noTokenizer struct{}

func (noTokenizer) Tokenize(context.Context, string, bool) ([]uint32, error) {
	return nil, &enginehttp.StatusError{Path: "/tokenize", Code: 404}
}

func (noTokenizer) Render(context.Context, []byte) ([]uint32, error) { return nil, errors.New("no") }

// What cannot be measured is as declared: by the operator, or by the model's
// name.
func TestDeclaredBoundary(t *testing.T) {
	for name, c := range map[string]struct {
		tokenizer engine.Tokenizer
		declared  string
		want      string
	}{
		"no tokenizer":               {nil, "", "m"},
		"no tokenizer, declared":     {nil, "of may", "of may"},
		"too long, cut at a letter":  {nil, "x" + strings.Repeat("ü", 100), "x" + strings.Repeat("ü", (boundary.MaxTextBytes-1)/2)},
		"no route":                   {noTokenizer{}, "", "m"},
		"no route, declared":         {noTokenizer{}, "of may", "of may"},
		"measured, though declared":  {qwenLike(), "of may", ""},
		"measured, and not declared": {qwenLike(), "", ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := newProber(proberOptions{
				tokenizer: c.tokenizer, declared: c.declared, hasher: boundary.NewHasher(prefix.ClusterKey{5}), changed: func() {}, log: slog.New(slog.DiscardHandler),
				state: func() probedState { return probedState{life: engineLife{model: "m"}, up: true} },
			})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { p.run(ctx); close(done) }()
			time.Sleep(20 * time.Second)
			if v := p.vector(); v.Declared != c.want || (len(v.Probes) == 0) == (c.want == "") {
				t.Errorf("%s: declared %q, %d probes", name, v.Declared, len(v.Probes))
			}
			cancel()
			<-done
		})
	}
}

// serve is the engine on HTTP with the routes of vLLM and SGLang.
func (e *textEngine) serve(t *testing.T) string {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /tokenize", func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Prompt           *string
			AddSpecialTokens bool `json:"add_special_tokens"`
			Messages         json.RawMessage
			Tools            json.RawMessage
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		var ids []uint32
		var err error
		if body.Prompt != nil {
			ids, err = e.Tokenize(r.Context(), *body.Prompt, body.AddSpecialTokens)
		} else {
			chat := map[string]json.RawMessage{"messages": body.Messages}
			if body.Tools != nil {
				chat["tools"] = body.Tools
			}
			asked, _ := json.Marshal(chat)
			ids, err = e.Render(r.Context(), asked)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"tokens": ids, "count": len(ids)})
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}

// Two kinds of engines with one tokenizer and template agree through their own
// routes; another template on the same kind does not, and what leaves the host
// holds no token id.
func TestBoundaryThroughEngines(t *testing.T) {
	measure := func(tok engine.Tokenizer) *boundary.Vector {
		p := newProber(proberOptions{
			tokenizer: tok, hasher: boundary.NewHasher(prefix.ClusterKey{5}), changed: func() {}, log: slog.New(slog.DiscardHandler), every: 2 * time.Millisecond,
			state: func() probedState { return probedState{life: engineLife{model: "m"}, up: true} },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { p.run(ctx); close(done) }()
		for deadline := time.Now().Add(time.Minute); p.vector() == nil || len(p.vector().Probes) < len(boundary.Published()); time.Sleep(2 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("never measured")
			}
		}
		cancel()
		<-done
		return p.vector()
	}
	options := func(e *textEngine) engine.Options {
		return engine.Options{Target: engine.Target{Name: "e", URL: e.serve(t)}, Logger: slog.New(slog.DiscardHandler)}
	}
	viaVLLM := func(e *textEngine) *boundary.Vector {
		a, err := vllm.New(vllm.Options{Options: options(e)})
		if err != nil {
			t.Fatal(err)
		}
		return measure(a)
	}
	a := viaVLLM(llamaLike())
	s, err := sglang.New(sglang.Options{Options: options(llamaLike())})
	if err != nil {
		t.Fatal(err)
	}
	if r, d := boundary.Compare(a, measure(s)); r != boundary.Agree {
		t.Errorf("vLLM and SGLang: %v %v", r, d)
	}
	other := llamaLike()
	other.template = changed(other.template, "You have tools", "Tools")
	if r, d := boundary.Compare(a, viaVLLM(other)); r != boundary.Differ || d.Part != boundary.PartChat || d.Number != 3 {
		t.Errorf("another template: %v %v", r, d)
	}
	ids := llamaLike().tokens("Once upon a time, there was a cache.", true)
	for i, h := range a.Probe(boundary.PartCompletions, 1).Tokens {
		if uint32(h) == ids[i] {
			t.Errorf("token %d is told as it is", i)
		}
	}
}
