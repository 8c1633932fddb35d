package workload

import (
	"bufio"
	"bytes"
	"cmp"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
)

// The blocks and time stamps of Mooncake's published traces.
const (
	MooncakeBlockTokens = 512
	MooncakeGroupMs     = 3000
)

const (
	maxLineBytes    = 4 << 20
	maxTraceLines   = 1 << 20
	maxLengthTokens = 1 << 24
)

//go:embed testdata/mooncake_conversation_sample.jsonl testdata/mooncake_conversations_whole.jsonl
var traces embed.FS

// ErrTrace is a trace that cannot be read.
var ErrTrace = errors.New("workload trace")

// ErrOptions is a wish that cannot be met.
var ErrOptions = errors.New("workload options")

// TraceRequest is one line of a trace.
type TraceRequest struct {
	TimestampMs  int64
	InputTokens  int
	OutputTokens int
	// Blocks name the prompt's blocks of MooncakeBlockTokens tokens; the last
	// may be partial. A name stands for its block and all before it.
	Blocks []uint64
}

// Trace is a recorded workload, in order of its time stamps.
type Trace struct {
	Requests []TraceRequest
}

// Sample is the trace that ships with the source: the first 600 requests of
// Mooncake's conversation trace, over 201 s.
func Sample() (*Trace, error) { return embedded("mooncake_conversation_sample.jsonl") }

// SampleConversations is the other cut: 570 requests that are whole
// conversations, as input for Trace.Conversations.
func SampleConversations() (*Trace, error) { return embedded("mooncake_conversations_whole.jsonl") }

func embedded(name string) (*Trace, error) {
	f, err := traces.Open("testdata/" + name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return ReadMooncake(f)
}

// ReadMooncake reads a trace in Mooncake's format: one JSON object a line.
func ReadMooncake(r io.Reader) (*Trace, error) {
	t := &Trace{}
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), maxLineBytes)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		if len(t.Requests) == maxTraceLines {
			return nil, fmt.Errorf("%w: more than %d requests", ErrTrace, maxTraceLines)
		}
		q, err := parseLine(lines.Bytes())
		if err != nil {
			return nil, fmt.Errorf("%w: line %d: %w", ErrTrace, n, err)
		}
		if k := len(t.Requests); k > 0 && q.TimestampMs < t.Requests[k-1].TimestampMs {
			return nil, fmt.Errorf("%w: line %d: timestamp %d is before that of the line above", ErrTrace, n, q.TimestampMs)
		}
		t.Requests = append(t.Requests, q)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTrace, err)
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("%w: no request in it", ErrTrace)
	}
	return t, nil
}

func parseLine(line []byte) (TraceRequest, error) {
	var q struct {
		Timestamp *int64   `json:"timestamp"`
		Input     *int     `json:"input_length"`
		Output    *int     `json:"output_length"`
		IDs       []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &q); err != nil {
		return TraceRequest{}, err
	}
	switch {
	case q.Timestamp == nil || *q.Timestamp < 0:
		return TraceRequest{}, errors.New("timestamp is missing or negative: want ms")
	case q.Input == nil || *q.Input < 1 || *q.Input > maxLengthTokens:
		return TraceRequest{}, fmt.Errorf("input_length is missing or not within 1 to %d", maxLengthTokens)
	case q.Output == nil || *q.Output < 0 || *q.Output > maxLengthTokens:
		return TraceRequest{}, fmt.Errorf("output_length is missing or not within 0 to %d", maxLengthTokens)
	}
	if want := blocksFor(*q.Input, MooncakeBlockTokens); len(q.IDs) != want {
		return TraceRequest{}, fmt.Errorf("hash_ids has %d entries: want %d for %d tokens in blocks of %d", len(q.IDs), want, *q.Input, MooncakeBlockTokens)
	}
	return TraceRequest{TimestampMs: *q.Timestamp, InputTokens: *q.Input, OutputTokens: *q.Output, Blocks: q.IDs}, nil
}

func blocksFor(tokens, block int) int { return (tokens + block - 1) / block }

// Shape says how lengths and token ids are made of a trace. Zero values take
// the defaults.
type Shape struct {
	// LengthScale multiplies all lengths, block size included, so that sharing
	// stays what it is; default 1.
	LengthScale float64
	// FirstToken and TokenCount bound the token ids; default 1,000 and 99,000,
	// which every usual vocabulary has.
	FirstToken, TokenCount uint32
	// SiblingTokens, if not 0, lets the blocks that follow one block begin
	// alike, see BlockPrompt; before scaling.
	SiblingTokens int
	// MaxPromptTokens leaves out requests with longer prompts, after scaling;
	// 0: none.
	MaxPromptTokens int
}

func (s Shape) withDefaults() (Shape, error) {
	if s.LengthScale == 0 {
		s.LengthScale = 1
	}
	if s.TokenCount == 0 {
		s.FirstToken, s.TokenCount = 1000, 99000
	}
	if !(s.LengthScale >= 1./MooncakeBlockTokens && s.LengthScale <= 1000) {
		return s, fmt.Errorf("%w: LengthScale is %v: want 1/%d to 1000", ErrOptions, s.LengthScale, MooncakeBlockTokens)
	}
	if uint64(s.FirstToken)+uint64(s.TokenCount) > math.MaxUint32 || s.MaxPromptTokens < 0 {
		return s, fmt.Errorf("%w: token ids from %d, %d of them, prompts up to %d: want ids below 2^32 and a limit of 0 or more", ErrOptions, s.FirstToken, s.TokenCount, s.MaxPromptTokens)
	}
	if s.SiblingTokens < 0 || s.SiblingTokens > MooncakeBlockTokens {
		return s, fmt.Errorf("%w: SiblingTokens is %d: want 0 to %d", ErrOptions, s.SiblingTokens, MooncakeBlockTokens)
	}
	return s, nil
}

func (s Shape) scaled(tokens int) int {
	return max(int(math.Round(float64(tokens)*s.LengthScale)), 1)
}

// prompt is the scaled prompt of blocks; ok is false if it is too long.
func (s Shape) prompt(tokens int, blocks []uint64) (*BlockPrompt, bool) {
	block := s.scaled(MooncakeBlockTokens)
	whole := len(blocks) - 1
	last := min(s.scaled(tokens-whole*MooncakeBlockTokens), block)
	p := &BlockPrompt{Blocks: blocks, BlockTokens: block, Tokens: whole*block + last, FirstToken: s.FirstToken, TokenCount: s.TokenCount}
	if s.SiblingTokens > 0 {
		p.SiblingTokens = s.scaled(s.SiblingTokens)
	}
	return p, s.MaxPromptTokens == 0 || p.Tokens <= s.MaxPromptTokens
}

// Replay says how a trace is replayed as it was recorded.
type Replay struct {
	Shape
	// Seed decides where in their group arrivals fall.
	Seed uint64
	// Speedup divides all times; default 1.
	Speedup float64
	// MaxRequests ends the replay early; 0: never.
	MaxRequests int
}

// Replay is the trace's requests in order of arrival. Time stamps are rounded
// to groups of 3 s in the trace, so each group is spread over its 3 s.
func (t *Trace) Replay(o Replay) ([]Request, error) {
	shape, err := o.Shape.withDefaults()
	if err != nil {
		return nil, err
	}
	if o.Speedup == 0 {
		o.Speedup = 1
	}
	if !(o.Speedup > 0 && o.Speedup <= 1e6) || o.MaxRequests < 0 {
		return nil, fmt.Errorf("%w: Speedup %v, MaxRequests %d: want more than 0 up to 1e6, and 0 or more", ErrOptions, o.Speedup, o.MaxRequests)
	}
	arrivals := t.spread(rand.New(rand.NewPCG(o.Seed, 1)))
	of := t.conversations()
	turns := make(map[int]int)
	var out []Request
	for i, q := range t.Requests {
		if o.MaxRequests > 0 && len(out) == o.MaxRequests {
			break
		}
		turn := turns[of[i]]
		turns[of[i]]++
		p, ok := shape.prompt(q.InputTokens, q.Blocks)
		if !ok {
			continue
		}
		out = append(out, Request{
			ArrivalMs: arrivals[i] / o.Speedup, Prompt: p, OutputTokens: shape.scaled(q.OutputTokens),
			Conversation: uint64(of[i]), Turn: turn,
		})
	}
	return out, nil
}

// spread places each group of equal time stamps uniformly in its 3 s, in the
// order of the trace.
func (t *Trace) spread(rng *rand.Rand) []float64 {
	out := make([]float64, len(t.Requests))
	for from := 0; from < len(out); {
		to := from + 1
		for to < len(out) && t.Requests[to].TimestampMs == t.Requests[from].TimestampMs {
			to++
		}
		for i := from; i < to; i++ {
			out[i] = float64(t.Requests[i].TimestampMs) + rng.Float64()*MooncakeGroupMs
		}
		slices.Sort(out[from:to])
		from = to
	}
	// A few time stamps are 1 ms early, so that two groups can overlap.
	slices.Sort(out)
	return out
}

// conversations gives each request the index of the first of its conversation.
// A request continues another if its prompt begins with all whole blocks of
// the other's, beyond the first block, which unrelated requests share too.
func (t *Trace) conversations() []int {
	of := make([]int, len(t.Requests))
	at := make(map[uint64]int)
	for i, q := range t.Requests {
		of[i] = i
		for d := len(q.Blocks) - 1; d >= 1; d-- {
			if first, ok := at[q.Blocks[d]]; ok {
				of[i] = first
				break
			}
		}
		for d := 1; d < q.InputTokens/MooncakeBlockTokens; d++ {
			if _, ok := at[q.Blocks[d]]; !ok {
				at[q.Blocks[d]] = of[i]
			}
		}
	}
	return of
}

// byArrival orders requests in time; turns of one instant keep their order.
func byArrival(list []Request) {
	slices.SortStableFunc(list, func(a, b Request) int { return cmp.Compare(a.ArrivalMs, b.ArrivalMs) })
}
