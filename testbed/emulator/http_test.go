package emulator

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// exchange is a recorded HTTP exchange.
type exchange struct {
	N        string
	Note     string
	Method   string
	Path     string
	Headers  map[string]string
	Request  json.RawMessage
	Status   int
	Response json.RawMessage
	Text     *string
	SSE      []string
}

func recordedExchanges(t *testing.T) []exchange {
	t.Helper()
	f, err := os.Open("testdata/exchanges.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var list []exchange
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var x exchange
		if err := json.Unmarshal(lines.Bytes(), &x); err != nil {
			t.Fatal(err)
		}
		list = append(list, x)
	}
	return list
}

// shape describes JSON without its values: the paths of all members, in order,
// with their types. Lists are described by their first item.
func shape(raw []byte) []string {
	d := json.NewDecoder(strings.NewReader(string(raw)))
	d.UseNumber()
	var out []string
	var walk func(path string, keep bool)
	walk = func(path string, keep bool) {
		token, err := d.Token()
		if err != nil {
			out = append(out, err.Error())
			return
		}
		note := func(kind string) {
			if keep {
				out = append(out, path+" "+kind)
			}
		}
		switch v := token.(type) {
		case json.Delim:
			note(v.String())
			for i := 0; d.More(); i++ {
				if v == '{' {
					key, _ := d.Token()
					walk(fmt.Sprintf("%s.%v", path, key), keep)
				} else {
					walk(path+"[]", keep && i == 0)
				}
			}
			_, _ = d.Token()
		case nil:
			note("null")
		default:
			note(fmt.Sprintf("%T", v))
		}
	}
	walk("", true)
	return out
}

// TestAnswersHaveTheRecordedShape sends the recorded requests to the emulator:
// status, fields, their order and their types must be the real engine's.
func TestAnswersHaveTheRecordedShape(t *testing.T) {
	for _, x := range recordedExchanges(t) {
		t.Run(x.N+" "+x.Path+" "+x.Note, func(t *testing.T) {
			o := small()
			if strings.HasPrefix(x.N, "lora") {
				o.Adapters = []Adapter{{Name: "tiny-lora"}}
			}
			e, c := start(t, o), client(t)
			var headers []string
			for k, v := range x.Headers {
				headers = append(headers, k, v)
			}
			var body any
			if x.Request != nil {
				body = strings.Replace(string(x.Request), "(a text of more tokens than fit)", strings.Repeat("x", 3000), 1)
			}
			got := send(t, c, x.Method, e.URL()+x.Path, body, headers...)
			if got.status != x.Status {
				t.Fatalf("status %d, the engine's was %d; body %s", got.status, x.Status, got.body)
			}
			switch {
			case x.SSE != nil:
				compareStreams(t, x.SSE, got.body)
			case x.Text != nil:
				if got.body != *x.Text {
					t.Errorf("body %q, the engine's was %q", got.body, *x.Text)
				}
			case x.Path == "/kv_event_sources":
				compareShapes(t, sorted(shape(x.Response)), sorted(shape([]byte(got.body))))
			case strings.HasSuffix(x.Path, "completions") || strings.HasPrefix(x.Path, "/v1"):
				compareShapes(t, shape(x.Response), shape([]byte(got.body)))
			default:
				compareShapes(t, sorted(shape(x.Response)), sorted(shape([]byte(got.body))))
			}
		})
	}
}

// sorted ignores the order of members where the emulator writes maps.
func sorted(s []string) []string {
	slices.Sort(s)
	return s
}

func compareShapes(t *testing.T, want, got []string) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("shape (-engine +emulator):\n%s", d)
	}
}

// compareStreams compares each kind of chunk once, in order of appearance.
func compareStreams(t *testing.T, recorded []string, body string) {
	t.Helper()
	kinds := func(lines []string) []string {
		var out []string
		for _, l := range lines {
			if l == "" {
				continue
			}
			s := l
			if data, ok := strings.CutPrefix(l, "data: {"); ok {
				s = strings.Join(shape([]byte("{"+data)), "\n")
			}
			if len(out) == 0 || out[len(out)-1] != s {
				out = append(out, s)
			}
		}
		return out
	}
	compareShapes(t, kinds(recorded), kinds(strings.Split(body, "\n")))
}

func TestRecordedErrorTexts(t *testing.T) {
	e, c := start(t, small()), client(t)
	for _, x := range recordedExchanges(t) {
		if x.Status == 200 || x.N == "80" || x.N == "67" || x.N == "103" || x.Path == "/no_such_path" || strings.Contains(x.Path, "render") {
			continue // validation texts name the input, which the emulator leaves out; 103 counts tokens
		}
		var want object
		if err := json.Unmarshal(x.Response, &want); err != nil {
			t.Fatal(err)
		}
		var headers []string
		for k, v := range x.Headers {
			headers = append(headers, k, v)
		}
		got := send(t, c, x.Method, e.URL()+x.Path, string(x.Request), headers...).json(t)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s %s (-engine +emulator):\n%s", x.N, x.Path, d)
		}
	}
}

func TestAdaptersAreModelsOfTheirBase(t *testing.T) {
	o := small()
	o.Adapters = []Adapter{{Name: "tiny-lora", Path: "/adapters/one"}}
	e, c := start(t, o), client(t)
	list := at(t, send(t, c, "GET", e.URL()+"/v1/models", nil).json(t), "data").([]any)
	if len(list) != 2 || at(t, list[0], "max_model_len") != 2048. || at(t, list[0], "parent") != nil {
		t.Fatalf("models %v", list)
	}
	if a := list[1]; at(t, a, "id") != "tiny-lora" || at(t, a, "parent") != "tiny" || at(t, a, "root") != "/adapters/one" || at(t, a, "max_model_len") != nil {
		t.Errorf("adapter %v", a)
	}
	r := send(t, c, "POST", e.URL()+"/v1/completions", object{"model": "tiny-lora", "prompt": ids(1, 40), "max_tokens": 1})
	if at(t, r.json(t), "model") != "tiny-lora" {
		t.Errorf("answer %s", r.body)
	}
	if n := cachedTokens(t, complete(t, c, e, ids(1, 40), 1)); n != 0 {
		t.Errorf("%v tokens of the adapter's cache served the base model", n)
	}
	if page := send(t, c, "GET", e.URL()+"/metrics", nil).body; !strings.Contains(page, `running_lora_adapters=""`) || !strings.Contains(page, `max_lora="1"`) {
		t.Error("the metrics do not tell of adapters")
	}
}

func TestTokenizeIsOneTokenPerByte(t *testing.T) {
	e, c := start(t, small()), client(t)
	got := send(t, c, "POST", e.URL()+"/tokenize", object{"prompt": "Fähre", "return_token_strs": true}).json(t)
	if d := cmp.Diff([]any{70., 195., 164., 104., 114., 101.}, at(t, got, "tokens")); d != "" || at(t, got, "count") != 6. {
		t.Errorf("tokens %v, count %v", at(t, got, "tokens"), at(t, got, "count"))
	}
	back := send(t, c, "POST", e.URL()+"/detokenize", object{"tokens": at(t, got, "tokens")}).json(t)
	if at(t, back, "prompt") != "Fähre" {
		t.Errorf("detokenized %v", back)
	}
}

func TestChatTemplate(t *testing.T) {
	yes, no := true, false
	part := `[{"type":"text","text":"a"},{"type":"text","text":"b"}]`
	for _, test := range []struct {
		name string
		in   rendering
		want string
	}{
		{"plain", rendering{Messages: []chatMessage{{Role: "user", Content: json.RawMessage(`"hi"`)}}}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"},
		{"parts", rendering{Messages: []chatMessage{{Role: "user", Content: json.RawMessage(part)}}, AddGenerationPrompt: &no}, "<|im_start|>user\na\nb<|im_end|>\n"},
		{"continued", rendering{Messages: []chatMessage{{Role: "user", Content: json.RawMessage(`"hi"`)}, {Role: "assistant", Content: json.RawMessage(`"The"`)}}, ContinueFinalMessage: true}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe"},
		{"tools", rendering{Messages: []chatMessage{{Role: "assistant", ToolCalls: json.RawMessage(`[ {"id": 1} ]`)}}, Tools: json.RawMessage(`[ 1 ]`), AddGenerationPrompt: &yes}, "<|im_start|>tools\n[1]<|im_end|>\n<|im_start|>assistant\n\n[{\"id\":1}]<|im_end|>\n<|im_start|>assistant\n"},
	} {
		got, err := test.in.render()
		if err != nil || got != test.want {
			t.Errorf("%s: %q, %v; want %q", test.name, got, err, test.want)
		}
	}
}

// A conversation whose answers come back as text hits what they left.
func TestConversationReusesItsAnswers(t *testing.T) {
	e, c := start(t, small()), client(t)
	messages := []object{{"role": "user", "content": strings.Repeat("a long question ", 10)}}
	want := 0.
	for turn := range 3 {
		got := send(t, c, "POST", e.URL()+"/v1/chat/completions", object{"model": "tiny", "messages": messages, "max_tokens": 50, "ignore_eos": true}).json(t)
		prompt := at(t, got, "usage", "prompt_tokens").(float64)
		if n := cachedTokens(t, got); n != want {
			t.Errorf("turn %d: %v tokens cached, want %v", turn, n, want)
		}
		want = float64(int(prompt+50-1) / 32 * 32)
		messages = append(messages, object{"role": "assistant", "content": at(t, got, "choices", 0, "message", "content")}, object{"role": "user", "content": "and then?"})
	}
}

func TestAnswersAreDeterministic(t *testing.T) {
	a, b, c := start(t, small()), start(t, small()), client(t)
	body := object{"prompt": ids(1000, 50), "max_tokens": 300, "n": 2, "return_token_ids": true}
	var texts []any
	for _, e := range []*Engine{a, b, a} {
		got := send(t, c, "POST", e.URL()+"/v1/completions", body).json(t)
		texts = append(texts, []any{at(t, got, "choices", 0, "token_ids"), at(t, got, "choices", 1, "token_ids"), at(t, got, "choices", 0, "finish_reason")})
	}
	if !cmp.Equal(texts[0], texts[1]) || !cmp.Equal(texts[0], texts[2]) {
		t.Error("equal prompts give different answers")
	}
	if first := texts[0].([]any); cmp.Equal(first[0], first[1]) {
		t.Error("two samples are equal")
	}
}

// The numbers are those of the recorded engine: 100 prompt tokens on a cold
// cache, three samples.
func TestSeveralSamples(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	got := send(t, c, "POST", e.URL()+"/v1/completions", object{"prompt": ids(1000, 100), "max_tokens": 40, "n": 3, "ignore_eos": true}).json(t)
	if n := cachedTokens(t, got); n != 96 {
		t.Errorf("cached %v: want the last sample's 96", n)
	}
	if u := at(t, got, "usage"); at(t, u, "prompt_tokens") != 100. || at(t, u, "completion_tokens") != 120. {
		t.Errorf("usage %v", u)
	}
	stored := 0
	for stored < 6 {
		for _, v := range sub.batch().events {
			stored += len(v.(map[string]any)["block_hashes"].([]any))
		}
	}
	if stored != 6 {
		t.Errorf("%d blocks stored: want 3 of the prompt and one per sample", stored)
	}
}

func TestSeveralPrompts(t *testing.T) {
	e, c := start(t, small()), client(t)
	got := send(t, c, "POST", e.URL()+"/v1/completions", object{"prompt": []any{ids(1000, 10), ids(2000, 20)}, "max_tokens": 2, "n": 2, "ignore_eos": true, "return_token_ids": true}).json(t)
	choices := at(t, got, "choices").([]any)
	if len(choices) != 4 || len(at(t, choices[3], "prompt_token_ids").([]any)) != 20 || at(t, got, "usage", "prompt_tokens") != 30. {
		t.Errorf("answer %v", got)
	}
}

func TestRefusedRequests(t *testing.T) {
	o := small()
	o.APIKey = "secret"
	e, c := start(t, o), client(t)
	for _, test := range []struct {
		name, path, body string
		status           int
		says             string
	}{
		{"no JSON", "/v1/completions", `{"prompt": `, 400, "json_invalid"},
		{"no prompt", "/v1/completions", `{}`, 400, "prompt"},
		{"empty prompt", "/v1/completions", `{"prompt": []}`, 400, "prompt"},
		{"empty text", "/v1/completions", `{"prompt": ""}`, 400, "non-empty"},
		{"negative id", "/v1/completions", `{"prompt": [1, -1]}`, 400, "integers from 0"},
		{"id of 2^32", "/v1/completions", `{"prompt": [4294967296]}`, 400, "integers from 0"},
		{"id beyond the vocabulary", "/v1/completions", `{"prompt": [200000]}`, 400, "out of vocabulary"},
		{"mixed list", "/v1/completions", `{"prompt": [1, "a"]}`, 400, "integers"},
		{"object", "/v1/completions", `{"prompt": {}}`, 400, "prompt must be"},
		{"n of 0", "/v1/completions", `{"prompt": [1], "n": 0}`, 400, "n must be"},
		{"too many answers", "/v1/completions", `{"prompt": [1], "n": 1000}`, 400, "n must be"},
		{"max_tokens of 0", "/v1/completions", `{"prompt": [1], "max_tokens": 0}`, 400, "max_tokens"},
		{"max_tokens as text", "/v1/completions", `{"prompt": [1], "max_tokens": "8"}`, 400, "body.max_tokens"},
		{"too long with its answer", "/v1/completions", `{"prompt": [1], "max_tokens": 2048}`, 400, "2048 output tokens"},
		{"options without stream", "/v1/completions", `{"prompt": [1], "stream_options": {}}`, 400, "stream=True"},
		{"no messages", "/v1/chat/completions", `{}`, 400, "messages"},
		{"image", "/v1/chat/completions", `{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}`, 400, "type text"},
		{"both prompts", "/v1/chat/completions", `{"messages": [{"role": "user"}], "add_generation_prompt": true, "continue_final_message": true}`, 400, "Cannot set both"},
		{"sleep level", "/sleep?level=3", ``, 400, "level"},
	} {
		r := send(t, c, "POST", e.URL()+test.path, test.body, "Authorization", "Bearer secret")
		if r.status != test.status || !strings.Contains(r.body, test.says) {
			t.Errorf("%s: status %d, %s; want %d and %q", test.name, r.status, r.body, test.status, test.says)
		}
	}
	if r := send(t, c, "GET", e.URL()+"/v1/models", nil); r.status != 401 {
		t.Errorf("status %d without the key: want 401", r.status)
	}
	if r := send(t, c, "POST", e.URL()+"/emulator/fault", `{"fault":"stall"}`); r.status != 404 {
		t.Errorf("status %d for faults that are not enabled: want 404", r.status)
	}
}

func TestDetailsCanBeHidden(t *testing.T) {
	o := small()
	o.HidePromptTokensDetails, o.HideServerInfo = true, true
	e, c := start(t, o), client(t)
	if got := complete(t, c, e, ids(1, 40), 1); at(t, got, "usage", "prompt_tokens_details") != nil {
		t.Errorf("usage %v: want no details", at(t, got, "usage"))
	}
	for _, path := range []string{"/reset_prefix_cache", "/sleep"} {
		if r := send(t, c, "POST", e.URL()+path, nil); r.status != 404 {
			t.Errorf("%s: status %d, want 404", path, r.status)
		}
	}
}

func TestStreamInterval(t *testing.T) {
	o := small()
	o.StreamInterval = 10
	e, c := start(t, o), client(t)
	body := send(t, c, "POST", e.URL()+"/v1/completions", object{"prompt": ids(1, 5), "max_tokens": 35, "ignore_eos": true, "stream": true, "return_token_ids": true}).body
	tokens := 0
	var sizes []int
	for line := range strings.Lines(body) {
		if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: {"); ok {
			var v object
			if err := json.Unmarshal([]byte("{"+data), &v); err != nil {
				t.Fatal(err)
			}
			n := len(at(t, v, "choices", 0, "token_ids").([]any))
			tokens += n
			sizes = append(sizes, n)
		}
	}
	if tokens != 35 || sizes[0] != 1 || len(sizes) > 5 {
		t.Errorf("chunks of %v tokens: want 1, then 10 or more each, 35 in all", sizes)
	}
}

func FuzzCompletionRequest(f *testing.F) {
	for _, s := range []string{
		`{"model":"tiny","prompt":[1,2,3],"max_tokens":4}`, `{"prompt":"text","n":2,"stream":true,"stream_options":{"include_usage":true}}`,
		`{"prompt":[[1,2],[3]],"cache_salt":"a"}`, `{"prompt":["a","b"]}`, `{"prompt":[4294967296]}`, `{"prompt":[ 1 , 2 ]}`, `{"prompt":[01]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"tools":[1]}`,
	} {
		f.Add([]byte(s))
	}
	e, err := Start(Options{Model: "tiny", NoEvents: true})
	if err != nil {
		f.Fatal(err)
	}
	defer e.Close()
	l := e.current()
	f.Fuzz(func(t *testing.T, body []byte) {
		var q completionRequest
		if decodeBody(body, &q) == nil && q.Prompt != nil {
			r := httptest.NewRequest("POST", "/v1/completions", nil)
			g, err := l.check(r, q.commonRequest, q.Prompt, q.MaxTokens)
			if err == nil && (g.maxTokens < 1 || g.samples < 1 || len(l.coreRequests(r, g)) > maxChoices) {
				t.Fatalf("a request of %d samples and %d tokens passed", g.samples, g.maxTokens)
			}
		}
		var chat chatRequest
		if decodeBody(body, &chat) == nil {
			_, _ = chat.render()
		}
		var tok tokenizeRequest
		if decodeBody(body, &tok) == nil {
			_, _ = tok.text()
		}
	})
}

// tokenIDs must read what encoding/json reads, and nothing else.
func FuzzTokenIDs(f *testing.F) {
	for _, s := range []string{`[]`, `[1,2]`, `[ 1 ,2 ]`, `[01]`, `[1,]`, `[4294967295]`, `[4294967296]`, `[1e3]`, `[-0]`, `[99999999999999999999]`, `[null]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := tokenIDs(b)
		var want []uint32
		var raw []json.RawMessage
		wantErr := json.Unmarshal(b, &want)
		if wantErr == nil && json.Unmarshal(b, &raw) == nil {
			for _, r := range raw {
				if string(r) == "null" { // encoding/json reads null as 0
					return
				}
			}
		}
		if len(b) > 0 && (b[0] == ' ' || b[len(b)-1] == ' ' || b[0] == '\n' || b[len(b)-1] == '\n' || b[0] == '\t' || b[len(b)-1] == '\t' || b[0] == '\r' || b[len(b)-1] == '\r') || string(b) == "null" {
			return // the caller has trimmed
		}
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%q: error %v, encoding/json says %v", b, err, wantErr)
		}
		if err == nil && !slices.Equal(got, want) {
			t.Fatalf("%q: %v, encoding/json says %v", b, got, want)
		}
	})
}
