package emulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
)

// tokenize makes one token of each byte.
func tokenize(text string) []uint32 {
	tokens := make([]uint32, len(text))
	for i := range len(text) {
		tokens[i] = uint32(text[i])
	}
	return tokens
}

// detokenize is the inverse; ids that are no byte become the replacement
// character, the end token nothing.
func detokenize(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		switch {
		case t < 256:
			b.WriteByte(byte(t))
		case t != endToken:
			b.WriteRune('\uFFFD')
		}
	}
	return b.String()
}

// chatMessage is one message of a chat.
type chatMessage struct {
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	ToolCalls json.RawMessage `json:"tool_calls"`
}

// rendering is the part of a chat request that decides its tokens.
type rendering struct {
	Messages             []chatMessage   `json:"messages"`
	Tools                json.RawMessage `json:"tools"`
	AddGenerationPrompt  *bool           `json:"add_generation_prompt"`
	ContinueFinalMessage bool            `json:"continue_final_message"`
}

var (
	errBothPrompts = badRequest("", "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
	errNoMessages  = badRequest("messages", "messages must not be empty")
)

// render is the chat template; the package comment has it.
func (r rendering) render() (string, error) {
	generate := r.AddGenerationPrompt == nil || *r.AddGenerationPrompt
	if r.AddGenerationPrompt == nil && r.ContinueFinalMessage {
		generate = false
	}
	if generate && r.ContinueFinalMessage {
		return "", errBothPrompts
	}
	if len(r.Messages) == 0 {
		return "", errNoMessages
	}
	var b strings.Builder
	if tools := compact(r.Tools); tools != "" {
		writeMessage(&b, "tools", tools, true)
	}
	for i, m := range r.Messages {
		text, err := m.text()
		if err != nil {
			return "", err
		}
		if calls := compact(m.ToolCalls); calls != "" {
			text += "\n" + calls
		}
		open := r.ContinueFinalMessage && i == len(r.Messages)-1
		writeMessage(&b, m.Role, text, !open)
	}
	if generate {
		b.WriteString("<|im_start|>assistant\n")
	}
	return b.String(), nil
}

func writeMessage(b *strings.Builder, role, text string, end bool) {
	b.WriteString("<|im_start|>")
	b.WriteString(role)
	b.WriteString("\n")
	b.WriteString(text)
	if end {
		b.WriteString("<|im_end|>\n")
	}
}

// text is the message's content: a string, null, or parts of text joined by
// line ends.
func (m chatMessage) text() (string, error) {
	content := bytes.TrimSpace(m.Content)
	if len(content) == 0 || bytes.Equal(content, []byte("null")) {
		return "", nil
	}
	if content[0] == '"' {
		var s string
		err := json.Unmarshal(content, &s)
		return s, err
	}
	var parts []struct{ Type, Text string }
	if err := json.Unmarshal(content, &parts); err != nil {
		return "", errors.New("content of a message must be a string or a list of parts")
	}
	texts := make([]string, len(parts))
	for i, p := range parts {
		if p.Type != "text" {
			return "", errors.New("only content parts of type text are served")
		}
		texts[i] = p.Text
	}
	return strings.Join(texts, "\n"), nil
}

func compact(raw json.RawMessage) string {
	if len(raw) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return ""
	}
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		return ""
	}
	return b.String()
}

// generator makes the answer to a prompt: bytes of a small alphabet, and after
// a length that depends on the prompt the end token, unless it is ignored.
type generator struct {
	seed    uint64
	natural int
}

const alphabet = "etaoinshrdlucmfwypvbgkjqxz      "

func newGenerator(prompt []uint32, sample, meanTokens int, ignoreEnd bool) generator {
	const prime = 1099511628211 // of FNV-1a
	seed := uint64(14695981039346656037)
	for _, t := range prompt {
		seed = (seed ^ uint64(t)) * prime
	}
	g := generator{seed: mix(seed + uint64(sample))}
	if !ignoreEnd {
		g.natural = 1 + int(mix(g.seed)%uint64(2*meanTokens-1))
	}
	return g
}

// token is the generated token i, from 0.
func (g generator) token(i int) (uint32, bool) {
	if g.natural > 0 && i >= g.natural-1 {
		return endToken, true
	}
	return uint32(alphabet[mix(g.seed+uint64(i)+1)%uint64(len(alphabet))]), false
}

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
