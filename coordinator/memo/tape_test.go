package memo

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// tapeHead is the first line of a tape, see testdata/tape.py.
type tapeHead struct {
	Name, Kind, License string
	Texts               []string
}

type tapeLine struct {
	Conversation int
	Keep         int
	Add          []json.RawMessage
	Head         map[string]json.RawMessage
	Base, Share  int
	IDs          []uint32 `json:"ids"`
	Answer       []uint32
	Message      json.RawMessage
}

// readTape makes the requests of a tape.
func readTape(t testing.TB, r io.Reader) (tapeHead, []request) {
	t.Helper()
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	var head tapeHead
	if !lines.Scan() || json.Unmarshal(lines.Bytes(), &head) != nil || head.Name == "" {
		t.Fatalf("no tape: %v", lines.Err())
	}
	type conversation struct {
		head     map[string]json.RawMessage
		messages []json.RawMessage
	}
	talks := map[int]*conversation{}
	var out []request
	for lines.Scan() {
		var l tapeLine
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			t.Fatal(err)
		}
		c := talks[l.Conversation]
		if c == nil {
			c = &conversation{head: l.Head}
			talks[l.Conversation] = c
		}
		c.messages = c.messages[:l.Keep:l.Keep]
		for _, m := range l.Add {
			c.messages = append(c.messages, expand(t, m, head.Texts))
		}
		var ids []uint32
		if l.Base >= 0 {
			ids = append(ids, out[l.Base].ids[:l.Share]...)
		}
		ids = append(ids, l.IDs...)
		var b bytes.Buffer
		b.WriteString(`{"messages":[`)
		for i, m := range c.messages {
			if i > 0 {
				b.WriteByte(',')
			}
			b.Write(m)
		}
		b.WriteByte(']')
		for name, v := range c.head {
			b.WriteString(`,"` + name + `":`)
			b.Write(v)
		}
		b.WriteByte('}')
		out = append(out, request{conversation: l.Conversation, body: b.Bytes(), ids: ids, answerIDs: append(ids[:len(ids):len(ids)], l.Answer...), message: l.Message})
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return head, out
}

// expand puts a text in the place of its number.
func expand(t testing.TB, message json.RawMessage, texts []string) json.RawMessage {
	t.Helper()
	at := bytes.Index(message, []byte(`"content":"@`))
	if at < 0 {
		return message
	}
	at += len(`"content":"`)
	end := at + 1
	for message[end] >= '0' && message[end] <= '9' {
		end++
	}
	n, err := strconv.Atoi(string(message[at+1 : end]))
	if err != nil {
		t.Fatal(err)
	}
	text := AppendText(nil, texts[n])
	return append(append(append(json.RawMessage(nil), message[:at]...), text[1:len(text)-1]...), message[end:]...)
}

// tapeFigures are the figures to reach.
func tapeFigures(t *testing.T, head tapeHead, work []request) {
	t.Helper()
	p := replay{memos: []*Memo{newMemo(t)}, answers: true}
	got := p.run(t, work)
	open, _, opened := p.memos[0].Breaker()
	t.Logf("%-14s %s  %s, %d bytes per learnt request, breaker opened %d times", head.Name, head.Kind, got, p.memos[0].Bytes()/len(work), opened)
	if n := p.memos[0].Bytes() / len(work); n > 600 {
		t.Errorf("%d bytes per learnt request", n)
	}
	if head.Kind == "C3" {
		if !open || got.wrong > 3*int(opened) || got.overShare() > .01 {
			t.Errorf("breaker open %v, %d wrong answers, over %.4f; want it open after 3", open, got.wrong, got.overShare())
		}
		return
	}
	if got.cover() < .96 || got.overShare() > .001 {
		t.Errorf("cover %.4f, want 0.96; over %.5f, want at most 0.001", got.cover(), got.overShare())
	}
	check(t, p.memos[0])
	background := replay{memos: []*Memo{newMemo(t)}, above: 512}
	got = background.run(t, work)
	t.Logf("%-14s     background above 512 tokens: %.2f calls per request, %s", head.Name, float64(got.learnt)/float64(got.requests), got)
	if got.cover() < .94 || got.overShare() > .001 {
		t.Errorf("background above 512 tokens: cover %.4f, want 0.94; over %.5f", got.cover(), got.overShare())
	}
}

// A tape of the Qwen2.5 template and tokenizer (Apache-2.0).
func TestTape(t *testing.T) {
	f, err := os.Open("testdata/qwen2.5.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	head, work := readTape(t, z)
	if len(work) < 300 || head.License != "Apache-2.0" {
		t.Fatalf("%d requests, license %q", len(work), head.License)
	}
	tapeFigures(t, head, work)
}

// Tapes of more templates and tokenizers, made on the spot: they are not
// ours to ship. .ci/run memo makes them.
func TestTapesOfRealTemplates(t *testing.T) {
	dir := os.Getenv("WAYPOST_MEMO_TAPES")
	if dir == "" {
		t.Skip("WAYPOST_MEMO_TAPES names no folder of tapes: .ci/run memo renders them with Python's jinja2 and tokenizers")
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil || len(files) < 4 {
		t.Fatalf("%d tapes in WAYPOST_MEMO_TAPES, want at least 4; %v", len(files), err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".jsonl"), func(t *testing.T) {
			f, err := os.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			head, work := readTape(t, f)
			tapeFigures(t, head, work)
		})
	}
}
