package memo

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"strings"
)

// Renderers that do what real chat templates do, on words: a token is the hash
// of a word, so texts share tokens where they share words.

// turn is one message of a conversation.
type turn struct {
	Role      string `json:"role"`
	Content   string `json:"content"`
	Reasoning string `json:"reasoning,omitempty"`
}

// dialogue is a request as a renderer sees it.
type dialogue struct {
	Model    string   `json:"model"`
	Tools    []string `json:"tools,omitempty"`
	Messages []turn   `json:"messages"`
}

func (d *dialogue) body() []byte {
	b, err := json.Marshal(d)
	if err != nil {
		panic(err)
	}
	return b
}

// words makes tokens of a text.
func words(text string) []uint32 {
	var ids []uint32
	for _, w := range strings.Fields(text) {
		h := fnv.New32a()
		_, _ = h.Write([]byte(w))
		ids = append(ids, h.Sum32())
	}
	return ids
}

func lastUser(ms []turn) int {
	for i := len(ms) - 1; i >= 0; i-- {
		if ms[i].Role == "user" {
			return i
		}
	}
	return -1
}

// renderer renders a dialogue as words; ask is what asks for the answer.
type renderer struct {
	name   string
	causal string // C1, C2 or C3
	render func(d *dialogue) string
}

const ask = " <|assistant|>"

func plain(m turn) string { return " <|" + m.Role + "|> " + m.Content + " <|end|>" }

func withReasoning(m turn) string {
	if m.Reasoning == "" {
		return plain(m)
	}
	return " <|" + m.Role + "|> <think> " + m.Reasoning + " </think> " + m.Content + " <|end|>"
}

func each(ms []turn, f func(i int, m turn) string) string {
	var b strings.Builder
	for i, m := range ms {
		b.WriteString(f(i, m))
	}
	return b.String()
}

func tools(d *dialogue) string {
	if len(d.Tools) == 0 {
		return ""
	}
	return " <|tools|> " + strings.Join(d.Tools, " ") + " <|/tools|>"
}

func appendOnly(d *dialogue) string {
	return tools(d) + each(d.Messages, func(_ int, m turn) string { return withReasoning(m) }) + ask
}

var renderers = []renderer{
	{"append only", "C1", appendOnly},
	{"tools after the system text", "C1", func(d *dialogue) string {
		return each(d.Messages, func(i int, m turn) string {
			if i == 0 && m.Role == "system" {
				return " <|system|> " + m.Content + tools(d) + " <|end|>"
			}
			if i == 0 {
				return tools(d) + withReasoning(m)
			}
			return withReasoning(m)
		}) + ask
	}},
	{"a line in front if there are tools", "C1", func(d *dialogue) string {
		front := ""
		if len(d.Tools) > 0 {
			front = " Environment: ipython"
		}
		return front + each(d.Messages, func(i int, m turn) string {
			if i == lastUser(d.Messages[:min(2, len(d.Messages))]) {
				return tools(d) + withReasoning(m)
			}
			return withReasoning(m)
		}) + ask
	}},
	{"cuts reasoning on close", "C2", func(d *dialogue) string {
		last := lastUser(d.Messages)
		return tools(d) + each(d.Messages, func(i int, m turn) string {
			if i < last {
				return plain(m)
			}
			return withReasoning(m)
		}) + ask
	}},
	{"empty think block in the last turn", "C2", func(d *dialogue) string {
		last := lastUser(d.Messages)
		return tools(d) + each(d.Messages, func(i int, m turn) string {
			if i > last && m.Role == "assistant" {
				return " <|assistant|> <think> </think> " + m.Content + " <|end|>"
			}
			return plain(m)
		}) + ask
	}},
	{"think in the generation prompt", "C1", func(d *dialogue) string {
		return tools(d) + each(d.Messages, func(_ int, m turn) string { return plain(m) }) + ask + " <think>"
	}},
	{"a date on the first line", "C1", func(d *dialogue) string { return " Today is 26 July 2024 ." + appendOnly(d) }},
	{"late system pulled to the front", "C1", func(d *dialogue) string {
		var front, rest []turn
		for _, m := range d.Messages {
			if m.Role == "system" {
				front = append(front, m)
			} else {
				rest = append(rest, m)
			}
		}
		return tools(d) + each(append(front, rest...), func(_ int, m turn) string { return withReasoning(m) }) + ask
	}},
	{"system text in the last user message", "C3", func(d *dialogue) string {
		system, last := "", lastUser(d.Messages)
		return each(d.Messages, func(i int, m turn) string {
			switch {
			case m.Role == "system":
				system = m.Content
				return ""
			case i == last:
				return " [INST] " + system + " " + m.Content + " [/INST]"
			}
			return plain(m)
		}) + ask
	}},
	{"only the last message", "C3", func(d *dialogue) string {
		return " <bos>" + plain(d.Messages[len(d.Messages)-1]) + ask
	}},
}

func rendererOf(name string) func(*dialogue) string {
	for _, r := range renderers {
		if r.name == name {
			return r.render
		}
	}
	panic(fmt.Sprintf("no renderer %q", name))
}
