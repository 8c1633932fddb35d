package engines

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// Message is one message of a chat.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Chat is a conversation that grows.
type Chat struct {
	// Messages are those so far; the last one is the user's.
	Messages []Message
	turns    int
}

// Writer makes chats that share a few system prompts. The same seed makes the
// same ones.
type Writer struct {
	rng     *rand.Rand
	systems []string
	n       int
}

// NewWriter makes a writer with as many system prompts, of the given length in
// words.
func NewWriter(seed uint64, systems, systemWords int) *Writer {
	w := &Writer{rng: rand.New(rand.NewPCG(seed, 1))}
	for i := range systems {
		w.systems = append(w.systems, fmt.Sprintf("You are assistant %d. %s", i, w.words(systemWords)))
	}
	return w
}

// Fork makes a writer with the same system prompts whose chats are others than
// those of a fork with another name.
func (w *Writer) Fork(name uint64) *Writer {
	return &Writer{rng: rand.New(rand.NewPCG(name, 2)), systems: w.systems}
}

// Rand is the writer's source of chance.
func (w *Writer) Rand() *rand.Rand { return w.rng }

// words are so many words.
func (w *Writer) words(n int) string {
	var b strings.Builder
	for range n {
		for range 2 + w.rng.IntN(6) {
			b.WriteByte("etaoinshrdlucmfwyp"[w.rng.IntN(18)])
		}
		b.WriteByte(' ')
	}
	return strings.TrimSpace(b.String())
}

// Begin begins a chat with a question of so many words.
func (w *Writer) Begin(words int) *Chat {
	w.n++
	system := w.systems[w.rng.IntN(len(w.systems))]
	return &Chat{Messages: []Message{{"system", system}, {"user", fmt.Sprintf("Chat %d: %s", w.n, w.words(words))}}}
}

// Continue adds an answer and the next question.
func (w *Writer) Continue(c *Chat, answer string, words int) {
	c.turns++
	c.Messages = append(c.Messages, Message{"assistant", answer}, Message{"user", w.words(words)})
}
