package replay

import (
	"fmt"
	"io"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/kvevents"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// Input names a recording.
type Input struct {
	// Frames are the recorded event streams, one per rank.
	Frames []Source
	// Requests are the recorded HTTP exchanges.
	Requests Source
}

// Source is a file that is open.
type Source struct {
	Name   string
	Reader io.Reader
}

// Reason says why a request's numbers are as they are. It follows from the
// request's fields and from times, never from the numbers themselves.
type Reason string

// The reasons.
const (
	// Equal: table, index and engine agree.
	Equal Reason = "equal"
	// PrefixInFlight: another request with the same first block was under
	// way, so blocks could be there that no event had told yet.
	PrefixInFlight Reason = "prefixInFlight"
	// MultipleSamples: usage of n > 1 is that of the last sample, which reuses
	// what the first has just computed.
	MultipleSamples Reason = "multipleSamples"
	// PromptLogprobs: such requests do not read the cache.
	PromptLogprobs Reason = "promptLogprobs"
	// ReportMode: blocks of this prompt were announced again without a copy.
	ReportMode Reason = "reportMode"
	// FirstDivergence: the table is right; the index knows the prompt only up
	// to a point that was named before.
	FirstDivergence Reason = "firstDivergence"
	// Unknown: none of these.
	Unknown Reason = "unknown"
)

// Result is what is known of one request, in tokens.
type Result struct {
	// Request is the exchange's number in the recording.
	Request int `json:"request"`
	// PromptTokens is the length of the prompt.
	PromptTokens int `json:"promptTokens"`
	// BlockTableTokens is what the agent's block table expected to be reused.
	BlockTableTokens int `json:"blockTableTokens"`
	// IndexTokens is what a coordinator's index expected.
	IndexTokens int `json:"indexTokens"`
	// ActualTokens is what the engine says it reused; nil if it did not.
	ActualTokens *int `json:"actualTokens"`
	// Reason is why they differ, or Equal.
	Reason Reason `json:"reason"`
}

// Summary counts results, the block table's against the engine's.
type Summary struct {
	// Requests is the number of requests of which the engine told the reuse.
	Requests int `json:"requests"`
	// Equal, Over and Under say how the block table stood to the engine.
	Equal int `json:"equal"`
	Over  int `json:"over"`
	Under int `json:"under"`
	// Unknown is the number of requests that could not be compared.
	Unknown int `json:"unknown"`
	// ByReason counts the compared requests by reason.
	ByReason map[Reason]int `json:"byReason"`
	// PromptTokens and ReusedTokens are those of the compared requests.
	PromptTokens int `json:"promptTokens"`
	ReusedTokens int `json:"reusedTokens"`
	// BlockTable and Index are how right the two were.
	BlockTable Share `json:"blockTable"`
	Index      Share `json:"index"`
}

// Share is what an expectation had of the tokens that were reused.
type Share struct {
	// FoundTokens were expected and reused, OverTokens expected in vain.
	FoundTokens int `json:"foundTokens"`
	OverTokens  int `json:"overTokens"`
}

func (s *Share) add(expected, actual int) {
	s.FoundTokens += min(expected, actual)
	s.OverTokens += max(0, expected-actual)
}

// FoundShare is the share of the reused tokens that was expected, 0 to 1; 1 if none
// were reused.
func (s *Summary) FoundShare(of Share) float64 {
	if s.ReusedTokens == 0 {
		return 1
	}
	return float64(of.FoundTokens) / float64(s.ReusedTokens)
}

// OverShare is the share of the prompts' tokens that was expected in vain, 0 to 1.
func (s *Summary) OverShare(of Share) float64 {
	if s.PromptTokens == 0 {
		return 0
	}
	return float64(of.OverTokens) / float64(s.PromptTokens)
}

// Report is the outcome of a replay.
type Report struct {
	Results []Result
	Summary Summary
	// Coverage is that of each rank at the end.
	Coverage []engine.Coverage
	// Counts are the faults of the streams, of all ranks together.
	Counts map[string]int
	// WithoutTokens is the number of completions whose token ids the
	// recording lacks.
	WithoutTokens int
}

// clusterKey is any key: both ends of the replay share it.
var clusterKey = prefix.ClusterKey{0: 1}

// naming prepares a probe for a prompt. Tests change it to see what happens
// when the two ends name prefixes differently.
type naming func(p *prefix.Probe, tokens []uint32, k *prefix.Keyer)

// Run replays a recording.
func Run(in Input) (*Report, error) { return run(in, (*prefix.Probe).ResetTokens) }

func run(in Input, name naming) (*Report, error) {
	requests, err := readRequests(in.Requests.Name, in.Requests.Reader)
	if err != nil {
		return nil, err
	}
	var streams [][]frame
	for _, s := range in.Frames {
		frames, err := readFrames(s.Name, s.Reader)
		if err != nil {
			return nil, err
		}
		streams = append(streams, frames)
	}
	p := newPlayer(byRank(streams), requests, name)
	for i := range requests.requests {
		if err := p.answer(i); err != nil {
			return nil, err
		}
	}
	p.report.WithoutTokens = requests.withoutID
	p.report.Summary.Unknown += requests.withoutID
	for _, r := range p.ranks {
		p.report.Coverage = append(p.report.Coverage, r.coverage)
	}
	return p.report, nil
}

// byRank orders the streams by the rank they give themselves, if each gives
// another; else they stay in the order given.
func byRank(streams [][]frame) [][]frame {
	out := make([][]frame, len(streams))
	d := kvevents.NewDecoder()
	for _, frames := range streams {
		rank := -1
		for i := 0; i < len(frames) && rank < 0; i++ {
			if b, err := d.Decode(frames[i].payload); err == nil {
				rank = b.Rank
			}
		}
		if rank < 0 || rank >= len(out) || out[rank] != nil {
			return streams
		}
		out[rank] = frames
	}
	return out
}

// player moves recorded time on.
type player struct {
	in       inputs
	name     naming
	ranks    []*rank
	cleared  int // clearings already applied
	index    *prefixindex.Index
	adapters map[string]bool
	model    string
	probe    prefix.Probe
	matches  []prefixindex.Match
	report   *Report
}

func newPlayer(streams [][]frame, in inputs, name naming) *player {
	p := &player{
		in: in, name: name, index: prefixindex.New(prefixindex.Options{}), adapters: map[string]bool{},
		report: &Report{Counts: map[string]int{}, Summary: Summary{ByReason: map[Reason]int{}}},
	}
	// A request names its adapter as its model; which names are adapters the
	// events tell.
	d := kvevents.NewDecoder()
	for _, frames := range streams {
		for _, f := range frames {
			b, err := d.Decode(f.payload)
			if err != nil {
				continue
			}
			for i := range b.Events {
				if a := b.Events[i].Adapter; a != "" {
					p.adapters[a] = true
				}
			}
		}
	}
	for _, r := range in.requests {
		if !p.adapters[r.model] {
			p.model = r.model
			break
		}
	}
	for i, frames := range streams {
		p.ranks = append(p.ranks, newRank(p, i, frames))
	}
	return p
}

// start is when recordings begin: any moment, since only differences matter.
var start = time.Unix(1_700_000_000, 0)

func at(t float64) time.Time { return start.Add(time.Duration(t * float64(time.Second))) }

// advance brings everything to a moment.
func (p *player) advance(t float64) error {
	for p.cleared < len(p.in.clearings) && p.in.clearings[p.cleared].t <= t {
		c := p.in.clearings[p.cleared]
		for _, k := range p.ranks {
			if err := k.advance(c.t); err != nil {
				return err
			}
			k.table.Apply(&blocktable.Event{Op: blocktable.OpClear})
		}
		p.cleared++
	}
	for _, k := range p.ranks {
		if err := k.advance(t); err != nil {
			return err
		}
		if err := k.tell(at(t)); err != nil {
			return err
		}
	}
	return nil
}

// answer brings everything to the moment a request was sent and asks.
func (p *player) answer(i int) error {
	r := &p.in.requests[i]
	if err := p.advance(r.sent); err != nil {
		return err
	}
	adapter := p.adapterOf(r)
	result := Result{Request: r.number, PromptTokens: len(r.tokens), ActualTokens: r.actual}
	rank, certain := p.rankOf(r, adapter)
	if rank >= 0 {
		result.BlockTableTokens = p.ranks[rank].table.Match(r.tokens, adapter, r.salt)
		result.IndexTokens = p.indexTokens(rank, r, adapter)
	}
	if !certain {
		result.ActualTokens = nil // which rank it is of nobody knows
	}
	result.Reason = p.reason(i, &result, adapter)
	p.count(&result)
	return nil
}

// adapterOf is the adapter that a request names as its model, or none.
func (p *player) adapterOf(r *request) string {
	if p.adapters[r.model] {
		return r.model
	}
	return ""
}

// rankOf is the rank that served a request: the one it asked for, or any if
// all would have reused the same.
func (p *player) rankOf(r *request, adapter string) (rank int, certain bool) {
	if len(p.ranks) == 0 {
		return -1, true
	}
	if r.rank >= 0 && r.rank < len(p.ranks) {
		return r.rank, true
	}
	first := p.ranks[0].table.Match(r.tokens, adapter, r.salt)
	for _, k := range p.ranks[1:] {
		if k.table.Match(r.tokens, adapter, r.salt) != first {
			return 0, false
		}
	}
	return 0, true
}

// indexTokens asks the index as a coordinator does, and rounds the match down
// to what the engine can reuse: whole blocks, and never the last token.
func (p *player) indexTokens(rank int, r *request, adapter string) int {
	keyer := prefix.NewKeyer(clusterKey, prefix.Domain{Model: p.model, Adapter: adapter, Salt: r.salt})
	n, k := len(r.tokens), p.ranks[rank]
	found := p.lookUp(rank, r.tokens, keyer)
	switch {
	case found < n:
		return found
	case k.table.Windowed():
		// Where a match may end a block earlier only the index can say.
		return p.lookUp(rank, r.tokens[:n-1], keyer)
	}
	block := max(1, k.table.BlockTokens())
	return (n - 1) / block * block
}

func (p *player) lookUp(rank int, tokens []uint32, keyer *prefix.Keyer) int {
	if len(tokens) == 0 {
		return 0
	}
	p.name(&p.probe, tokens, keyer)
	p.matches = p.index.Match(&p.probe, p.matches[:0])
	for _, m := range p.matches {
		if m.Worker == prefixindex.WorkerID(rank) {
			return int(m.Tokens)
		}
	}
	return 0
}

func (p *player) reason(i int, result *Result, adapter string) Reason {
	r := &p.in.requests[i]
	switch {
	case result.ActualTokens == nil:
		return Unknown
	case result.BlockTableTokens == *result.ActualTokens:
		if result.IndexTokens < result.BlockTableTokens {
			return FirstDivergence
		}
		if result.IndexTokens == result.BlockTableTokens {
			return Equal
		}
		return Unknown
	case r.samples > 1:
		return MultipleSamples
	case r.logprobs:
		return PromptLogprobs
	case p.reported(i):
		return ReportMode
	case p.inFlight(i):
		return PrefixInFlight
	}
	return Unknown
}

// reported says whether the request or an earlier one of the same beginning
// made the engine announce blocks again.
func (p *player) reported(i int) bool {
	for k := 0; k <= i; k++ {
		if o := &p.in.requests[k]; o.reportFull && (k == i || p.sameStart(o, &p.in.requests[i])) {
			return true
		}
	}
	return false
}

// inFlight says whether another request of the same beginning was under way
// at some time while this one was.
func (p *player) inFlight(i int) bool {
	r := &p.in.requests[i]
	for k := range p.in.requests {
		o := &p.in.requests[k]
		if k != i && o.sent < r.done && r.sent < o.done && p.sameStart(o, r) {
			return true
		}
	}
	return false
}

// sameStart says whether two prompts share their first block.
func (p *player) sameStart(a, b *request) bool {
	n := 0
	for _, k := range p.ranks {
		n = max(n, k.table.BlockTokens())
	}
	if n == 0 || len(a.tokens) < n || len(b.tokens) < n || a.model != b.model || a.salt != b.salt {
		return false
	}
	for i := range n {
		if a.tokens[i] != b.tokens[i] {
			return false
		}
	}
	return true
}

func (p *player) count(r *Result) {
	p.report.Results = append(p.report.Results, *r)
	s := &p.report.Summary
	if r.ActualTokens == nil {
		s.Unknown++
		return
	}
	s.Requests++
	s.ByReason[r.Reason]++
	s.PromptTokens += r.PromptTokens
	s.ReusedTokens += *r.ActualTokens
	s.BlockTable.add(r.BlockTableTokens, *r.ActualTokens)
	s.Index.add(r.IndexTokens, *r.ActualTokens)
	switch d := r.BlockTableTokens - *r.ActualTokens; {
	case d == 0:
		s.Equal++
	case d > 0:
		s.Over++
	default:
		s.Under++
	}
}

// rank is one rank's way from event socket to index. It is the stream's
// Effects.
type rank struct {
	p        *player
	frames   []frame
	stream   *kvevents.Stream
	decoder  *kvevents.Decoder
	table    *blocktable.Table
	encoder  *summary.Encoder
	to       *summary.Decoder
	told     float64 // seconds up to which the prefix stream was told
	coverage engine.Coverage
}

func newRank(p *player, n int, frames []frame) *rank {
	r := &rank{p: p, frames: frames, decoder: kvevents.NewDecoder(), table: blocktable.New(blocktable.Options{Model: p.model})}
	r.encoder = summary.NewEncoder(summary.Options{Key: clusterKey, Blocks: r.table, Epoch: uint32(n + 1)})
	r.table.Listen(r.encoder)
	r.to = summary.NewDecoder(p.index.WorkerSink(prefixindex.WorkerID(n)))
	r.stream = kvevents.NewStream(kvevents.StreamOptions{}, r)
	r.stream.Connected(start)
	return r
}

// advance takes the frames that had arrived by t, and tells the prefix stream
// each second as an agent does.
func (r *rank) advance(t float64) error {
	for len(r.frames) > 0 && r.frames[0].t <= t {
		f := r.frames[0]
		r.frames = r.frames[1:]
		for r.told+1 <= f.t {
			r.told++
			if err := r.tell(at(r.told)); err != nil {
				return err
			}
		}
		switch {
		case f.restarted:
			r.stream.Restart(at(f.t))
		case f.payload == nil:
			r.stream.Malformed(at(f.t))
		default:
			r.stream.Live(kvevents.Message{Seq: f.seq, Payload: f.payload, Received: at(f.t)})
		}
	}
	for r.told+1 <= t {
		r.told++
		if err := r.tell(at(r.told)); err != nil {
			return err
		}
	}
	return nil
}

// tell brings the index up to the table.
func (r *rank) tell(now time.Time) error {
	if _, _, have := r.to.Have(); !have {
		for _, f := range r.encoder.Snapshot() {
			if _, err := r.to.Apply(f); err != nil {
				return fmt.Errorf("snapshot: %w", err)
			}
		}
	}
	for {
		f := r.encoder.Delta(now)
		if f == nil {
			return nil
		}
		result, err := r.to.Apply(f)
		if err != nil {
			return fmt.Errorf("delta: %w", err)
		}
		if result != summary.Applied {
			return fmt.Errorf("delta was not applied: %v", result)
		}
	}
}

// Apply implements kvevents.Effects.
func (r *rank) Apply(m kvevents.Message) {
	b, err := r.decoder.Decode(m.Payload)
	if err != nil {
		r.stream.BadPayload(m.Received)
		return
	}
	for i := range b.Events {
		r.table.Apply(&b.Events[i])
	}
	r.stream.Applied(m.Received, 0, b.Damaged, b.Unknown, b.LostRemovals)
}

// AskReplay implements kvevents.Effects; a recording has no replay to ask.
func (r *rank) AskReplay(uint64, uint64) {}

// Reset implements kvevents.Effects.
func (r *rank) Reset(engine.ResetCause) { r.table.Clear() }

// Rebuild implements kvevents.Effects; it comes with answers to AskReplay only.
func (r *rank) Rebuild(engine.ResetCause) {}

// Rebuilt implements kvevents.Effects.
func (r *rank) Rebuilt() {}

// Coverage implements kvevents.Effects.
func (r *rank) Coverage(c engine.Coverage, _ string) { r.coverage = c }

// Counted implements kvevents.Effects.
func (r *rank) Counted(what string, n int) { r.p.report.Counts[what] += n }
