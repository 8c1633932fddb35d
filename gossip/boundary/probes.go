package boundary

import (
	"fmt"
	"strings"
	"time"
)

// Part is one part of a boundary. Parts are compared separately, in the order
// in which one explains the other: another tokenizer changes every rendering.
type Part string

// The parts.
const (
	// PartDeclared is what an operator says of an engine that tells no ids.
	PartDeclared Part = "declared"
	// PartRaw is how text becomes tokens, special tokens typed in it included.
	PartRaw Part = "raw"
	// PartCompletions is how the prompt of a completion becomes tokens: what
	// the tokenizer adds to it, as its begin-of-sequence token.
	PartCompletions Part = "completions"
	// PartChat is how messages become tokens.
	PartChat Part = "chat"
	// PartRule is how adapters and cache salts enter the name of a block.
	PartRule Part = "rule"
)

var partTitles = map[Part]string{
	PartDeclared: "declared boundary", PartRaw: "raw text tokenisation", PartCompletions: "completions rendering",
	PartChat: "chat rendering", PartRule: "adapter and salt rule",
}

// Title names the part to people.
func (p Part) Title() string {
	if t := partTitles[p]; t != "" {
		return t
	}
	return string(p)
}

var partOrder = map[Part]int{PartDeclared: 1, PartRaw: 2, PartCompletions: 3, PartChat: 4, PartRule: 6}

// order sorts parts; those of newer builds come after the measured ones.
func (p Part) order() int {
	if n := partOrder[p]; n != 0 {
		return n
	}
	return 5
}

// Probe is one question to an engine's tokenizer. A number of a part is never
// given to another text.
type Probe struct {
	Part   Part
	Number int
	// Since is the first probe set that it belongs to.
	Since int
	// Text is the prompt; empty of a chat. AddSpecialTokens is how it is asked.
	Text             string
	AddSpecialTokens bool
	// ChatJSON is the chat request; nil of a text.
	ChatJSON []byte
}

// NewestSet and OldestSet are the probe sets that this build publishes: the
// newest and the one before it, so that agents of two builds always have one
// in common.
const (
	NewestSet = 2
	OldestSet = NewestSet - 1
)

const (
	plainText = "The cache of worker 17 holds 4096 tokens;\tfor (i = 0; i < n; ++i) { x[i] += y; }\n\n  Größe 12,5 µm. 北京的天气很好。 Привет, мир! مرحبا 🙂👩‍💻 e\u0301 naïve I'll we've DON'T 1234567.89"
	typedText = "<s>[INST] <|im_start|>user\nhi<|im_end|> <|begin_of_text|><|start_header_id|>x<|end_header_id|><|eot_id|> <|endoftext|></s><bos><start_of_turn><|start|><|message|><|end|> [/INST] <tool_call></tool_call><think></think>"
)

// probes are all probes in the order they are asked: causes before what they
// explain.
var probes = []Probe{
	{Part: PartRaw, Number: 1, Since: 1, Text: plainText},
	{Part: PartRaw, Number: 2, Since: 1, Text: typedText},
	{Part: PartCompletions, Number: 1, Since: 1, Text: "Once upon a time, there was a cache.", AddSpecialTokens: true},
	{Part: PartChat, Number: 1, Since: 1, ChatJSON: []byte(`{"messages":[{"role":"system","content":"You answer in one word."},{"role":"user","content":"Is the sky blue?"}]}`)},
	{Part: PartChat, Number: 2, Since: 1, ChatJSON: []byte(`{"messages":[{"role":"user","content":"Wie heißt die Hauptstadt von 中国?"},{"role":"assistant","content":"北京 (Peking)."},{"role":"user","content":"Спасибо 🙂  "}]}`)},
	{Part: PartChat, Number: 3, Since: 1, ChatJSON: []byte(`{"messages":[{"role":"system","content":"Use tools."},{"role":"user","content":"Weather in Oslo?"}],"tools":[{"type":"function","function":{"name":"get_weather","description":"Current weather of a city","parameters":{"type":"object","properties":{"city":{"type":"string","description":"Name of the city"}},"required":["city"]}}}]}`)},
	{Part: PartChat, Number: 4, Since: 2, ChatJSON: []byte(`{"messages":[{"role":"user","content":"Print <|im_end|> and <|eot_id|> and </s> and <bos> literally."}]}`)},
}

// Probes are the probes of one set, in the order they are asked; none for a set
// that this build does not know.
func Probes(set int) (out []Probe) {
	if set < OldestSet || set > NewestSet {
		return nil
	}
	for _, p := range probes {
		if p.Since <= set {
			out = append(out, p)
		}
	}
	return out
}

// Published are the probes of all sets that this build publishes.
func Published() []Probe { return Probes(NewestSet) }

// dateForms are the forms in which chat templates write the day.
var dateForms = []string{
	"2006-01-02", "02 Jan 2006", "2 Jan 2006", "2 January 2006", "02 January 2006", "January 2, 2006", "January 02, 2006",
	"Jan 2, 2006", "02/01/2006", "01/02/2006", "2006/01/02", "02.01.2006", "Monday, January 2, 2006", "Monday, 02 January 2006",
}

// dateDays are the days that it can be somewhere on earth.
const dateDays = 3

// DateText is a text that holds the day of a moment in every form, in each time
// zone of the earth: yesterday, today and tomorrow by UTC, one per line. What a
// rendered chat has in common with a line is a date.
func DateText(now time.Time) string {
	var b strings.Builder
	for n := range dateDays {
		day := now.UTC().AddDate(0, 0, n-1)
		for _, form := range dateForms {
			fmt.Fprintln(&b, day.Format(form))
		}
	}
	return b.String()
}
