package llamacpp

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/llamacpp/slots"
)

// versions are those of the recordings of a real server.
var versions = []string{"b10434", "b11434"}

func recorded(t testing.TB, version, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", version, name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRecordedSlots(t *testing.T) {
	for _, v := range versions {
		page, err := parseSlots(recorded(t, v, "slots-after-turn1.resp.json"))
		if err != nil {
			t.Fatal(err)
		}
		want := []slots.Seen{{Tokens: -1}, {Tokens: -1}, {Tokens: -1}, {Tokens: 476, Task: 3}}
		if diff := cmp.Diff(want, page.seen); diff != "" || page.busy != 0 {
			t.Errorf("%s, %d busy: %s", v, page.busy, diff)
		}
		if page, err = parseSlots(recorded(t, v, "slots-busy.resp.json")); err != nil || page.busy != 4 {
			t.Errorf("%s: %d busy, %v", v, page.busy, err)
		}
		tokens := map[string]int{"b10434": 744, "b11434": 636}[v]
		if got, want := page.seen[0], (slots.Seen{Busy: true, Tokens: tokens, Prompt: 488, Task: 133}); got != want {
			t.Errorf("%s: %+v, want %+v", v, got, want)
		}
	}
}

func TestRecordedCounters(t *testing.T) {
	at := time.Unix(7, 0)
	for _, v := range versions {
		c := parseMetrics(recorded(t, v, "metrics-after.resp.txt"))
		l := c.load(at)
		if c.faults != 0 || l.Running == nil || *l.Running != 0 || l.Waiting == nil || *l.Waiting != 0 {
			t.Errorf("%s: %+v", v, l)
		}
		if l.PromptTokens == nil || *l.PromptTokens != 3284+5504 || *l.ComputedPromptTokens != 3284 || *l.GenerationTokens != 68 {
			t.Errorf("%s: prompt %v, computed %v, generated %v", v, l.PromptTokens, l.ComputedPromptTokens, l.GenerationTokens)
		}
		if busy := parseMetrics(recorded(t, v, "metrics-busy.resp.txt")); *busy.running.Count() != 4 || *busy.deferred.Count() != 2 {
			t.Errorf("%s: %+v", v, busy)
		}
	}
	// Before the cached tokens were counted, what the other counter counts is
	// not known.
	c := parseMetrics([]byte("llamacpp:prompt_tokens_total 10\nllamacpp:requests_processing -1\n"))
	if l := c.load(at); l.PromptTokens != nil || l.ComputedPromptTokens != nil || l.Running != nil || c.faults != 1 {
		t.Errorf("%+v, %d faults", l, c.faults)
	}
}

func TestRecordedFacts(t *testing.T) {
	for v, build := range map[string]string{"b10434": "b1-7e4c0a9", "b11434": ""} {
		var p props
		var m models
		if err := json.Unmarshal(recorded(t, v, "props.resp.json"), &p); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(recorded(t, v, "models.resp.json"), &m); err != nil {
			t.Fatal(err)
		}
		f, err := facts(&p, &m)
		if err != nil {
			t.Fatal(err)
		}
		if build != "" && f.Version != build || f.Version == "" {
			t.Errorf("%s: version %q", v, f.Version)
		}
		if f.Model != "tiny.gguf" || len(f.Aliases) != 0 || f.MaxRunning != 4 || f.MaxModelTokens != 4096 || f.BlockTokens != 16 || !f.Unordered {
			t.Errorf("%s: %+v", v, f)
		}
		if f.PoolBlocks != 0 {
			t.Error("what several slots hold together is not known")
		}
	}
}

func TestLiesAboutSlots(t *testing.T) {
	for _, text := range []string{
		`{}`, `[]`, `null`, `[{"id":1,"is_processing":false}]`, `[{"id":0}]`, `[{"id":0,"is_processing":false,"n_prompt_tokens":-3}]`,
		`[{"id":0,"is_processing":false,"n_prompt_tokens":9223372036854775807}]`, `[{"id":0,"is_processing":"no"}]`, `[{"id":0,"is_processing":false},{"id":0,"is_processing":false}]`,
	} {
		if page, err := parseSlots([]byte(text)); err == nil {
			t.Errorf("%s was read as %+v", text, page)
		}
	}
	if whole(new(int64(-1)), 10) != 0 || whole(new(int64(1<<62)), 10) != 0 || whole(new(int64(11)), 10) != 0 || whole(nil, 10) != 0 || whole(new(int64(7)), 10) != 7 {
		t.Error("a count that cannot be is not unknown")
	}
}

func TestStartMark(t *testing.T) {
	a, b := startMark("1518463437"), startMark("1518463438")
	if a == 0 || a == b || a != startMark(" 1518463437 ") || startMark("") != 0 {
		t.Errorf("%x, %x", a, b)
	}
}

func FuzzSlots(f *testing.F) {
	for _, v := range versions {
		f.Add(recorded(f, v, "slots-after-turn1.resp.json"))
		f.Add(recorded(f, v, "slots-busy.resp.json"))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		page, err := parseSlots(text)
		if err != nil {
			return
		}
		if len(page.seen) == 0 || len(page.seen) > slots.MaxSlots || page.busy > len(page.seen) {
			t.Errorf("%+v", page)
		}
		r := slots.New(slots.Options{Slots: len(page.seen)})
		r.Observe(page.seen)
		r.Observe(page.seen)
	})
}

func FuzzMetrics(f *testing.F) {
	for _, v := range versions {
		f.Add(recorded(f, v, "metrics-after.resp.txt"))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c := parseMetrics(text)
		l := c.load(time.Unix(1, 0))
		for _, v := range []*float64{l.PromptTokens, l.ComputedPromptTokens, l.GenerationTokens} {
			if v != nil && !(*v >= 0) {
				t.Errorf("%v", *v)
			}
		}
		for _, n := range []*int{l.Running, l.Waiting} {
			if n != nil && *n < 0 {
				t.Errorf("%d", *n)
			}
		}
	})
}

func FuzzFacts(f *testing.F) {
	for _, v := range versions {
		f.Add(recorded(f, v, "props.resp.json"), recorded(f, v, "models.resp.json"))
	}
	f.Fuzz(func(t *testing.T, propsText, modelsText []byte) {
		var p props
		var m models
		if json.Unmarshal(propsText, &p) != nil || json.Unmarshal(modelsText, &m) != nil {
			return
		}
		told, err := facts(&p, &m)
		if err != nil {
			return
		}
		if told.MaxRunning < 0 || told.MaxRunning > slots.MaxSlots || told.MaxModelTokens < 0 || told.MaxModelTokens > engine.MaxTokens {
			t.Errorf("%+v", told)
		}
	})
}

// A list without end is refused before its members are read.
func TestSlotsWithoutEnd(t *testing.T) {
	if _, err := parseSlots([]byte("[" + strings.Repeat("0,", enginehttp.MaxMembers) + "0]")); !errors.Is(err, errSlots) || !errors.Is(err, enginehttp.ErrTooMany) {
		t.Errorf("error %v", err)
	}
}
