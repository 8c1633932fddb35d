package coordinator

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/structpb"

	"waypost/coordinator/api"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// A text of which nothing is known is placed with its reuse unknown, never 0.
// Once the front door has taught the ids that the engine returned, a request that
// begins alike knows its first tokens.
func TestTextIsUnknownUntilItIsTaught(t *testing.T) {
	o := startOne(t)
	startText(t, o)
	first := chatOf(message{"system", prose(1, 1500)}, message{"user", "hello there"})
	got := o.place(t, noBudget(bodyInput(first)))
	if got.GetBasis().GetInputSource() != "unknown" || got.GetExpected().ReuseTokens != nil {
		t.Errorf("input source %s, reuse %v; want unknown and none", got.GetBasis().GetInputSource(), got.GetExpected().ReuseTokens)
	}
	if !slices.Contains(got.GetBasis().GetMarks(), "estimated_length") {
		t.Errorf("marks %v", got.GetBasis().GetMarks())
	}
	if r := o.learn(t, got.GetPlacementId(), rendered([]byte(first)), nil, ""); !r.GetLearnt() {
		t.Fatalf("not learnt: %s", r.GetReason())
	}
	if r := o.learn(t, got.GetPlacementId(), rendered([]byte(first)), nil, ""); r.GetLearnt() || r.GetReason() == "" {
		t.Error("learnt twice")
	}
	second := chatOf(message{"system", prose(1, 1500)}, message{"user", "something else"})
	again := o.place(t, noBudget(bodyInput(second)))
	if again.GetBasis().GetInputSource() != "memo" {
		t.Errorf("input source %s, want memo", again.GetBasis().GetInputSource())
	}
	// What is placed is expected to be there: a claim's keys serve the next.
	third := o.place(t, noBudget(bodyInput(second)))
	if n := third.GetExpected().GetReuseTokens(); n < 1400 || n > 1503 {
		t.Errorf("%d tokens of reuse expected on a worker that was just sent the same prompt", n)
	}
	// Another adapter and salt share the text, not the cache.
	other := noBudget(bodyInput(second))
	other.CacheSalt = new("s")
	salted := o.place(t, other)
	if salted.GetBasis().GetInputSource() != "memo" || salted.GetExpected().GetReuseTokens() != 0 {
		t.Errorf("salted: %s, %v", salted.GetBasis().GetInputSource(), salted.GetExpected().ReuseTokens)
	}
}

// The same text as a prompt and as messages are two renderings, and neither is
// an empty prompt (TOK-02).
func TestPromptAndMessagesAreDifferentRenderings(t *testing.T) {
	o := startOne(t)
	startText(t, o)
	text := prose(2, 900)
	chat := o.place(t, noBudget(bodyInput(chatOf(message{"user", text}))))
	o.learn(t, chat.GetPlacementId(), rendered([]byte(chatOf(message{"user", text}))), nil, "")
	completion := o.place(t, noBudget(&waypostv1.Input{Prompt: &text}))
	if s := completion.GetBasis().GetInputSource(); s != "unknown" {
		t.Errorf("the completion's source is %s", s)
	}
	o.learn(t, completion.GetPlacementId(), wordIDs(text), nil, "")
	for _, in := range []*waypostv1.Input{{Prompt: &text}, bodyInput(chatOf(message{"user", text})), bodyInput(fmt.Sprintf(`{"prompt":%q,"max_tokens":7}`, text))} {
		p := o.place(t, noBudget(in))
		if p.GetBasis().GetInputSource() != "memo" {
			t.Errorf("%.20s: source %s", in.GetBodyJson(), p.GetBasis().GetInputSource())
		}
	}
}

// A first long prompt is tokenised before the decision, within the budget; a
// short one and one without a budget are not.
func TestFirstLongPromptIsTokenised(t *testing.T) {
	o := startOne(t)
	w := startText(t, o)
	w.allow()
	in := bodyInput(chatOf(message{"user", prose(3, 1200)}))
	if p := o.place(t, &waypostv1.PlaceRequest{Input: bodyInput(chatOf(message{"user", "short"})), TokenizeBudgetMs: new(1000.)}); p.GetBasis().GetInputSource() != "unknown" {
		t.Errorf("a short prompt's source is %s", p.GetBasis().GetInputSource())
	}
	if n := w.questions(); n != 0 {
		t.Errorf("%d questions about a short prompt", n)
	}
	p := o.place(t, &waypostv1.PlaceRequest{Input: in, TokenizeBudgetMs: new(1000.)})
	if p.GetBasis().GetInputSource() != "render" {
		t.Errorf("source %s, want render", p.GetBasis().GetInputSource())
	}
	if n := w.questions(); n != 1 {
		t.Errorf("%d questions", n)
	}
	again := o.place(t, &waypostv1.PlaceRequest{Input: in, TokenizeBudgetMs: new(1000.)})
	if n := again.GetExpected().GetReuseTokens(); again.GetBasis().GetInputSource() != "memo" || n < 1100 {
		t.Errorf("the second time: source %s, reuse %d", again.GetBasis().GetInputSource(), n)
	}
}

// Without a front door that teaches, engines are asked in the background about
// what has more than 512 unknown tokens; what they refuse costs nothing.
func TestBackgroundTokenising(t *testing.T) {
	o := startOne(t)
	w := startText(t, o)
	in := bodyInput(chatOf(message{"system", prose(4, 1200)}, message{"user", "one"}))
	o.place(t, noBudget(in))
	eventually(t, "the engine was asked", func() bool { return w.questions() == 1 })
	w.allow()
	o.place(t, noBudget(in))
	eventually(t, "it is learnt", func() bool {
		return o.place(t, &waypostv1.PlaceRequest{Input: in, TokenizeBudgetMs: new(0.), Reserve: new(false)}).GetBasis().GetInputSource() == "memo"
	})
	before := w.questions()
	for range 5 {
		o.place(t, noBudget(in))
	}
	// Nothing is asked when little is unknown; what would be, is queued at once.
	o.memos.ask.mu.Lock()
	waiting := len(o.memos.ask.waiting)
	o.memos.ask.mu.Unlock()
	if n := w.questions() + waiting; n != before {
		t.Errorf("%d questions about what is known", n-before)
	}
}

// The answer that a front door teaches is known when the client sends it back.
func TestAnswersAreTaught(t *testing.T) {
	o := startOne(t)
	startText(t, o)
	deepest := 0
	for i := range 8 {
		user, answer := prose(100+i, 600), prose(200+i, 700)
		first := chatOf(message{"user", user})
		p := o.place(t, noBudget(bodyInput(first)))
		ids := rendered([]byte(first))
		o.learn(t, p.GetPlacementId(), ids, nil, "")
		sent, err := json.Marshal(message{"assistant", answer})
		if err != nil {
			t.Fatal(err)
		}
		// The answer comes with the outcome; the prompt's ids are remembered.
		out := wordIDs(answer + " <|end|>")
		if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{
			PlacementId: p.PlacementId, Result: new("done"), OutputTokenIds: out, MessageJson: new(string(sent)),
		}); err != nil {
			t.Fatal(err)
		}
		next := chatOf(message{"user", user}, message{"assistant", answer}, message{"user", "and then"})
		q := o.place(t, noBudget(bodyInput(next)))
		deepest = o.pending(t, q.GetPlacementId()).given.Tokens
		o.learn(t, q.GetPlacementId(), rendered([]byte(next)), nil, "")
	}
	if deepest < 1280 {
		t.Errorf("%d tokens known with the answer, want the answer's 700 in them", deepest)
	}
}

func (o *one) pending(t *testing.T, placement string) *taughtPrompt {
	t.Helper()
	o.memos.mu.Lock()
	defer o.memos.mu.Unlock()
	tp := o.memos.taught[placement]
	if tp == nil {
		t.Fatalf("nothing is remembered of %s", placement)
	}
	return tp
}

// JSON keeps the order of keys that the client wrote; gRPC's structs do not, and
// then no engine is asked what such tools become.
func TestOrderOfKeysInJSON(t *testing.T) {
	o := startOne(t)
	w := startText(t, o)
	post := func(path, body string) map[string]any {
		t.Helper()
		resp, err := http.Post("http://"+o.APIAddress()+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s %s %v", path, resp.Status, b, err)
		}
		var out map[string]any
		if err := json.Unmarshal(b, &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	tools := `[{"type":"function","function":{"parameters":{"properties":{"zeta":{},"alpha":{}},"required":["zeta"]},"name":"f"}}]`
	messages, err := json.Marshal([]message{{"user", prose(5, 900)}})
	if err != nil {
		t.Fatal(err)
	}
	placed := post("/v1/place", `{"tokenizeBudgetMs":0,"input":{"messages":`+string(messages)+`,"tools":`+tools+`}}`)
	eventually(t, "the engine was asked", func() bool { return w.questions() == 1 })
	w.mu.Lock()
	asked := w.asked[0]
	w.mu.Unlock()
	if !strings.Contains(asked, tools) {
		t.Errorf("asked about %.200s", asked[len(asked)-200:])
	}
	id := placed["placementId"].(string)
	ids, err := json.Marshal(rendered([]byte(asked)))
	if err != nil {
		t.Fatal(err)
	}
	// The route is there for front doors; the engine's answer was first here.
	post("/v1/placements/"+id+":learn", `{"promptTokenIds":`+string(ids)+`}`)
	whole := post("/v1/place", `{"tokenizeBudgetMs":0,"input":{"bodyJson":{"tools":`+tools+`,"messages":`+string(messages)+`}}}`)
	if s := whole["basis"].(map[string]any)["inputSource"]; s != "memo" {
		t.Errorf("the same as a whole body: source %v", s)
	}
	tool, err := structpb.NewStruct(map[string]any{"type": "function", "zeta": 1, "alpha": 2})
	if err != nil {
		t.Fatal(err)
	}
	msg, err := structpb.NewStruct(map[string]any{"role": "user", "content": prose(6, 900)})
	if err != nil {
		t.Fatal(err)
	}
	before := w.questions()
	in := &waypostv1.Input{Messages: []*structpb.Struct{msg}, Tools: []*structpb.Struct{tool}}
	p := o.place(t, &waypostv1.PlaceRequest{Input: in, TokenizeBudgetMs: new(1000.)})
	if p.GetBasis().GetInputSource() != "unknown" || w.questions() != before {
		t.Errorf("source %s, %d questions: structs have no order of keys", p.GetBasis().GetInputSource(), w.questions()-before)
	}
}

// Two pictures share their placeholder tokens: credit ends before the first
// (TEN-03).
func TestPicturesEndCredit(t *testing.T) {
	o := startOne(t)
	startText(t, o)
	system := prose(7, 700)
	body := func(url string) string {
		return fmt.Sprintf(`{"messages":[{"role":"system","content":%q},{"role":"user","content":[{"type":"image_url","image_url":{"url":%q}}]}]}`, system, url)
	}
	ids := slices.Concat(wordIDs("<|system|> "+system+" <|end|> <|user|>"), slices.Repeat([]uint32{9}, 800))
	text := o.place(t, noBudget(bodyInput(chatOf(message{"system", system}, message{"user", "hi"}))))
	o.learn(t, text.GetPlacementId(), rendered([]byte(chatOf(message{"system", system}, message{"user", "hi"}))), nil, "")
	for _, url := range []string{"data:a", "data:b"} {
		p := o.place(t, noBudget(bodyInput(body(url))))
		if n := p.GetExpected().GetReuseTokens(); n > 704 {
			t.Errorf("%s: %d tokens expected", url, n)
		}
		o.learn(t, p.GetPlacementId(), ids, nil, "")
	}
}

// A pool whose template is not causal: after three wrong answers its texts are
// placed without credit, and status and reuse say so.
func TestBreakerIsShown(t *testing.T) {
	o := startOne(t)
	startText(t, o)
	for i := range 12 {
		in := bodyInput(chatOf(message{"system", prose(30+i/2, 700)}, message{"user", fmt.Sprint("question ", i)}))
		p := o.place(t, noBudget(in))
		// Each prompt is another from its second token on.
		ids := append([]uint32{1, uint32(1000 + i)}, wordIDs(prose(30+i/2, 700))...)
		o.learn(t, p.GetPlacementId(), ids, nil, "")
	}
	p := o.place(t, noBudget(bodyInput(chatOf(message{"system", prose(35, 700)}, message{"user", "more"}))))
	if p.GetBasis().GetInputSource() != "unknown" || p.GetExpected().ReuseTokens != nil {
		t.Errorf("source %s, reuse %v", p.GetBasis().GetInputSource(), p.GetExpected().ReuseTokens)
	}
	st, err := waypostv1.NewOperatorServiceClient(o.conn).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(st.GetProblems(), func(p *waypostv1.Problem) bool { return strings.Contains(p.GetWhat(), "text memo off: ") }) {
		t.Errorf("status does not tell: %v", st.GetProblems())
	}
	reuse, err := waypostv1.NewOperatorServiceClient(o.conn).GetReuse(t.Context(), &waypostv1.GetReuseRequest{})
	if err != nil || len(reuse.GetPools()) != 1 {
		t.Fatalf("%v, %v", reuse, err)
	}
	if m := reuse.GetPools()[0].GetMemo(); !strings.HasPrefix(m.GetState(), "off: ") || m.GetLookups() != 13 || m.GetLearnt()["engine"] != 12 || m.GetOpened() != 1 {
		t.Errorf("reuse tells %v", m)
	}
}

// What one coordinator learnt of a prompt another knows: entries travel with
// placements, and a coordinator that starts copies them.
func TestMemoIsShared(t *testing.T) {
	a := startOne(t)
	b := startOneOf(t, "c-2", a)
	startText(t, a, b)
	eventually(t, "each tells the other", func() bool { return a.exchange.Connected() == 1 && b.exchange.Connected() == 1 })
	system := prose(9, 1300)
	for i := range 4 {
		body := chatOf(message{"system", system}, message{"user", prose(20+i, 12)})
		p := a.place(t, noBudget(bodyInput(body)))
		// The ids may be taught anywhere.
		if r := b.learn(t, p.GetPlacementId(), rendered([]byte(body)), nil, ""); !r.GetLearnt() {
			t.Fatal(r.GetReason())
		}
	}
	known := func(o *one) bool {
		req := noBudget(bodyInput(chatOf(message{"system", system}, message{"user", "new"})))
		req.Reserve = new(false)
		return o.place(t, req).GetBasis().GetInputSource() == "memo"
	}
	eventually(t, "the other coordinator knows the head", func() bool { return known(b) })
	c := startOneOf(t, "c-3", a)
	startTextOn(t, c)
	eventually(t, "a coordinator that starts knows it too", func() bool { return known(c) })
}

// startTextOn gives one more coordinator a worker of its own host.
func startTextOn(t *testing.T, o *one) {
	t.Helper()
	w := newTextWorker(0xb1)
	w.connect(t, o)
	eventually(t, "it has a worker", func() bool {
		ws, err := waypostv1.NewOperatorServiceClient(o.conn).ListWorkers(t.Context(), &waypostv1.ListWorkersRequest{})
		return err == nil && len(ws.GetWorkers()) == 1 && o.Joined()
	})
}

// What waits, and what may be taught, is bounded, and texts do not outlive the
// wait for their tokens.
func TestTextsAreBounded(t *testing.T) {
	o := startOne(t)
	startText(t, o)
	m := o.memos
	p := m.of("p")
	w := &work{}
	big := chatOf(message{"user", prose(10, 3000)})
	keyer := prefix.NewKeyer(testKey, prefix.Domain{})
	for i := range 3 * maxTextsWaiting {
		if _, err := w.text.readText(bodyInput(big)); err != nil {
			t.Fatal(err)
		}
		w.prompt = prompt{}
		if err := m.look(w, "p", keyer); err != nil {
			t.Fatal(err)
		}
		w.text.worker = "nobody/x/0"
		p.taughtBy(true)
		m.remember(w, fmt.Sprintf("pl_c1_%d", i), time.Now().Add(time.Hour))
	}
	m.ask.mu.Lock()
	waiting, size := len(m.ask.waiting), m.ask.bytes
	m.ask.mu.Unlock()
	if waiting > maxTextsWaiting || size > maxBytesWaiting {
		t.Errorf("%d texts of %d bytes wait", waiting, size)
	}
	for i := range 40 {
		m.mu.Lock()
		tp := m.taught[fmt.Sprintf("pl_c1_%d", i)]
		m.mu.Unlock()
		m.keep(tp, make([]uint32, maxTaughtTokens/8))
	}
	if m.tokens > maxTaughtTokens {
		t.Errorf("%d ids are kept", m.tokens)
	}
	for i := range memoPools + 5 {
		m.of(fmt.Sprint("pool-", i))
	}
	if n := len(m.all()); n > memoPools {
		t.Errorf("%d pools", n)
	}
	if p := m.of("one too many"); p != nil {
		t.Error("a pool more than the bound has a memo")
	}
	// One that is served is worth more than what was served once.
	if p := m.of(testModel); p == nil || len(m.all()) > memoPools {
		t.Errorf("a pool that is served has no memo for those that are not: %d pools", len(m.all()))
	}
}

func TestBadTextsAreNamed(t *testing.T) {
	o := startOne(t)
	startText(t, o)
	for field, in := range map[string]*waypostv1.Input{
		"input.prompt":       {Prompt: new("")},
		"input.body_json":    bodyInput("{"),
		"input.body_json ":   bodyInput(`{"prompt":[1,2]}`),
		"input.body_json  ":  bodyInput(`{"max_tokens":1}`),
		"input.body_json   ": bodyInput(`{"prompt":"x","messages":[]}`),
		"input":              bodyInput(`{"messages":[]}`),
		"input ":             bodyInput(`{"messages":[{"role":"user","content":1}, 5]}`),
	} {
		_, err := waypostv1.NewPlacementServiceClient(o.conn).Place(t.Context(), &waypostv1.PlaceRequest{Input: in})
		if got := api.FieldOf(err); err == nil || got != strings.TrimSpace(field) {
			t.Errorf("%s: error %v of field %q", field, err, got)
		}
	}
}

// lockedBuffer is a log that several write to.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// Neither text nor token ids reach the disk or the log, not even at debug and
// not even what is faulty.
func TestTextsStayInMemory(t *testing.T) {
	var log lockedBuffer
	testLogger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	defer func() { testLogger = nil }()
	dir := ""
	o := startOne(t, func(c *Config) { dir = c.StateDir })
	w := startText(t, o)
	w.allow()
	const secret = "xyzzyplugh"
	body := chatOf(message{"system", prose(40, 900)}, message{"user", secret + " " + prose(41, 300)})
	p := o.place(t, &waypostv1.PlaceRequest{Input: bodyInput(body), TokenizeBudgetMs: new(1000.)})
	ids := slices.Concat(rendered([]byte(body)), []uint32{4_123_456_789})
	answer := `{"role":"assistant","content":"` + secret + `"}`
	o.learn(t, p.GetPlacementId(), ids, ids[:20], answer)
	if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{
		PlacementId: p.PlacementId, Result: new("done"), PromptTokenIds: ids, OutputTokenIds: ids[:20], MessageJson: &answer,
	}); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{`{"messages":[{"role":"user","content":"` + secret + `}]}`, `{"prompt":["` + secret + `"]}`} {
		if _, err := waypostv1.NewPlacementServiceClient(o.conn).Place(t.Context(), &waypostv1.PlaceRequest{Input: bodyInput(bad)}); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("error %v", err)
		}
	}
	if r := o.learn(t, p.GetPlacementId(), nil, ids[:3], secret); strings.Contains(r.GetReason(), secret) {
		t.Errorf("reason %s", r.GetReason())
	}
	written := ""
	eventually(t, "the record is on disk", func() bool {
		written = ""
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			b, err := os.ReadFile(path)
			written += string(b)
			return err
		})
		return err == nil && strings.Contains(written, strings.TrimPrefix(p.GetPlacementId(), "pl_c1_"))
	})
	log.mu.Lock()
	logged := log.b.String()
	log.mu.Unlock()
	le := binary.LittleEndian.AppendUint32(nil, ids[len(ids)-1])
	for name, text := range map[string]string{"disk": written, "log": logged} {
		if strings.Contains(text, secret) || strings.Contains(text, "word40-") || strings.Contains(text, fmt.Sprint(ids[len(ids)-1])) || name == "disk" && strings.Contains(text, string(le)) {
			t.Errorf("text or ids are on the %s", name)
		}
	}
	if !strings.Contains(logged, "lane up") {
		t.Error("nothing is logged: the test shows nothing")
	}
}

// An engine that is asked for log probabilities of the prompt computes all of it,
// and one that is asked for several answers tells the reuse of the last: neither is
// taken for a wrong prediction.
func TestRequestsWhoseReuseSaysNothing(t *testing.T) {
	o := startOne(t)
	startText(t, o)
	with := func(field string) string {
		body := chatOf(message{"system", prose(1, 1500)}, message{"user", "hello there"})
		return strings.TrimSuffix(body, "}") + field + "}"
	}
	first := o.place(t, noBudget(bodyInput(with(""))))
	if r := o.learn(t, first.GetPlacementId(), rendered([]byte(with(""))), nil, ""); !r.GetLearnt() {
		t.Fatalf("not learnt: %s", r.GetReason())
	}
	report := func(p *waypostv1.Placement, cached uint32) *waypostv1.PlacementRecord {
		client := waypostv1.NewPlacementServiceClient(o.conn)
		if _, err := client.ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: new("done"), CachedTokens: &cached}); err != nil {
			t.Fatal(err)
		}
		resp, err := client.GetPlacement(t.Context(), &waypostv1.GetPlacementRequest{PlacementId: p.PlacementId})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetRecord()
	}
	for field, reported := range map[string]bool{``: true, `,"n":1`: true, `,"n":null`: true, `,"n":3`: false, `,"n":"3"`: true} {
		p := o.place(t, noBudget(bodyInput(with(field))))
		if n := p.GetExpected().GetReuseTokens(); n < 1400 {
			t.Errorf("%q: %d tokens expected", field, n)
		}
		if r := report(p, 1); (r.GetOutcome().CachedTokens != nil) != reported || !reported && r.GetReuseClass() != "not_reported" {
			t.Errorf("%q: outcome %v, class %s", field, r.GetOutcome(), r.GetReuseClass())
		}
	}
	for field, afresh := range map[string]bool{`,"prompt_logprobs":1`: true, `,"prompt_logprobs":0`: true, `,"prompt_logprobs":null`: false} {
		p := o.place(t, noBudget(bodyInput(with(field))))
		if got := p.GetExpected(); (got.GetReuseTokens() == 0) != afresh {
			t.Errorf("%q: %v expected", field, got)
		}
	}
}

// How long a text is, is guessed of texts before that were long enough to tell,
// and never as more tokens than bytes: neither small talk with much around it, nor
// tools, nor an engine that tells of a million tokens makes the next text too long
// to be placed.
func TestGuessedLengthIsSane(t *testing.T) {
	for name, c := range map[string]struct {
		body string
		ids  int
	}{
		"small talk":     {chatOf(message{"user", "hi"}), 400},
		"short texts":    {chatOf(message{"user", prose(1, 70)}), 600},
		"a long preface": {chatOf(message{"user", prose(1, 150)}), 4000},
		"tools":          {`{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f","description":"` + prose(1, 2000) + `"}}]}`, 2400},
		"a lying engine": {chatOf(message{"user", prose(1, 400)}), 1 << 18},
	} {
		t.Run(name, func(t *testing.T) {
			o := startOne(t)
			startText(t, o)
			for i := range 40 {
				p := o.place(t, noBudget(bodyInput(c.body)))
				if r := o.learn(t, p.GetPlacementId(), someIDs(uint32(i)<<20, c.ids), nil, ""); r.GetLearnt() == (c.ids == 1<<18) || r.GetLearnt() != (r.GetReason() == "") {
					t.Fatalf("%d tokens of %d bytes, learnt %t: %s", c.ids, len(c.body), r.GetLearnt(), r.GetReason())
				}
			}
			text := chatOf(message{"user", prose(2, 20_000)})
			w := &work{}
			if _, err := w.text.readText(bodyInput(text)); err != nil {
				t.Fatal(err)
			}
			err := o.memos.look(w, testModel, prefix.NewKeyer(testKey, prefix.Domain{}))
			if n := w.prompt.tokens; err != nil || n < len(text)/8 || n > len(text)/2 {
				t.Errorf("a text of %d bytes is taken for %d tokens: %v", len(text), n, err)
			}
		})
	}
}
