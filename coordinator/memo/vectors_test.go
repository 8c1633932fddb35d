package memo

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
)

// vectorKey is the key 00..0f of testdata/vectors.txt.
var vectorKey = Key{0x0706050403020100, 0x0f0e0d0c0b0a0908}

// The file states what another implementation must compute: a body (x*N stands
// for N times x) and the hash of each unit.
func TestVectors(t *testing.T) {
	b, err := os.ReadFile("testdata/vectors.txt")
	if err != nil {
		t.Fatal(err)
	}
	cases := 0
	var name, kind, body, prompt string
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSuffix(line, "\n")
		word, rest, _ := strings.Cut(line, " ")
		switch word {
		case "#", "":
		case "case":
			name, body, prompt = rest, "", ""
		case "chat", "completion":
			kind, body = word, strings.ReplaceAll(rest, "x*2500", strings.Repeat("x", 2500))
		case "prompt":
			if err := json.Unmarshal([]byte(rest), &prompt); err != nil {
				t.Fatal(err)
			}
		case "units":
			cases++
			var rd Reader
			var r *Request
			if kind == "chat" {
				r, err = rd.Chat(vectorKey, "p", 1, []byte(body))
			} else {
				r, err = rd.Completion(vectorKey, "p", 1, []byte(body), prompt)
			}
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			var got []string
			for _, u := range r.units {
				got = append(got, fmt.Sprintf("%016x", u.hash))
			}
			if g := strings.Join(got, " "); g != rest {
				t.Errorf("%s:\n got %s\nwant %s", name, g, rest)
			}
		default:
			t.Fatalf("unknown line %q", line)
		}
	}
	if cases < 6 {
		t.Errorf("%d cases", cases)
	}
}

func chat(t testing.TB, body string) *Request {
	t.Helper()
	var rd Reader
	r, err := rd.Chat(vectorKey, "p", 1, []byte(body))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return r
}

func tip(r *Request) uint64 { return r.units[len(r.units)-1].hash }

func TestCanonicalForm(t *testing.T) {
	const base = `{"model":"m","messages":[{"role":"user","content":"é"}]}`
	for name, c := range map[string]struct {
		other string
		equal bool
	}{
		"white space":             {" {\n\"model\" : \"m\", \"messages\": [ { \"role\":\"user\" ,\t\"content\":\"é\" } ] } ", true},
		"order of fields":         {`{"messages":[{"role":"user","content":"é"}],"model":"m"}`, true},
		"null is absent":          {`{"model":"m","tools":null,"messages":[{"role":"user","name":null,"content":"é"}]}`, true},
		"escaped":                 {`{"model":"m","messages":[{"role":"user","content":"\u00e9"}]}`, true},
		"fields of a placement":   {`{"model":"m","session_id":"pl_c1_x","id_slot":3,"kv_transfer_params":{},"messages":[{"role":"user","content":"é"}]}`, true},
		"neutral field":           {`{"model":"m","temperature":0.5,"stream":true,"messages":[{"role":"user","content":"é"}]}`, true},
		"unknown field":           {`{"model":"m","invented":1,"messages":[{"role":"user","content":"é"}]}`, false},
		"kwargs":                  {`{"model":"m","chat_template_kwargs":{"a":1},"messages":[{"role":"user","content":"é"}]}`, false},
		"list is not string":      {`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"é"}]}]}`, false},
		"order within a message":  {`{"model":"m","messages":[{"content":"é","role":"user"}]}`, false},
		"trailing space":          {`{"model":"m","messages":[{"role":"user","content":"é "}]}`, false},
		"another model":           {`{"model":"n","messages":[{"role":"user","content":"é"}]}`, false},
		"reasoning is not naming": {`{"model":"m","messages":[{"role":"user","reasoning":"é"}]}`, false},
	} {
		if got := tip(chat(t, c.other)) == tip(chat(t, base)); got != c.equal {
			t.Errorf("%s: equal %v, want %v", name, got, c.equal)
		}
	}
	params := func(order string) uint64 {
		return tip(chat(t, `{"messages":[{"role":"user","content":"x"}],"tools":[{"parameters":{`+order+`}}]}`))
	}
	if params(`"a":{},"b":{}`) == params(`"b":{},"a":{}`) {
		t.Error("the order of keys within parameters is lost")
	}
	if tip(chat(t, `{"messages":[{"role":"user","content":"a\"\\\n\u0001\u001f\/\ud83d\ude00\ud800"}]}`)) != tip(chat(t, `{"messages":[{"role":"user","content":"a\u0022\u005c\u000a\u0001\u001F/😀\uD800"}]}`)) {
		t.Error("escapes that stand for the same text differ")
	}
	var rd Reader
	completion, err := rd.Completion(vectorKey, "p", 1, nil, "x")
	if err != nil {
		t.Fatal(err)
	}
	if tip(completion) == tip(chat(t, `{"messages":[{"role":"user","content":"x"}]}`)) || completion.units[0].hash == chat(t, `{"messages":[{"role":"user","content":"x"}]}`).units[0].hash {
		t.Error("a chat and a completion are one rendering")
	}
}

// A late system message may be pulled to the front: it counts for the head.
func TestLateSystemMessageChangesTheHead(t *testing.T) {
	a := chat(t, `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]}`)
	for _, r := range []string{"system", "developer"} {
		b := chat(t, `{"messages":[{"role":"user","content":"x"},{"role":"`+r+`","content":"z"}]}`)
		if a.units[1].hash == b.units[1].hash {
			t.Errorf("a late %s message leaves what is before it alone", r)
		}
	}
}

func TestConversationIsHeadAndFirstUserMessage(t *testing.T) {
	one := chat(t, `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}]}`)
	two := chat(t, `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"},{"role":"assistant","content":"a"},{"role":"user","content":"v"}]}`)
	other := chat(t, `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"v"}]}`)
	if one.Conversation() != two.Conversation() || one.Conversation() == other.Conversation() {
		t.Error("a conversation is not known by its first user message")
	}
}

func TestBadBodiesAreRefused(t *testing.T) {
	deep := strings.Repeat("[", 200) + strings.Repeat("]", 200)
	for _, body := range []string{
		``, `[]`, `{`, `{}`, `{"messages":[]}`, `{"messages":{}}`, `{"messages":[1]}`, `{"messages":["x"]}`, `{"messages":[{"role":"user"}]`,
		`{"messages":[{"role":"user","content":"x"}]} x`, `{"messages":[{"role":"user","content":"\x"}]}`, `{"messages":[{"role":"user","content":"` + "\n" + `"}]}`,
		`{"messages":[{"role":"user","content":01}]}`, `{"messages":[{"role":"user","content":tru}]}`, `{"messages":[{"role":"user","content":` + deep + `}]}`,
		`{"messages":[{"role":"user" "content":"x"}]}`, `{"a":1,}`, `{"messages":[{"role":"user","content":"\u12"}]}`,
	} {
		var rd Reader
		if _, err := rd.Chat(vectorKey, "p", 1, []byte(body)); err == nil {
			t.Errorf("%.60s accepted", body)
		}
	}
	var rd Reader
	_, err := rd.Chat(vectorKey, "p", 1, []byte(`{"messages":[{"role":"user","content":"secret}]}`))
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("error %v quotes the text", err)
	}
	if _, err := rd.Completion(vectorKey, "p", 1, nil, ""); err == nil {
		t.Error("an empty prompt is accepted")
	}
}

func TestReadingIsReadingTwice(t *testing.T) {
	const body = `{"model":"m","tools":[{"f":1}],"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}]}`
	var rd Reader
	first, err := rd.Chat(vectorKey, "p", 1, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rd.Completion(vectorKey, "p", 1, []byte(`{"x":1}`), strings.Repeat("y ", 5000)); err != nil {
		t.Fatal(err)
	}
	again, err := rd.Chat(vectorKey, "p", 1, []byte(body))
	if err != nil || tip(again) != tip(first) || len(again.units) != len(first.units) {
		t.Errorf("read again: %v", err)
	}
}

func TestKeyDisclosesNothing(t *testing.T) {
	if s := fmt.Sprintf("%v %+v %#v", vectorKey, vectorKey, vectorKey); strings.ContainsAny(s, "0123456789") {
		t.Errorf("printed as %q", s)
	}
}
