package workload

import (
	"math"
	"math/rand/v2"
)

// lengths is a log-normal distribution of lengths in tokens, cut at both ends.
type lengths struct {
	median, spread float64 // spread is the standard deviation of the logarithm
	least, most    int
}

func (l lengths) draw(rng *rand.Rand) int { return l.at(rng.NormFloat64()) }

// at is the length that is deviations off the middle.
func (l lengths) at(deviations float64) int {
	n := int(l.median * math.Exp(l.spread*deviations))
	return min(max(n, l.least), l.most)
}

// profile is the constants of a synthetic workload.
type profile struct {
	// shares of sessions; the rest are agents
	chats, documents float64

	system, question, answer lengths // of chats
	turns                    float64 // mean turns of a chat
	thinkMs                  float64 // mean pause of a person
	retry                    float64 // probability that a turn is asked again in other words

	document, passage, reading lengths // text, question, answer
	questions                  float64 // mean questions about a document

	tools, result, thought lengths // of agents: first text, tool result, answer
	steps                  float64 // mean steps of an agent
	toolMs                 float64 // mean duration of a tool call
	fork, edit             float64 // probabilities per step
	forkSteps              float64 // mean steps of a fork
}

// The constants are fitted: together with the engines of testbed/bench they give
// the hit rates, churn and run lengths that the design was measured with.
var profiles = map[Profile]profile{
	Mix: {
		chats: .275, documents: .66,
		system: lengths{1500, .6, 200, 6000}, question: lengths{450, .9, 20, 8000}, answer: lengths{320, .6, 10, 1500},
		turns: 2, thinkMs: 12_000, retry: .3,
		document: lengths{6800, .6, 1500, 30_000}, passage: lengths{120, .6, 20, 1000}, reading: lengths{240, .5, 10, 1000},
		questions: 2,
		tools:     lengths{6000, .4, 2000, 16_000}, result: lengths{500, .9, 20, 8000}, thought: lengths{130, .6, 10, 1000},
		steps: 12, toolMs: 2500, fork: .07, edit: .10, forkSteps: 5,
	},
	Chat: {
		chats:  1,
		system: lengths{900, .6, 100, 4000}, question: lengths{840, .9, 20, 8000}, answer: lengths{300, .6, 10, 1500},
		turns: 1.4, thinkMs: 15_000, retry: .06,
	},
}

// decodeMsPerToken is about how fast answers come; the next turn waits for it.
const decodeMsPerToken = 25

// branch is one line of requests that continue each other.
type branch struct {
	context []Segment
	ms      float64 // when its next request arrives
	turn    int
}

// writer makes the requests of one session.
type writer struct {
	g     *Generator
	s     Session
	rng   *rand.Rand
	dst   []Request
	names uint64
	branch
}

// text is a new piece of text that nothing else has.
func (w *writer) text(tokens int) Segment {
	w.names++
	return Segment{Name: mix(mix(w.s.ID) + w.names), Tokens: tokens}
}

// ask sends the context as a prompt and returns the answer.
func (w *writer) ask(d lengths) Segment {
	answer := w.text(d.draw(w.rng))
	w.dst = append(w.dst, Request{
		ArrivalMs: w.ms, Prompt: prompt(append([]Segment(nil), w.context...)), OutputTokens: answer.Tokens,
		Answer: prompt([]Segment{answer}), Conversation: w.s.ID, Turn: w.turn,
	})
	w.turn++
	return answer
}

func prompt(s []Segment) *SegmentPrompt {
	return &SegmentPrompt{Segments: s, FirstToken: SyntheticFirst, TokenCount: SyntheticCount}
}

// pass lets the answer's tokens and a pause go by.
func (w *writer) pass(answer Segment, meanMs float64) {
	w.ms += float64(answer.Tokens)*decodeMsPerToken + w.rng.ExpFloat64()*meanMs
}

// times draws how often something is done, at least once.
func (w *writer) times(mean float64) int {
	return 1 + int(math.Log(1-w.rng.Float64())/math.Log(1-1/max(mean, 1+1e-9)))
}

func (w *writer) chat() {
	p := &w.g.shape
	for range w.times(p.turns) {
		before := len(w.context)
		w.context = append(w.context, w.text(p.question.draw(w.rng)))
		answer := w.ask(p.answer)
		if w.rng.Float64() < p.retry {
			w.pass(answer, p.thinkMs)
			w.context = append(w.context[:before], w.text(p.question.draw(w.rng)))
			answer = w.ask(p.answer)
		}
		w.context = append(w.context, answer)
		w.pass(answer, p.thinkMs)
	}
}

// readDocument asks about a document, each time from its end.
func (w *writer) readDocument() {
	p := &w.g.shape
	for range w.times(p.questions) {
		w.context = append(w.context[:1], w.text(p.passage.draw(w.rng)))
		w.pass(w.ask(p.reading), p.thinkMs)
	}
}

func (w *writer) runAgent() {
	p := &w.g.shape
	w.context = append(w.context, w.text(p.question.draw(w.rng)))
	for range w.times(p.steps) {
		w.step()
		switch x := w.rng.Float64(); {
		case x < p.fork:
			w.forkOff()
		case x < p.fork+p.edit:
			w.editContext()
		}
	}
}

// step is one thought of an agent and the result of the tool it calls.
func (w *writer) step() {
	p := &w.g.shape
	answer := w.ask(p.thought)
	w.pass(answer, p.toolMs)
	w.context = append(w.context, answer, w.text(p.result.draw(w.rng)))
}

// forkOff lets two or three agents go on from the present context at once, each
// with an order of its own. Their reports enter the context.
func (w *writer) forkOff() {
	p := &w.g.shape
	from, end := w.branch, w.ms
	var reports []Segment
	for range 2 + w.rng.IntN(2) {
		w.branch = branch{context: append([]Segment(nil), from.context...), ms: from.ms}
		w.context = append(w.context, w.text(p.passage.draw(w.rng)))
		for range w.times(p.forkSteps) {
			w.step()
		}
		end = max(end, w.ms)
		reports = append(reports, w.text(p.reading.draw(w.rng)))
	}
	w.branch = from
	w.ms = end
	w.context = append(w.context, reports...)
}

// editContext replaces what lies between an early place and the latest steps
// by a short text, as agents do when their context gets long.
func (w *writer) editContext() {
	if len(w.context) < 8 {
		return
	}
	from := 2 + w.rng.IntN(len(w.context)/2-1)
	kept := append([]Segment(nil), w.context[len(w.context)-3:]...)
	w.context = append(append(w.context[:from:from], w.text(w.g.shape.reading.draw(w.rng))), kept...)
}
