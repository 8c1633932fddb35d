package recording

import (
	"fmt"
	"slices"
	"time"

	"waypost/testbed/emulator/core"
)

// Emulated is what the core did with one recorded request.
type Emulated struct {
	Request Request
	// Recorded are the batches that arrived from when the request was sent
	// until the next was.
	Recorded []Batch
	// Batches are the emulated ones; the events are copies.
	Batches         [][]core.Event
	Cached, Created int
}

// Drive runs the scenario's requests through c one at a time and does the
// recorded resets. The generated tokens are taken from the recording where it
// shows them; others never reach the cache.
func Drive(s *Scenario, c *core.Core, blockTokens int, adapters map[string]*core.Adapter) ([]Emulated, error) {
	d := &driver{scenario: s, core: c, block: blockTokens, adapters: adapters, depth: make(map[uint64]int)}
	if len(s.Batches) > 0 && s.Batches[0].Events[0].Type == "AllBlocksCleared" {
		c.Reset(false) // the driver of the recording reset the engine before it began
	}
	for i, r := range s.Requests {
		until := 1e18
		if i+1 < len(s.Requests) {
			until = s.Requests[i+1].SentSeconds
		}
		e, err := d.one(r, until)
		if err != nil {
			return nil, fmt.Errorf("%s request %d: %w", s.Name, r.N, err)
		}
		d.done = append(d.done, e)
	}
	return d.done, nil
}

type driver struct {
	scenario *Scenario
	core     *core.Core
	block    int
	adapters map[string]*core.Adapter
	// depth is the number of tokens up to the end of a recorded block.
	depth    map[uint64]int
	controls int
	now      time.Duration
	done     []Emulated
}

func (d *driver) one(r Request, until float64) (Emulated, error) {
	e := Emulated{Request: r}
	for _, b := range d.scenario.Batches {
		if b.AtSeconds >= r.SentSeconds && b.AtSeconds < until {
			e.Recorded = append(e.Recorded, b)
		}
	}
	tokens := d.reconstruct(r, e.Recorded)
	seq, err := d.core.Add(core.Request{
		ID: fmt.Sprint(r.N), Prompt: tokens[:r.PromptTokens], MaxTokens: r.Completion,
		Generate: func(i int) (uint32, bool) { return tokens[r.PromptTokens+i], false },
		Salt:     r.Salt, Adapter: d.adapters[r.Model], SessionID: r.SessionID,
		SkipCacheRead: r.SkipCacheRead, ReportHits: r.ReportFull,
	}, d.now)
	if err != nil {
		return e, err
	}
	for seq.Finish() == "" {
		d.control(e)
		step, ok := d.core.Schedule(d.now)
		if !ok {
			return e, fmt.Errorf("nothing to schedule after %d tokens", seq.OutputTokens())
		}
		d.now += step.Duration
		out, _ := d.core.Finish(d.now)
		if len(out.Events) > 0 {
			e.Batches = append(e.Batches, clone(out.Events))
		}
	}
	e.Cached = seq.CachedTokens()
	e.Created = r.PromptTokens/d.block*d.block - e.Cached
	return e, nil
}

// control does the recorded resets whose time has come: those before the
// request was sent, or after as many batches as the emulation has made.
func (d *driver) control(e Emulated) {
	for ; d.controls < len(d.scenario.Controls); d.controls++ {
		c := d.scenario.Controls[d.controls]
		before := 0
		for _, b := range e.Recorded {
			if b.AtSeconds < c.AtSeconds {
				before++
			}
		}
		if c.AtSeconds > e.Request.DoneSeconds || before > len(e.Batches) {
			return
		}
		switch c.Path {
		case "/reset_prefix_cache", "/sleep?level=1", "/pause":
			d.core.Reset(false)
		case "/reset_prefix_cache?reset_running_requests=true":
			d.core.Reset(true)
		}
	}
}

// reconstruct is the prompt and the answer; tokens that the recording does not
// show are 0.
func (d *driver) reconstruct(r Request, recorded []Batch) []uint32 {
	tokens := make([]uint32, r.PromptTokens+r.Completion)
	for _, b := range recorded {
		for _, e := range b.Events {
			if e.Type != "BlockStored" {
				continue
			}
			start := 0
			if e.HasParent {
				start = d.depth[e.Parent]
			}
			copy(tokens[start:], e.Tokens)
			for i, h := range e.Hashes {
				d.depth[h] = start + (i+1)*d.block
			}
		}
	}
	copy(tokens, r.Prompt)
	return tokens
}

func clone(events []core.Event) []core.Event {
	events = slices.Clone(events)
	for i := range events {
		events[i].Hashes = slices.Clone(events[i].Hashes)
		events[i].Tokens = slices.Clone(events[i].Tokens)
	}
	return events
}

// Namer renames hashes to small numbers in order of appearance, so that two
// streams can be compared that name the same blocks differently.
type Namer map[uint64]int

// Recorded describes a recorded event.
func (n Namer) Recorded(e Event) string {
	salt := e.ExtraKeys
	if e.Type != "BlockStored" {
		return n.line(e.Type, 0, false, e.Hashes, nil, "", "", "")
	}
	return n.line(e.Type, e.Parent, e.HasParent, e.Hashes, e.Tokens, e.LoRAName, salt, e.SessionID)
}

// Emulated describes an event of the core in the same words.
func (n Namer) Emulated(e core.Event) string {
	hashes := make([]uint64, len(e.Hashes))
	for i, h := range e.Hashes {
		hashes[i] = h.Low64()
	}
	if e.Op != core.OpStored {
		return n.line(e.Op.String(), 0, false, hashes, nil, "", "", "")
	}
	name := ""
	if e.Adapter != nil {
		name = e.Adapter.Name
	}
	keys := make([]any, len(hashes))
	for i := range keys {
		var k []any
		if name != "" {
			k = append(k, name)
		}
		if e.Salt != "" && e.FirstBlock+i == 0 {
			k = append(k, e.Salt)
		}
		if k != nil {
			keys[i] = k
		}
	}
	return n.line(e.Op.String(), e.Parent.Low64(), e.HasParent, hashes, e.Tokens, name, fmt.Sprint(keys), e.SessionID)
}

func (n Namer) line(op string, parent uint64, hasParent bool, hashes []uint64, tokens []uint32, adapter, keys, session string) string {
	p := "-"
	if hasParent {
		p = fmt.Sprint(n.name(parent))
	}
	names := make([]int, len(hashes))
	for i, h := range hashes {
		names[i] = n.name(h)
	}
	return fmt.Sprintf("%s parent %s blocks %v tokens %v adapter %q keys %s session %q", op, p, names, tokens, adapter, keys, session)
}

func (n Namer) name(h uint64) int {
	if _, ok := n[h]; !ok {
		n[h] = len(n) + 1
	}
	return n[h]
}
