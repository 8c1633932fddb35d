package workload

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"time"
)

// Profile names a synthetic workload.
type Profile uint8

// The profiles.
const (
	// Mix is chats under 200 system prompts, questions about 4,000 documents,
	// and agents that fork and edit their context. Prompts and documents are
	// drawn by Zipf's law.
	Mix Profile = iota + 1
	// Chat is short chats only, under the same system prompts.
	Chat
)

// String names the profile.
func (p Profile) String() string {
	switch p {
	case Mix:
		return "mix"
	case Chat:
		return "chat"
	}
	return "no profile"
}

// The catalogues that sessions draw from.
const (
	systemPrompts = 200
	documents     = 4000 // read on shapeWorkers
	agentKinds    = 24
)

// shapeWorkers is the number of workers for which the profiles are shaped.
const shapeWorkers = 16

// item is a text that many sessions begin with. Items of all catalogues are
// numbered through.
type item struct {
	text Segment
	// share of all sessions that begin with it.
	share float64
}

// Session is one conversation, one reading of a document, or one agent with
// its forks: requests that depend on each other.
type Session struct {
	// ID decides everything in the session but its start.
	ID uint64
	// StartMs is when the first request arrives, in ms from the start.
	StartMs float64
	// Item is what the prompts of the session begin with.
	Item int
}

// Generator makes sessions and their requests. It is safe for concurrent use.
type Generator struct {
	profile Profile
	shape   profile
	seed    uint64
	// documents is the size of their catalogue.
	documents int
	items     []item
	// cumulated shares of the items
	upTo               []float64
	requestsPerSession float64
}

// The token ids of synthetic prompts: each takes three bytes in msgpack, so that raw
// event streams are not made longer than those of ordinary text.
const (
	SyntheticFirst = 1000
	SyntheticCount = 64000
)

// NewGenerator returns the generator of a profile for 16 workers. The same seed
// gives the same items and the same sessions.
func NewGenerator(p Profile, seed uint64) (*Generator, error) {
	return NewFleetGenerator(p, seed, shapeWorkers)
}

// NewFleetGenerator returns the generator of a profile for a number of workers.
// Above 16 the documents grow with it, so that what one worker reads and holds
// stays alike: the same 4,000 documents would nearly all fit in the caches of a
// thousand workers.
func NewFleetGenerator(p Profile, seed uint64, workers int) (*Generator, error) {
	if p != Mix && p != Chat {
		return nil, fmt.Errorf("%w: profile %d: want Mix or Chat", ErrOptions, p)
	}
	g := &Generator{profile: p, shape: profiles[p], seed: seed, documents: documents * max(workers, shapeWorkers) / shapeWorkers}
	g.addItems(chatKind, systemPrompts, g.shape.chats, g.shape.system)
	g.addItems(documentKind, g.documents, g.shape.documents, g.shape.document)
	g.addItems(agentKind, agentKinds, 1-g.shape.chats-g.shape.documents, g.shape.tools)
	sum := 0.0
	for _, it := range g.items {
		sum += it.share
		g.upTo = append(g.upTo, sum)
	}
	g.measure()
	return g, nil
}

// Items is the number of texts that sessions begin with.
func (g *Generator) Items() int { return len(g.items) }

// Share is the share of sessions that begin with an item.
func (g *Generator) Share(item int) float64 { return g.items[item].share }

// IsDocument tells documents from system prompts and agents' first texts.
func (g *Generator) IsDocument(item int) bool { return g.kindOf(item) == documentKind }

// Cost is a rough number of requests that a session with an item has.
func (g *Generator) Cost(item int) float64 {
	switch g.kindOf(item) {
	case chatKind:
		return g.shape.turns * (1 + g.shape.retry)
	case documentKind:
		return g.shape.questions
	}
	return g.shape.steps * (1 + 2.5*g.shape.fork*g.shape.forkSteps)
}

type kind uint8

const (
	chatKind kind = iota
	documentKind
	agentKind
)

// kindOf tells the catalogue of an item.
func (g *Generator) kindOf(item int) kind {
	switch {
	case item < systemPrompts:
		return chatKind
	case item < systemPrompts+g.documents:
		return documentKind
	}
	return agentKind
}

// zipf is the exponent of all catalogues: item number k is drawn in proportion
// to 1/k^zipf.
const zipf = 1.0

// addItems adds a catalogue whose items together are begun with by share of
// the sessions.
func (g *Generator) addItems(k kind, n int, share float64, d lengths) {
	sum := 0.0
	for i := range n {
		sum += math.Pow(float64(i+1), -zipf)
	}
	for i := range n {
		// Lengths are spread evenly over the ranks and do not depend on the seed:
		// the few most popular items would make the workload a matter of luck.
		_, at := math.Modf((float64(i) + .5) * math.Phi)
		g.items = append(g.items, item{
			text:  Segment{Name: mix(mix(g.seed^uint64(k)<<32) + uint64(i)), Tokens: d.at(math.Sqrt2 * math.Erfinv(2*at-1))},
			share: share * math.Pow(float64(i+1), -zipf) / sum,
		})
	}
}

// measured is how many sessions the mean number of requests is taken over.
const measured = 1 << 14

// measure finds how many requests a session has on average.
func (g *Generator) measure() {
	var list []Request
	n := 0
	for i := range uint64(measured) {
		list = g.Append(list[:0], g.session(mix(i), 0))
		n += len(list)
	}
	g.requestsPerSession = float64(n) / measured
}

func (g *Generator) session(id uint64, startMs float64) Session {
	rng := rand.New(rand.NewPCG(id, 4))
	return Session{ID: id, StartMs: startMs, Item: g.drawItem(rng.Float64() * g.upTo[len(g.upTo)-1])}
}

// drawItem finds the first item whose cumulated share is above x.
func (g *Generator) drawItem(x float64) int {
	low, high := 0, len(g.upTo)-1
	for low < high {
		if m := (low + high) / 2; g.upTo[m] > x {
			high = m
		} else {
			low = m + 1
		}
	}
	return low
}

// Sessions yields sessions in order of their start, at a rate that gives
// requestsPerSecond once as many end as begin. The first ones begin at 0: caches
// are cold then, and sessions that were under way already would bring their
// whole context to them at once.
func (g *Generator) Sessions(requestsPerSecond float64, duration time.Duration) iter.Seq[Session] {
	return func(yield func(Session) bool) {
		rng := rand.New(rand.NewPCG(g.seed, 5))
		endMs := float64(duration) / float64(time.Millisecond)
		perMs := requestsPerSecond / 1000 / g.requestsPerSession
		id := mix(g.seed ^ 0xa5a5a5a5)
		for at := rng.ExpFloat64() / perMs; at < endMs; at += rng.ExpFloat64() / perMs {
			id++
			if !yield(g.session(mix(id), at)) {
				return
			}
		}
	}
}

// Requests is the whole workload of duration in order of arrival.
func (g *Generator) Requests(requestsPerSecond float64, duration time.Duration) ([]Request, error) {
	if !(requestsPerSecond > 0) || duration <= 0 || requestsPerSecond*duration.Seconds() > 16*maxSampled {
		return nil, fmt.Errorf("%w: %v requests/s for %v: want more than 0, and at most %d requests", ErrOptions, requestsPerSecond, duration, 16*maxSampled)
	}
	endMs := float64(duration) / float64(time.Millisecond)
	var out []Request
	for s := range g.Sessions(requestsPerSecond, duration) {
		from := len(out)
		out = g.Append(out, s)
		kept := out[:from]
		for _, r := range out[from:] {
			if r.ArrivalMs < endMs {
				kept = append(kept, r)
			}
		}
		out = kept
	}
	byArrival(out)
	return out, nil
}

// Append appends a session's requests to dst. Those of one branch are in order
// of arrival; branches follow each other.
func (g *Generator) Append(dst []Request, s Session) []Request {
	w := writer{
		g: g, s: s, rng: rand.New(rand.NewPCG(s.ID, 6)), dst: dst,
		branch: branch{context: []Segment{g.items[s.Item].text}, ms: s.StartMs},
	}
	switch g.kindOf(s.Item) {
	case chatKind:
		w.chat()
	case documentKind:
		w.readDocument()
	case agentKind:
		w.runAgent()
	}
	return w.dst
}
