package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/gossip/boundary"
)

const (
	// probeEvery is the least time between two questions to an engine's
	// tokenizer, probeAgainEvery the time between two measurements of probes
	// that nobody asked for, one after the other: templates can be changed while
	// an engine runs.
	probeEvery      = time.Second
	probeAgainEvery = 2 * time.Minute
	// probeTries is how often in a row a probe is tried; then it waits for its
	// turn among those that are measured again.
	probeTries = 3
)

// engineLife is what a boundary is measured of: another one begins anew.
type engineLife struct {
	// mark tells process lives apart; 0: the engine does not tell.
	mark           uint64
	version, model string
}

// probedState is what a prober needs to know of the engine now.
type probedState struct {
	life engineLife
	// up says that it serves, eventsSeen that it publishes its blocks.
	up, eventsSeen bool
	capabilities   engine.Capability
}

// proberOptions wires a prober.
type proberOptions struct {
	// tokenizer is the engine's; nil: it tells no token ids.
	tokenizer engine.Tokenizer
	// declared is what is said of an engine that tells no ids; empty: its
	// model's name.
	declared string
	hasher   boundary.Hasher
	state    func() probedState
	// every is the least time between two questions; 0: probeEvery.
	every time.Duration
	// changed is called when the vector is another one.
	changed func()
	log     *slog.Logger
}

// prober measures the hashing boundary of one engine: it asks for the token ids
// of fixed probes, at most one a second and, but for the first time in a life, at
// most one request a second, and keeps one keyed hash per token.
//
// That is a budget of its own besides the one request a second for all other
// facts: a difference must be found within ten seconds, and no engine answers
// several probes at once. The first measurement of a life takes eight seconds and
// as many requests, of an engine that renders with two requests twelve; over any
// minute both together stay below one a second.
type prober struct {
	proberOptions
	// requests counts those that the engine was sent.
	requests atomic.Int64

	mu   sync.Mutex
	life engineLife
	// known says that life is one.
	known    bool
	rule     string
	measured []boundary.Measurement
	// at is when a probe was measured last, by part and number.
	at map[probeKey]time.Time
	// unmeasurable says that the engine has no tokenizer after all; refused are the
	// probes that it did not answer when they were asked last, with the reason.
	unmeasurable bool
	refused      map[probeKey]error

	// queue are the probes to ask next, tries the failures in a row.
	queue   []probeKey
	tries   map[probeKey]int
	runs    uint32
	turn    int
	againAt time.Time
	// dates are the hashed date text of dateDay.
	dates   []boundary.Token
	dateDay string
}

type probeKey struct {
	part   boundary.Part
	number int
}

// datesKey stands in the queue for the date text.
var datesKey = probeKey{}

func newProber(o proberOptions) *prober {
	return &prober{proberOptions: o, at: map[probeKey]time.Time{}, tries: map[probeKey]int{}, refused: map[probeKey]error{}}
}

// run measures until ctx ends.
func (p *prober) run(ctx context.Context) {
	t := time.NewTicker(cmp.Or(p.every, probeEvery))
	defer t.Stop()
	for idle := 0; ; idle-- {
		if idle <= 0 {
			idle = p.step(ctx)
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// step asks one question if one is due, and returns how many it took.
func (p *prober) step(ctx context.Context) (asked int) {
	s := p.state()
	if !s.up {
		return 1
	}
	if p.begin(&s) {
		p.changed()
	}
	if p.tokenizer == nil || p.unmeasurable {
		return 1
	}
	key, ok := p.next(time.Now())
	if !ok {
		return 1
	}
	ctx, cancel := context.WithTimeout(ctx, tokenizeTimeout)
	defer cancel()
	if key == datesKey {
		p.requests.Add(1)
		p.readDates(ctx)
		return 1
	}
	probe := probeOf(key)
	cost := 1
	if c, ok := p.tokenizer.(engine.RenderCoster); ok && probe.ChatJSON != nil {
		cost = c.RenderRequests()
	}
	p.requests.Add(int64(cost))
	asked = cost
	if !p.seen(key) {
		asked = 1
	}
	ids, err := p.ask(ctx, probe)
	if p.took(key, ids, err) {
		p.changed()
	}
	return asked
}

// seen says that a probe was measured in this life. The first time it takes one
// turn, however many requests its rendering is: until all are measured, workers
// that do not agree may share what they should not.
func (p *prober) seen(key probeKey) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.at[key].IsZero()
}

// begin forgets what was measured of another life, and reports whether the
// vector is another one.
func (p *prober) begin(s *probedState) bool {
	rule := ruleOf(s)
	p.mu.Lock()
	defer p.mu.Unlock()
	changed := rule != p.rule
	p.rule = rule
	if p.known && s.life == p.life {
		return changed
	}
	p.life, p.known, p.measured, p.unmeasurable = s.life, true, nil, false
	p.queue = []probeKey{datesKey}
	for _, probe := range boundary.Published() {
		p.queue = append(p.queue, probeKey{probe.Part, probe.Number})
	}
	clear(p.tries)
	clear(p.at)
	clear(p.refused)
	return true
}

// ruleOf is how adapters and salts enter block names, once the engine was seen
// to publish blocks.
func ruleOf(s *probedState) string {
	if !s.eventsSeen {
		return ""
	}
	word := func(omitted engine.Capability) string {
		if s.capabilities.Has(omitted) {
			return "omitted"
		}
		return "named"
	}
	return "adapter " + word(engine.OmitsAdapters) + ", salt " + word(engine.OmitsSalts)
}

// next is the probe to ask next. When the day has changed, the date text comes
// before chats.
func (p *prober) next(now time.Time) (probeKey, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		if now.Before(p.againAt) {
			return probeKey{}, false
		}
		all := boundary.Published()
		probe := all[p.turn%len(all)]
		p.turn++
		p.queue = append(p.queue, probeKey{probe.Part, probe.Number})
	}
	p.againAt = now.Add(probeAgainEvery)
	key := p.queue[0]
	if key.part == boundary.PartChat && p.dateDay != day(now) && p.tries[datesKey] < probeTries {
		return datesKey, true
	}
	p.queue = p.queue[1:]
	return key, true
}

func day(now time.Time) string { return now.UTC().Format(time.DateOnly) }

// again has a probe measured next.
func (p *prober) again(part boundary.Part, number int) {
	key := probeKey{part, number}
	if probeOf(key) == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = slices.DeleteFunc(p.queue, func(k probeKey) bool { return k == key })
	p.queue = slices.Insert(p.queue, 0, key)
	p.tries[key] = 0
}

// probeOf is a published probe; nil: there is none.
func probeOf(key probeKey) *boundary.Probe {
	all := boundary.Published()
	i := slices.IndexFunc(all, func(p boundary.Probe) bool { return p.Part == key.part && p.Number == key.number })
	if i < 0 {
		return nil
	}
	return &all[i]
}

// ask asks the engine for the token ids of a probe.
func (p *prober) ask(ctx context.Context, probe *boundary.Probe) ([]uint32, error) {
	if probe.ChatJSON != nil {
		return p.tokenizer.Render(ctx, probe.ChatJSON)
	}
	return p.tokenizer.Tokenize(ctx, probe.Text, probe.AddSpecialTokens)
}

// readDates asks how the engine writes the days of now, as no more than a
// help: without it a date is found once it changes.
func (p *prober) readDates(ctx context.Context) {
	now := time.Now()
	ids, err := p.tokenizer.Tokenize(ctx, boundary.DateText(now), false)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tries[datesKey]++
	if err == nil {
		p.dates, p.dateDay = p.hasher.Hash(ids), day(now)
		p.tries[datesKey] = 0
	}
}

// took takes the answer to a probe and reports whether the vector is another
// one.
func (p *prober) took(key probeKey, ids []uint32, err error) bool {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.failed(key, err)
		return p.unmeasurable
	}
	p.tries[key] = 0
	delete(p.refused, key)
	p.runs++
	tokens := p.hasher.Hash(ids)
	if key.part == boundary.PartChat {
		boundary.MaskDates(tokens, p.dates)
	}
	m := boundary.Measurement{Part: key.part, Number: key.number, Run: p.runs, Tokens: tokens}
	v := boundary.Vector{Probes: p.measured}
	if former := v.Probe(key.part, key.number); former != nil {
		m.Tokens = p.dated(key, former.Tokens, tokens, now)
		*former = m
	} else {
		v.Probes = append(v.Probes, m)
		v.Sort()
	}
	p.measured, p.at[key] = v.Probes, now
	return true
}

// dated is what was measured of a probe again, with the date masked that earlier
// measurements of this life show. In one life only the clock changes what a
// template writes; whatever the time zone, the date changes at an hour or its
// half.
func (p *prober) dated(key probeKey, former, tokens []boundary.Token, now time.Time) []boundary.Token {
	const half = 30 * time.Minute
	switch {
	case key.part != boundary.PartChat || p.life.mark == 0:
		return tokens
	case boundary.Alike(former, tokens):
		return former
	case p.at[key].Truncate(half).Equal(now.Truncate(half)):
		return tokens
	}
	if masked, ok := boundary.MaskChanged(former, tokens); ok {
		return masked
	}
	return tokens
}

// failed has a probe tried again, or gives it up for now. An engine that does
// not have the route cannot be measured.
func (p *prober) failed(key probeKey, err error) {
	p.tries[key]++
	p.refused[key] = err
	if enginehttp.Missing(err) && key.part == boundary.PartRaw {
		p.log.Info("hashing boundary cannot be measured: the engine tells no token ids; it is as declared", "error", err)
		p.unmeasurable = true
		return
	}
	if p.tries[key] < probeTries {
		p.queue = append(p.queue, key)
		return
	}
	p.log.Debug("probe of the hashing boundary refused", "part", string(key.part), "probe", key.number, "error", err)
}

// tellsIDs says what came of asking the engine for token ids: how many probes were
// answered, and why the others were not, by the first of them. None at all and no
// reason: it was not asked yet.
func (p *prober) tellsIDs() (answered, refused int, why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, probe := range boundary.Published() {
		if err := p.refused[probeKey{probe.Part, probe.Number}]; err != nil {
			refused++
			if why == nil {
				why = fmt.Errorf("%s, probe %d: %w", probe.Part.Title(), probe.Number, err)
			}
		}
	}
	return len(p.measured), refused, why
}

// able are the capabilities of the engine without those that it does not have after
// all.
func (p *prober) able(c engine.Capability) engine.Capability {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unmeasurable {
		return c &^ (engine.TokenizesText | engine.TokenizesChats)
	}
	return c
}

// vector is what was measured or declared; nil: nothing yet.
func (p *prober) vector() *boundary.Vector {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.known {
		return nil
	}
	v := &boundary.Vector{KeyID: p.hasher.KeyID(), Rule: p.rule}
	if p.tokenizer == nil || p.unmeasurable {
		if v.Declared = p.declared; v.Declared == "" {
			v.Declared = p.life.model
		}
		v.Declared = strings.ToValidUTF8(v.Declared[:min(len(v.Declared), boundary.MaxTextBytes)], "")
		return v
	}
	v.Sets = []int{boundary.OldestSet, boundary.NewestSet}
	v.Probes = slices.Clone(p.measured)
	return v
}

// state is what the prober of the engine needs to know of it.
func (w *watched) state() (s probedState) {
	ranks := w.all()
	if len(ranks) == 0 {
		return s
	}
	r := ranks[0]
	r.mu.Lock()
	defer r.mu.Unlock()
	f := &r.facts
	return probedState{
		life: engineLife{f.StartMark, f.Version, f.Model}, up: r.known && r.up, capabilities: f.Capabilities,
		eventsSeen: r.coverage != engine.CoverageNone && f.Capabilities.Has(engine.PublishesEvents),
	}
}
