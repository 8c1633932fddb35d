package fleet

import (
	"slices"
	"time"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// Bounds of what waits to be sent.
const (
	maxMarksWaiting  = ledger.MaxOffers
	maxLearntWaiting = 256
	maxPlacesWaiting = 4096
	// offerAgainMs is how long an offered claim may stay without an echo.
	offerAgainMs = 300
)

// offering is how far the claims of one worker were offered to its agent on
// the present lane.
type offering struct {
	// lane and agent are those of the first report on the lane: before it,
	// nothing is offered, for the agent speaks first.
	lane  Lane
	agent uint64
	// seq is the last one offered, echo the newest echo.
	seq, echo uint64
	marks     []markOut
	// learnt are prompts to be told before the marks.
	learnt []ledger.LearntPrompt
	// queued says that the worker is in the outbox.
	queued bool
}

// markOut is a mark to be sent.
type markOut struct {
	seq          uint64
	what         ledger.Mark
	atMs         float64
	outputTokens int
	cachedTokens *int
}

// placedOut is a placement to be told to peers.
type placedOut struct {
	p         *part
	tenant    string
	id        string
	attempt   uint32
	placement string
}

// Outgoing is what waits to be sent. It is sent once: claims that do not arrive
// are offered again, marks and placements are not.
type Outgoing struct {
	// Hosts are frames for agents, Places placements for all peers.
	Hosts  []HostFrames
	Places []ledger.Placed
}

// HostFrames are the frames of one host's lane. Another lane must not carry
// them.
type HostFrames struct {
	Host   string
	Lane   Lane
	Claims []WorkerClaims
	Marks  []WorkerMarks
}

// WorkerClaims is a frame of claims for the worker with an index.
type WorkerClaims struct {
	Index uint32
	ledger.ClaimFrame
}

// WorkerMarks is a frame of marks for the worker with an index.
type WorkerMarks struct {
	Index uint32
	ledger.MarkFrame
}

// tell notes that a claim is to be offered and told to peers.
func (f *Fleet) tell(p *part) {
	f.enqueue(p.w)
	f.counts.LostPlaces += makeRoom(&f.claims.places, maxPlacesWaiting)
	f.claims.places = append(f.claims.places, placedOut{p, p.c.Key.Tenant, p.c.Key.ID, p.c.Attempt, p.c.Placement})
}

// tellMark notes a mark to be sent, if the agent may know the claim.
func (f *Fleet) tellMark(p *part, what ledger.Mark, outputTokens int, nowMs float64) {
	o := &p.w.offer
	if p.w.host.lane == 0 || o.lane != p.w.host.lane || p.Seq > o.seq && !p.echoed {
		return
	}
	f.counts.LostMarks += makeRoom(&o.marks, maxMarksWaiting)
	out := markOut{seq: p.Seq, what: what, atMs: nowMs, outputTokens: outputTokens}
	if what == ledger.MarkDone && p.c != nil {
		out.cachedTokens = p.c.cachedTokens
	}
	o.marks = append(o.marks, out)
	f.enqueue(p.w)
}

// tellLearnt notes that the prompt of a claim is known as a whole now. Where the
// claim was not offered yet, it goes first.
func (f *Fleet) tellLearnt(p *part, promptTokens int, points []prefix.Key) {
	o := &p.w.offer
	if p.w.host.lane == 0 || o.lane != p.w.host.lane {
		return
	}
	f.counts.LostMarks += makeRoom(&o.learnt, maxLearntWaiting)
	o.learnt = append(o.learnt, ledger.LearntPrompt{Seq: p.Seq, PromptTokens: promptTokens, Points: slices.Clone(points)})
	f.enqueue(p.w)
}

// makeRoom drops the older half of a full list and returns how much that was.
func makeRoom[T any](list *[]T, most int) uint64 {
	if len(*list) < most {
		return 0
	}
	half := most / 2
	n := copy(*list, (*list)[half:])
	clear((*list)[n:])
	*list = (*list)[:n]
	return uint64(half)
}

func (f *Fleet) enqueue(w *worker) {
	if !w.offer.queued {
		w.offer.queued = true
		f.outbox = append(f.outbox, w)
	}
}

// offerAfter decides by a report from where claims are offered: again from the
// echo on the first report of a lane, when the echo of this coordinator went
// down, and when a claim offered long ago is not echoed.
func (f *Fleet) offerAfter(w *worker, echo uint64) {
	o, h := &w.offer, w.host
	switch {
	case o.lane != h.lane || o.agent != h.agentProcess:
		*o = offering{lane: h.lane, agent: h.agentProcess, seq: echo, echo: echo, queued: o.queued}
		f.enqueue(w)
		return
	case echo < o.echo:
		o.seq = echo
		f.enqueue(w)
	case o.seq > echo && w.unechoed(echo, o.seq, w.report.writtenMs):
		o.seq = echo
		f.enqueue(w)
	}
	o.echo = echo
}

// unechoed reports whether a report misses one of the own claims that was
// offered long before. Each claim has its own time: while new ones are offered
// all the time, a gap before them must be seen all the same.
func (w *worker) unechoed(echo, offered uint64, builtMs float64) bool {
	for _, p := range w.open {
		if p.c != nil && p.Seq > echo && p.Seq <= offered && !p.echoed && builtMs-p.offeredMs >= offerAgainMs {
			return true
		}
	}
	return false
}

// TakeOutgoing hands over what waits to be sent. Call it at once after Claim
// and Mark, or at most 10 ms later.
func (f *Fleet) TakeOutgoing(now time.Time) Outgoing {
	f.mu.Lock()
	defer f.mu.Unlock()
	nowMs := f.Ms(now)
	var out Outgoing
	at := map[*host]int{}
	for _, w := range f.outbox {
		w.offer.queued = false
		claims, marks := f.offer(w, nowMs), w.takeMarks(f.options.Process, nowMs)
		if len(claims) == 0 && len(marks.Marks) == 0 && len(marks.Learnt) == 0 {
			continue
		}
		i, known := at[w.host]
		if !known {
			i = len(out.Hosts)
			at[w.host] = i
			out.Hosts = append(out.Hosts, HostFrames{Host: w.host.name, Lane: w.host.lane})
		}
		for _, frame := range claims {
			out.Hosts[i].Claims = append(out.Hosts[i].Claims, WorkerClaims{w.facts.Index, frame})
		}
		if len(marks.Marks) > 0 || len(marks.Learnt) > 0 {
			out.Hosts[i].Marks = append(out.Hosts[i].Marks, WorkerMarks{w.facts.Index, marks})
		}
	}
	clear(f.outbox)
	f.outbox = f.outbox[:0]
	for _, p := range f.claims.places {
		offer := p.p.offer(nowMs)
		offer.Points, offer.Session = nil, "" // they are for the worker's agent
		out.Places = append(out.Places, ledger.Placed{
			Worker: p.p.w.name, Tenant: p.tenant, RequestID: p.id, Attempt: p.attempt, Placement: p.placement, Offer: offer,
		})
	}
	clear(f.claims.places)
	f.claims.places = f.claims.places[:0]
	return out
}

// offer is the claim on its way.
func (p *part) offer(nowMs float64) ledger.Offer {
	o := ledger.Offer{AgeMs: min(max(nowMs-p.MadeMs, 0), ledger.MaxClaimAgeMs), Claim: p.Claim}
	o.MadeMs = 0
	return o
}

// offer are the frames of claims that are due, and notes them as offered. What
// ended meanwhile is given up: the agent passes over it.
func (f *Fleet) offer(w *worker, nowMs float64) (frames []ledger.ClaimFrame) {
	o := &w.offer
	if w.host.lane == 0 || o.lane != w.host.lane || !w.listed {
		return nil
	}
	for _, p := range w.open {
		if p.c == nil || p.echoed || p.Seq <= o.seq || nowMs-p.MadeMs > offerableMs {
			continue
		}
		last := len(frames) - 1
		if last < 0 || len(frames[last].Offers) >= ledger.MaxOffers {
			frames = append(frames, ledger.ClaimFrame{Coordinator: f.options.Process, Agent: o.agent, Prev: o.seq})
			last++
		}
		frames[last].Offers = append(frames[last].Offers, p.offer(nowMs))
		o.seq, p.offeredMs = p.Seq, nowMs
	}
	return frames
}

// Unsent tells that a frame of claims did not get onto its lane: they are offered
// again with the next ones, of which the agent would else take none before it has
// missed the former ones for a while.
func (f *Fleet) Unsent(host string, lane Lane, c *WorkerClaims) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.hosts[host]
	if h == nil || h.lane != lane || lane == 0 {
		return
	}
	if w := h.byIndex[c.Index]; w != nil && w.offer.lane == lane && w.offer.agent == c.Agent && c.Prev < w.offer.seq {
		w.offer.seq = c.Prev
		f.enqueue(w)
	}
}

// takeMarks is the frame of marks that wait.
func (w *worker) takeMarks(process uint64, nowMs float64) ledger.MarkFrame {
	frame := ledger.MarkFrame{Coordinator: process}
	o := &w.offer
	if o.lane == w.host.lane && w.host.lane != 0 && w.listed {
		frame.Learnt = o.learnt
		for _, m := range o.marks {
			age := min(max(nowMs-m.atMs, 0), ledger.MaxClaimAgeMs)
			frame.Marks = append(frame.Marks, ledger.Marked{Seq: m.seq, What: m.what, AgeMs: age, OutputTokens: m.outputTokens, CachedTokens: m.cachedTokens})
		}
	}
	o.marks, o.learnt = o.marks[:0], nil
	return frame
}
