package profile

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// exchange is one recorded question with its answer: one object, or the lines
// of a stream.
type exchange struct {
	Kind     Kind
	Name     string
	Method   string
	Path     string
	Request  json.RawMessage
	Status   int
	Response json.RawMessage
	Lines    []string
}

func exchanges(t *testing.T) (out []exchange) {
	t.Helper()
	b, err := os.ReadFile("testdata/exchanges.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		var x exchange
		if err := json.Unmarshal(line, &x); err != nil {
			t.Fatal(err)
		}
		out = append(out, x)
	}
	return out
}

// shape is the paths of a JSON value with the types at them; null is of any.
func shape(v any, at string, out map[string]string) map[string]string {
	switch v := v.(type) {
	case map[string]any:
		out[at] = "object"
		for k, x := range v {
			shape(x, at+"."+k, out)
		}
	case []any:
		out[at] = "list"
		for _, x := range v {
			shape(x, at+"[]", out)
		}
	case nil:
		out[at] = "null"
	default:
		out[at] = fmt.Sprintf("%T", v)
	}
	return out
}

// differences are the paths that one of two shapes has and the other has not,
// or has as another type.
func differences(want, got map[string]string) (lacks, wrong []string) {
	for p, t := range want {
		switch g, ok := got[p]; {
		case !ok:
			lacks = append(lacks, p)
		case g != t && g != "null" && t != "null":
			wrong = append(wrong, fmt.Sprintf("%s is %s, the engine's %s", p, g, t))
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok && !underNull(want, p) {
			wrong = append(wrong, p+" is the emulator's alone")
		}
	}
	slices.Sort(lacks)
	slices.Sort(wrong)
	return lacks, wrong
}

// underNull says that a path is within something that the engine said null of.
func underNull(want map[string]string, p string) bool {
	for i := range p {
		if p[i] == '.' && want[p[:i]] == "null" {
			return true
		}
	}
	return false
}

func decoded(t *testing.T, b []byte) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	return v
}

func runEngine(t *testing.T, o Options) *Engine {
	t.Helper()
	e, err := Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func send(t *testing.T, e *Engine, method, path string, body []byte) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, e.URL()+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// partial are the answers of which the emulator has a part: everything in it
// must be the engine's.
var partial = map[string]bool{"server_info": true, "props": true, "models": true, "slots-after-turn1": true, "completion-tokens": true}

// The same questions in the recorded order get answers of the recorded status
// and shape.
func TestRecordedExchanges(t *testing.T) {
	engines := map[Kind]*Engine{}
	for _, k := range []Kind{SGLang, LlamaCpp} {
		o, err := Of(k, "")
		if err != nil {
			t.Fatal(err)
		}
		o.Model, o.MaxModelTokens, o.Speed, o.Topic = "tiny", 4096, 1000, "kv@sgl"
		engines[k] = runEngine(t, o)
	}
	for _, x := range exchanges(t) {
		body := x.Request
		if x.Name == "err-too-long" {
			body, _ = json.Marshal(map[string]any{"messages": []any{map[string]any{"role": "user", "content": strings.Repeat("x", 9000)}}, "max_tokens": 4})
		}
		status, got := send(t, engines[x.Kind], x.Method, x.Path, body)
		if status != x.Status {
			t.Errorf("%s %s: status %d, the engine's %d: %s", x.Kind, x.Name, status, x.Status, got)
			continue
		}
		if x.Lines != nil {
			compareStreams(t, x, got)
			continue
		}
		lacks, wrong := differences(shape(decoded(t, x.Response), "", map[string]string{}), shape(decoded(t, []byte(got)), "", map[string]string{}))
		if partial[x.Name] {
			lacks = nil
		}
		if len(lacks)+len(wrong) > 0 {
			t.Errorf("%s %s: lacks %v; %v", x.Kind, x.Name, lacks, wrong)
		}
	}
}

// compareStreams compares the shape of the last chunks: of the end of the
// answer, and of the usage if there is one.
func compareStreams(t *testing.T, x exchange, got string) {
	t.Helper()
	chunks := func(lines []string) (out []any) {
		for _, l := range lines {
			if data, ok := strings.CutPrefix(l, "data: {"); ok {
				out = append(out, decoded(t, []byte("{"+data)))
			}
		}
		return out
	}
	want, have := chunks(x.Lines), chunks(strings.Split(got, "\n"))
	if !strings.HasSuffix(strings.TrimSpace(got), "data: [DONE]") || len(have) < 3 {
		t.Errorf("%s: %s", x.Name, got)
		return
	}
	for i := 1; i <= 2; i++ {
		_, wrong := differences(shape(want[len(want)-i], "", map[string]string{}), shape(have[len(have)-i], "", map[string]string{}))
		if d := cmp.Diff([]string(nil), wrong); d != "" {
			t.Errorf("%s, chunk %d from the end: %s", x.Name, i, d)
		}
	}
}

// Every series of a page is one that the engine has.
func TestSeriesAreTheEngines(t *testing.T) {
	b, err := os.ReadFile("testdata/series.txt")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		known[strings.TrimSpace(line)] = true
	}
	for _, k := range []Kind{SGLang, LlamaCpp} {
		o, err := Of(k, "")
		if err != nil {
			t.Fatal(err)
		}
		_, page := send(t, runEngine(t, o), "GET", "/metrics", nil)
		n := 0
		for s := bufio.NewScanner(strings.NewReader(page)); s.Scan(); {
			if line := s.Text(); !strings.HasPrefix(line, "#") {
				name, _, _ := strings.Cut(strings.ReplaceAll(line, "{", " "), " ")
				if n++; !known[name] {
					t.Errorf("%s: %s is no series of the engine", k, name)
				}
			}
		}
		if n < 8 {
			t.Errorf("%s: %d series", k, n)
		}
	}
}

func TestOptionsNameTheField(t *testing.T) {
	for _, test := range []struct {
		o    Options
		says string
	}{
		{Options{}, "Kind"},
		{Options{Kind: SGLang, PageTokens: 5000}, "PageTokens"},
		{Options{Kind: SGLang, PoolTokens: 20}, "PoolTokens"},
		{Options{Kind: SGLang, Layout: 9}, "Layout"},
		{Options{Kind: SGLang, Speed: -1}, "Speed"},
		{Options{Kind: TensorRTLLM, Hash: "md5"}, "Hash"},
	} {
		if _, err := Start(test.o); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%+v: %v, want %s", test.o, err, test.says)
		}
	}
	if _, err := Of(SGLang, "9"); err == nil || !strings.Contains(err.Error(), "0.5.18") {
		t.Errorf("%v: want the versions there are", err)
	}
}

// Slots busy with other requests wait their turn, and a prefix of a busy slot
// serves nobody else.
func TestBusySlotGivesNoCredit(t *testing.T) {
	c := newSlotCache(slotOptions{slots: 2, similarity: .1})
	prompt := make([]uint32, 100)
	for i := range prompt {
		prompt[i] = uint32(i)
	}
	h, _ := c.begin(prompt, -1, true)
	c.end(&h, append(prompt, 7))
	first, ok := c.begin(prompt, -1, true)
	if !ok || first.cached != 99 {
		t.Fatalf("%+v", first)
	}
	second, ok := c.begin(prompt, -1, true)
	if !ok || second.cached != 0 {
		t.Fatalf("%+v", second)
	}
	if _, ok := c.begin(prompt, -1, true); ok {
		t.Error("a third request got a slot")
	}
}
