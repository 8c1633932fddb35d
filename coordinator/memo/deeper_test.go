package memo

import (
	"slices"
	"strings"
	"testing"
)

// A system text that was met with some tools is known with others, or with none,
// where a template was seen to write tools behind it, and only there.
func TestSystemTextsAreKnownWithOtherTools(t *testing.T) {
	none, some, other := []string(nil), []string{someText(rng(90), 40)}, []string{someText(rng(91), 60)}
	for _, c := range []struct {
		render      string
		before, now []string
		known       bool
	}{
		{"tools after the system text", none, some, true},
		{"tools after the system text", some, none, true},
		{"tools after the system text", some, other, true},
		{"a line in front if there are tools", some, other, true},
		{"a line in front if there are tools", none, some, false},
		{"a line in front if there are tools", some, none, false},
		{"append only", none, some, false},
		{"append only", some, none, false},
		{"append only", some, other, false},
	} {
		m, render := newMemo(t), rendererOf(c.render)
		pair := func(i int, before, now []string) (predicted, right int) {
			system := someText(rng(uint64(i)), 400)
			d := talk("system:"+system, "user:"+someText(rng(uint64(100+i)), 20))
			d.Tools = before
			teach(t, m, d, words(render(d)))
			d = talk("system:"+system, "user:"+someText(rng(uint64(200+i)), 20))
			d.Tools = now
			predicted, right, _ = teach(t, m, d, words(render(d)))
			return predicted, right
		}
		if !c.known {
			// That tools can be exchanged does not prove that they can be left out.
			for i := range 3 * classProof {
				pair(50+i, some, other)
			}
		}
		for i := range 3 * classProof {
			predicted, right := pair(i, c.before, c.now)
			if predicted != right {
				t.Errorf("%s, %d then %d tools, text %d: %d predicted, %d so", c.render, len(c.before), len(c.now), i, predicted, right)
			}
			if known := predicted > 200; known != (c.known && i >= classProof) {
				t.Errorf("%s, %d then %d tools, text %d: %d predicted of 400", c.render, len(c.before), len(c.now), i, predicted)
			}
		}
		if !c.known {
			continue
		}
		// Tools that begin alike do not belong to the system text.
		system, alike := someText(rng(300), 400), someText(rng(301), 200)
		for i, set := range [][]string{{alike, "a"}, {alike, "b"}, {"c"}} {
			d := talk("system:"+system, "user:"+someText(rng(uint64(302+i)), 5))
			d.Tools = set
			if predicted, right, _ := teach(t, m, d, words(render(d))); predicted != right {
				t.Errorf("%s: tools that begin alike, %d: %d predicted, %d so", c.render, i, predicted, right)
			}
		}
	}
}

// The messages behind a shared system text are long, and none begins like another:
// where it ends is known from the third on. What may be cut out or rewritten is no
// beginning.
func TestMessagesThatBeginUnalike(t *testing.T) {
	system := someText(rng(1), 600)
	most := len(words(" <|system|> " + system + " <|end|> <|user|>"))
	cut := func(d *dialogue) string {
		return each(d.Messages, func(_ int, m turn) string {
			if _, rest, ok := strings.Cut(m.Content, "</think>"); ok {
				m.Content = rest
			}
			m.Content = strings.TrimSpace(m.Content)
			return plain(m)
		}) + ask
	}
	alike := someText(rng(50), 80)
	for _, c := range []struct {
		name   string
		begins [3]string
		behind string
		exact  bool
	}{
		{"unalike", [3]string{"ships ", "trees ", "houses "}, "", true},
		{"alike", [3]string{alike + " ships ", alike + " trees ", alike + " houses "}, "", false},
		{"white space that is cut", [3]string{"", " ", "\n\t "}, alike, false},
		{"thoughts that are cut", [3]string{"<think>a</think>", "<think>b</think>", "<think>c</think>"}, alike, false},
		{"other letters", [3]string{"\u00a0", "\u2003", ""}, alike, false},
	} {
		m := newMemo(t)
		for i, begin := range c.begins {
			d := talk("system:"+system, "user:"+begin+c.behind+" "+someText(rng(uint64(10+i)), 300))
			teach(t, m, d, words(cut(d)))
		}
		predicted, right, _ := teach(t, m, talk("system:"+system, "user:none of these"), words(cut(talk("system:"+system, "user:none of these"))))
		if predicted != right || predicted > most || c.exact && predicted < most-48 {
			t.Errorf("%s: %d tokens predicted, %d so; %d are shared", c.name, predicted, right, most)
		}
	}
	// Thoughts are written before the text.
	m := newMemo(t)
	for i, thoughts := range []string{alike, alike, alike, "others"} {
		d := talk("user:"+system, "assistant:"+someText(rng(uint64(60+i)), 30), "tool:"+someText(rng(uint64(70+i)), 5))
		d.Messages[1].Reasoning = thoughts
		if predicted, right, _ := teach(t, m, d, words(appendOnly(d))); predicted != right {
			t.Errorf("thoughts that are alike, %d: %d tokens predicted, %d so", i, predicted, right)
		}
	}
}

// What prompts share that begin with some messages, those share that begin with
// these and more: long messages behind make no answer shorter.
func TestDeeperIsNotLess(t *testing.T) {
	m := newMemo(t)
	for i := range 2 * classProof {
		r := rng(uint64(i))
		d := talk("system:"+someText(r, 300), "user:"+someText(r, 200))
		open := words(appendOnly(d))
		teach(t, m, d, open)
		d.Messages = append(d.Messages, turn{Role: "assistant", Content: someText(r, 60)}, turn{Role: "user", Content: someText(r, 400)})
		teach(t, m, d, words(appendOnly(d)))
		d.Messages[3].Content = someText(r, 400)
		predicted, right, _ := teach(t, m, d, words(appendOnly(d)))
		if predicted != right || i >= classProof && predicted < len(open)-endTokens-2*pointTokens {
			t.Errorf("conversation %d: %d predicted, %d so, of the %d of the first turn", i, predicted, right, len(open))
		}
	}
	// What is learnt of a system text later counts behind it as well.
	system := someText(rng(50), 600)
	long := func(seed uint64, answer string) *dialogue {
		return talk("system:"+system, "user:go on", "assistant:"+answer, "user:"+someText(rng(seed), 300))
	}
	teach(t, m, long(51, "here"), words(appendOnly(long(51, "here"))))
	for i := range uint64(3) {
		d := talk("system:"+system, "user:"+someText(rng(52+i), 20))
		teach(t, m, d, words(appendOnly(d)))
	}
	teach(t, m, long(56, "here"), words(appendOnly(long(56, "here"))))
	if predicted, right, _ := teach(t, m, long(57, "there"), words(appendOnly(long(57, "there")))); predicted != right || predicted < 600-48 {
		t.Errorf("%d predicted, %d so, behind a system text of 600", predicted, right)
	}
}

// A prompt's last tokens are known of what goes on from there once a template was
// seen to keep them, and not where the answer takes their place.
func TestEndsOfPrompts(t *testing.T) {
	instead := func(d *dialogue) string {
		return strings.TrimSuffix(appendOnly(d), ask) + strings.Repeat(" <|say|>", endTokens)
	}
	for _, c := range []struct {
		name   string
		render func(*dialogue) string
		kept   bool
	}{{"kept", appendOnly, true}, {"replaced", instead, false}} {
		m := newMemo(t)
		for i := range 4 * classProof {
			r := rng(uint64(i))
			d := talk("user:" + someText(r, 100+i))
			open := words(c.render(d))
			teach(t, m, d, open)
			d.Messages = append(d.Messages, turn{Role: "assistant", Content: someText(r, 50)}, turn{Role: "user", Content: someText(r, 20)})
			predicted, right, _ := teach(t, m, d, words(c.render(d)))
			if predicted != right {
				t.Errorf("%s, conversation %d: %d predicted, %d so", c.name, i, predicted, right)
			}
			if whole := predicted == len(open)/pointTokens*pointTokens; whole != (c.kept && i >= classProof) {
				t.Errorf("%s, conversation %d: %d predicted of %d", c.name, i, predicted, len(open))
			}
		}
	}
}

// Of an end that was seen to be shared less, no more is told than that.
func TestLoweredEndStaysLowered(t *testing.T) {
	m := newMemo(t)
	for i := range 2 * classProof {
		r := rng(uint64(i))
		d := talk("user:" + someText(r, 100))
		teach(t, m, d, words(appendOnly(d)))
		d.Messages = append(d.Messages, turn{Role: "assistant", Content: "yes"}, turn{Role: "user", Content: "go on"})
		teach(t, m, d, words(appendOnly(d)))
	}
	d := talk("user:" + someText(rng(99), 200))
	ids := words(appendOnly(d))
	teach(t, m, d, ids)
	other := slices.Clone(ids)
	other[150]++
	teach(t, m, d, other)
	d.Messages = append(d.Messages, turn{Role: "assistant", Content: "yes"}, turn{Role: "user", Content: "go on"})
	if predicted, _, _ := teach(t, m, d, words(appendOnly(d))); predicted > 150 {
		t.Errorf("%d predicted, 150 were shared", predicted)
	}
}

// Prompts that have not even the words of their messages show that a template
// leaves out what it showed before, and open the breaker before anything is
// promised. What templates that append cut or drop does not count.
func TestPromptsWithoutTheWordsOfTheirMessages(t *testing.T) {
	for _, c := range []struct {
		name, body string
		render     func(i int) string
		opens      bool
	}{
		{"only the last message", `{"messages":[{"role":"user","content":"A"},{"role":"assistant","content":"B"},{"role":"user","content":"C"}]}`, func(int) string { return "C" }, true},
		{"all of it", `{"messages":[{"role":"user","content":"A"},{"role":"assistant","content":"B"},{"role":"user","content":"C"}]}`, func(int) string { return "A B C" }, false},
		{"a system text that is dropped", `{"messages":[{"role":"system","content":"A"},{"role":"system","content":"B"},{"role":"user","content":"C"}]}`, func(int) string { return "C" }, false},
		{"reasoning that is cut", `{"messages":[{"role":"user","content":"C"},{"role":"assistant","content":"yes","reasoning":"A B"},{"role":"user","content":"C"}]}`, func(int) string { return "C yes C" }, false},
		{"results that are dropped", `{"messages":[{"role":"user","content":"C"},{"role":"tool","content":"A B"},{"role":"user","content":"C"}]}`, func(int) string { return "C C" }, false},
		{"the client wants it shortened", `{"truncate_prompt_tokens":90,"messages":[{"role":"user","content":"A"},{"role":"assistant","content":"B"},{"role":"user","content":"C"}]}`, func(int) string { return "C" }, false},
	} {
		m := newMemo(t)
		for i := range 3 {
			texts := strings.NewReplacer("A", someText(rng(uint64(i)), 400), "B", someText(rng(uint64(100+i)), 400), "C", someText(rng(uint64(200+i)), 90))
			var rd Reader
			r, err := rd.Chat(vectorKey, "p", m.Epoch(), []byte(texts.Replace(c.body)))
			if err != nil {
				t.Fatal(err)
			}
			out := m.Learn(r, words(texts.Replace(c.render(i))), nil)
			if open, _, _ := m.Breaker(); open != (c.opens && i == 2) || out.BreakerChanged != open {
				t.Errorf("%s: after %d prompts: breaker open %v, changed %v", c.name, i+1, open, out.BreakerChanged)
			}
		}
	}
}

// What goes on from the end of another prompt is promised at length only once one
// such prediction was right; what has the same beginning is promised at once.
func TestLongContinuationsAreProvenFirst(t *testing.T) {
	m := newMemo(t)
	ask := func(d *dialogue) (given int) {
		given, _, _ = teach(t, m, d, words(appendOnly(d)))
		return given
	}
	for i := range 3 {
		first := talk("user:" + someText(rng(uint64(i)), 700))
		ask(first)
		if given := ask(first); given < 600 {
			t.Errorf("conversation %d: the same prompt again: %d tokens given", i, given)
		}
		other := talk("user:"+someText(rng(uint64(50+i)), 700), "assistant:"+someText(rng(uint64(60+i)), 9), "tool:x")
		ask(talk("user:" + someText(rng(uint64(50+i)), 700)))
		if given := ask(other); (given > 600) != (i > 0) {
			t.Errorf("conversation %d goes on: %d tokens given", i, given)
		}
	}
	if s := m.Stats(); s.Withheld != 1 || s.Wrong != 0 {
		t.Errorf("%+v", s)
	}
}

// What a class that was often wrong says of a prompt's beginning is not believed
// by way of the next message either.
func TestDistrustIsNotHandedOn(t *testing.T) {
	for _, wrong := range []int{0, 4} {
		m := newMemo(t)
		learn := func(ids []uint32, contents ...string) {
			var rd Reader
			q, err := rd.Chat(vectorKey, "p", m.Epoch(), talk(contents...).body())
			if err != nil {
				t.Fatal(err)
			}
			m.Learn(q, ids, nil)
		}
		render := func(contents ...string) []uint32 { return words(appendOnly(talk(contents...))) }
		// System texts whose tokens are others each time.
		for i := range wrong {
			contents := []string{"system:" + someText(rng(uint64(10+i)), 300), "user:hello"}
			learn(render(contents...), contents...)
			other := render(contents...)
			other[200]++
			learn(other, contents...)
		}
		// The bound of a message of few tokens for its letters reaches to the start.
		system, long := "system:"+someText(rng(1), 300), "user:"+strings.Repeat("letters", 400)
		for _, last := range []string{"user:hello", "user:hello", long} {
			learn(render(system, last), system, last)
		}
		for _, c := range []struct {
			last  string
			knows bool
		}{{"user:new", wrong == 0}, {long, wrong == 0}} {
			next := []string{system, c.last, "assistant:yes", "user:more"}
			predicted, right, _ := teach(t, m, talk(next...), render(next...))
			if predicted != right || predicted > 200 != c.knows {
				t.Errorf("%d wrong texts: %d tokens are predicted behind %.10s, %d so", wrong, predicted, c.last, right)
			}
		}
	}
}
