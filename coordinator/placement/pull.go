package placement

import (
	"fmt"
	"math"

	"github.com/zeebo/xxh3"
)

// MaxSources bounds the sources that one decision prices pulls from.
const MaxSources = 4

// Transfer says how saved KV of a worker may travel to another.
type Transfer struct {
	// Connector is the engine's transfer connector, SideChannel where peers
	// reach it; either may be empty: none is known.
	Connector, SideChannel string
	// Fingerprint stands for what both ends must have alike: weights revision,
	// KV dtype and layout, tensor parallelism, connector version. Empty: it is
	// not known, and nothing matches it.
	Fingerprint string
	// ExportedTier is the memory its connector reads for others, TierGPU or
	// TierHost; empty: it exports nothing.
	ExportedTier string
	// BytesPerToken is the KV of one token; 0: unknown.
	BytesPerToken float64
}

// The tiers that connectors export.
const (
	TierGPU  = "gpu"
	TierHost = "host"
)

// maxTransferText bounds the texts of a Transfer, maxBytesPerToken the KV of
// one token.
const (
	maxTransferText  = 256
	maxBytesPerToken = 1e9
)

// Fault says what is out of range, by its wire name; empty: nothing is.
func (t *Transfer) Fault() string {
	for _, f := range [...]struct{ name, value string }{
		{"connector", t.Connector}, {"sideChannel", t.SideChannel}, {"fingerprint", t.Fingerprint},
	} {
		if len(f.value) > maxTransferText {
			return fmt.Sprintf("%s: %d bytes are more than %d", f.name, len(f.value), maxTransferText)
		}
	}
	switch {
	case t.ExportedTier != "" && t.ExportedTier != TierGPU && t.ExportedTier != TierHost:
		return fmt.Sprintf("exportedTier: %.40q is not %s or %s; leave it out if it exports nothing", t.ExportedTier, TierGPU, TierHost)
	case !(t.BytesPerToken >= 0 && t.BytesPerToken <= maxBytesPerToken):
		return fmt.Sprintf("kvBytesPerToken: %v is not in 0 to %g", t.BytesPerToken, float64(maxBytesPerToken))
	}
	return ""
}

// Source is a worker that holds more of the prompt than others and whose
// engine may hand it out.
type Source struct {
	*Worker
	// Tokens of the prompt are in the tier it exports.
	Tokens int
	// Predicted says that a live claim promises them, not its own report.
	Predicted bool
	// Sending counts the transfers it is sending now.
	Sending int
}

// Figure says where a number comes from.
type Figure uint8

// The origins of numbers, from the weakest.
const (
	FigureAssumed Figure = iota
	FigureDeclared
	FigureMeasured
)

var figureWords = [...]string{"assumed", "declared", "measured"}

// String is the word that people see.
func (f Figure) String() string { return figureWords[min(int(f), len(figureWords)-1)] }

// Path is the way from a source to a candidate. The zero value prices nothing:
// its bandwidth is unknown.
type Path struct {
	// Link is its name; paths of one link share its bandwidth.
	Link string
	// BytesPerMs is the bandwidth of the link alone; 0: unknown.
	BytesPerMs float64
	// LatencyMs is one way, SurchargeMs the operator's price.
	LatencyMs, SurchargeMs float64
	// UnderWay counts the transfers on the link now.
	UnderWay int
	// Figure says where the bandwidth comes from.
	Figure Figure
	// Never says that the operator forbids transfers here.
	Never bool
	// Off says that pulls of this pair were not confirmed several times in a
	// row.
	Off bool
}

// PullNote says what became of the thought of pulling.
type PullNote uint8

// The notes. Those before PullDearer mean that nothing could be pulled; of
// several sources the note nearest to a pull is kept.
const (
	PullNone PullNote = iota
	PullNoConnector
	PullOtherConnector
	PullNoSideChannel
	PullOtherFingerprint
	PullNotExported
	PullNoMore
	PullPairOff
	PullForbidden
	PullUnpriced
	PullTooLong
	PullDearer
	PullTaken
	PullSpare
)

var pullWords = [...]string{
	"", "no connector", "connectors differ", "no side channel known", "transfer fingerprints differ", "tier is not exported", "source holds no more",
	"pair is off: pulls were not confirmed", "transfers are forbidden on the link", "link or KV size unknown", "over the pool's max_transfer",
	"recomputing is cheaper", "pulled", "pulled if its own are gone",
}

// String is the note for a person.
func (n PullNote) String() string { return pullWords[min(int(n), len(pullWords)-1)] }

// Pull is the best transfer found for a candidate.
type Pull struct {
	// Note says whether it is asked for, or why not.
	Note PullNote
	// Source is the source's index in Situation.Sources; meaningful from
	// PullDearer on.
	Source int
	// Tokens are moved, behind the Behind that the worker holds itself; the rest of
	// the prompt is computed. Of PullSpare all that the source holds are, and only
	// if the worker's own turn out to be gone.
	Tokens, Behind int
	// TransferMs is the time on the way. What stands in PullMs is its mean, for its
	// own may be gone.
	TransferMs float64
	// BytesPerMs is the share of the link that was reckoned with.
	BytesPerMs float64
	// PaysFromBytesPerMs is the share of the link from which on pulling would
	// be cheaper than computing; +Inf: on no link.
	PaysFromBytesPerMs float64
	// Figure says where the bandwidth comes from.
	Figure Figure
	// StillThere is the probability that the source still holds them.
	StillThere float64
}

// Asked reports whether the engine is given the source.
func (p *Pull) Asked() bool { return p.Note >= PullTaken }

// reachMs is computing the prompt, or pulling what is asked of a source and
// computing the rest.
func (t *Terms) reachMs() float64 {
	if t.Pull.Asked() {
		return t.PullMs
	}
	return t.PrefillMs
}

// eligible says whether w may pull from s over the path; PullNone: it may.
func eligible(w, s *Worker, path *Path) PullNote {
	to, from := w.Transfer, s.Transfer
	switch {
	case to == nil || from == nil || to.Connector == "" || from.Connector == "":
		return PullNoConnector
	case to.Connector != from.Connector:
		return PullOtherConnector
	case from.SideChannel == "":
		return PullNoSideChannel
	case to.Fingerprint == "" || to.Fingerprint != from.Fingerprint:
		return PullOtherFingerprint
	case from.ExportedTier == "":
		return PullNotExported
	case path.Off:
		return PullPairOff
	case path.Never:
		return PullForbidden
	case !(path.BytesPerMs > 0) || !(from.BytesPerToken > 0):
		return PullUnpriced
	}
	return PullNone
}

// transferMs is the time to move tokens: setup, latency, the operator's price
// and the bytes over this transfer's share of the link. Those under way on the
// link, or at the source if they are more, share it evenly.
func (p *pricer) transferMs(s *Source, path *Path, tokens int) (ms, bytesPerMs float64) {
	bytesPerMs = path.BytesPerMs / float64(1+max(path.UnderWay, s.Sending, 0))
	return p.policy.TransferSetupMs + positive(path.LatencyMs) + positive(path.SurchargeMs) +
		float64(tokens)*s.Transfer.BytesPerToken/bytesPerMs, bytesPerMs
}

// offer is one way to have the prompt computed at a worker.
type offer struct {
	startMs, moveMs, loadMs, computeMs float64
	tokens                             int // to compute
	// unknownMs is the part of doubtMs that reading back may take.
	doubtMs, unknownMs float64
}

// worthMs is what the offer adds to a worker's total: its own time and what its
// prefill costs others.
func (p *pricer) worthMs(w *Worker, o *offer) float64 {
	live := w.Live
	if math.IsNaN(live) {
		live = p.assumedLive(w)
	}
	return o.startMs + o.moveMs + o.loadMs + o.computeMs + o.doubtMs + positive(p.queueMs(o.startMs, o.computeMs)) +
		p.policy.Theta*p.stallMs(w, o.computeMs, live)
}

// ownReuse is what a candidate has of the prompt, and how likely it is there.
type ownReuse struct {
	// reused tokens, of them inGPU need not be read back.
	reused, inGPU int
	there         float64
	// way is computing the rest, nothingMs computing all.
	way       offer
	nothingMs float64
}

// sourceReuse is what a candidate could have of a source.
type sourceReuse struct {
	*Source
	path *Path
	// held tokens, there with a probability, take wholeMs to move.
	held    int
	there   float64
	wholeMs float64
}

// way is a pull priced.
type way struct {
	offer
	note           PullNote
	tokens, behind int
	transferMs     float64
	// movedTokens is what is moved on average.
	movedTokens float64
}

// pull finds the cheapest source for a candidate whose own way is own, and
// returns the better of both. Among sources closer than the policy's tie the
// hash of request and source decides, so that one holder does not send to all.
//
// An engine that is given a source moves what it lacks when the request gets
// there, so that a way is priced over four cases: its own are there or gone,
// with the probability of its view, and the source's likewise. That is why more
// reuse never makes it dearer, however little of it is believed: beside a source
// what is gone is moved and not computed.
func (p *pricer) pull(c *Candidate, t *Terms, own offer) offer {
	best, bestMs := way{offer: own}, math.Inf(1)
	var bestHash uint64
	ownMs := p.worthMs(c.Worker, &own)
	have := ownReuse{reused: max(t.ReuseTokens, 0), there: 1, way: own, nothingMs: math.NaN()}
	if have.reused > 0 {
		have.there = t.StillThere
	}
	have.inGPU = have.reused - t.HostTokens
	note := PullNone
	for i := range p.sit.Sources {
		s := sourceReuse{Source: &p.sit.Sources[i]}
		if s.Worker == nil || s.Worker.ID == c.Worker.ID || s.Worker.Name == c.Worker.Name || i >= len(c.Paths) {
			continue
		}
		s.path = &c.Paths[i]
		if no := eligible(c.Worker, s.Worker, s.path); no != PullNone {
			note = max(note, no)
			continue
		}
		s.held = reusableTokens(s.Tokens, p.promptTokens, c.Worker.BlockTokens)
		if s.held <= 0 {
			note = max(note, PullNoMore)
			continue
		}
		if math.IsNaN(have.nothingMs) {
			have.nothingMs = p.prefillMs(c.Worker, 0)
		}
		s.there = p.stillThere(&s.View, s.Predicted)
		s.wholeMs, _ = p.transferMs(s.Source, s.path, s.held)
		w, totalMs := p.wayFrom(c, &s, &have, ownMs)
		if w.note < PullDearer {
			note = max(note, w.note)
			continue
		}
		hash := rendezvous(p.tieKey(), s.hash())
		if totalMs > bestMs+p.policy.TieMs || totalMs >= bestMs-p.policy.TieMs && hash < bestHash {
			continue
		}
		best, bestMs, bestHash = w, totalMs, hash
		_, share := p.transferMs(s.Source, s.path, 0)
		t.Pull = Pull{
			Note: PullDearer, Source: i, Tokens: w.tokens, Behind: w.behind, TransferMs: w.transferMs, BytesPerMs: share,
			Figure: s.path.Figure, StillThere: s.there, PaysFromBytesPerMs: math.Inf(1),
		}
		bytes := w.movedTokens * s.Transfer.BytesPerToken
		if spare := ownMs - (totalMs - bytes/share); spare > 0 {
			t.Pull.PaysFromBytesPerMs = bytes / spare
		}
		t.PullMs = w.moveMs + w.computeMs
	}
	if !(bestMs < ownMs) {
		t.Pull.Note = max(t.Pull.Note, note)
		return own
	}
	t.Pull.Note = best.note
	if best.note == PullTaken && best.behind == have.inGPU {
		t.HostTokens, t.LoadMs = 0, math.NaN()
	} else if !math.IsNaN(t.LoadMs) {
		t.LoadMs = best.loadMs
	}
	return best.offer
}

// wayFrom is the cheapest way to use a source, and what it is worth in ms. Its
// note is below PullDearer if there is none.
func (p *pricer) wayFrom(c *Candidate, s *sourceReuse, have *ownReuse, ownMs float64) (best way, bestMs float64) {
	bestMs = math.Inf(1)
	consider := func(w way) {
		// The operator's limit is on what is moved if all is as it is believed.
		if limit := p.req.MaxTransferMs; limit > 0 && w.transferMs > limit {
			best.note = max(best.note, PullTooLong)
			return
		}
		if ms := p.worthMs(c.Worker, &w.offer); ms < bestMs {
			best, bestMs = w, ms
		}
	}
	best.note = PullNoMore
	if s.held > have.inGPU {
		consider(p.moved(c, s, have, have.inGPU, 0))
	}
	if s.held > have.reused && have.reused > have.inGPU {
		// Reading back what is in its host memory first may be the better way. No
		// connector tells which of the two its engine takes: a match must not cost,
		// so the better one counts.
		if loadMs := c.Host.readMs(have.reused - have.inGPU); !math.IsNaN(loadMs) {
			consider(p.moved(c, s, have, have.reused, loadMs))
		}
	}
	if s.held <= have.reused {
		if w := p.spare(c, s, have); p.worthMs(c.Worker, &w.offer) < ownMs {
			consider(w)
		}
	}
	return best, bestMs
}

// moved is the way that moves what the worker does not hold, behind tokens of its
// own that take loadMs to read back.
func (p *pricer) moved(c *Candidate, s *sourceReuse, have *ownReuse, behind int, loadMs float64) way {
	w := way{offer: p.offer(c.Worker, s.held), note: PullTaken, tokens: s.held - behind, behind: behind}
	w.transferMs, _ = p.transferMs(s.Source, s.path, w.tokens)
	w.movedTokens = have.there*float64(w.tokens) + (1-have.there)*float64(s.held)
	w.moveMs, w.loadMs = have.there*w.transferMs+(1-have.there)*s.wholeMs, have.there*loadMs
	lostMs := have.there*p.prefillMs(c.Worker, behind) + (1-have.there)*have.nothingMs
	w.doubtMs = (1 - s.there) * positive(lostMs-w.computeMs)
	return w
}

// spare is the own way with a source that is asked only for what is gone, which
// takes setting up in any case.
func (p *pricer) spare(c *Candidate, s *sourceReuse, have *ownReuse) way {
	w := way{offer: have.way, note: PullSpare, tokens: s.held, transferMs: s.wholeMs, movedTokens: (1 - have.there) * float64(s.held)}
	setupMs, _ := p.transferMs(s.Source, s.path, 0)
	w.moveMs, w.loadMs = have.there*setupMs+(1-have.there)*s.wholeMs, have.there*w.loadMs
	goneMs := s.there*p.prefillMs(c.Worker, s.held) + (1-s.there)*have.nothingMs
	w.doubtMs = have.there*w.unknownMs + (1-have.there)*positive(goneMs-w.computeMs)
	return w
}

// prefillMs is computing what is behind held tokens.
func (p *pricer) prefillMs(w *Worker, held int) float64 {
	return w.Steps.PrefillMs(held, p.promptTokens-held)
}

// offer prices computing what is behind reused tokens on a worker.
func (p *pricer) offer(w *Worker, reused int) offer {
	o := offer{tokens: p.promptTokens - reused}
	o.computeMs = w.Steps.PrefillMs(reused, o.tokens)
	// Half a decode step cannot make an idle worker slower than a busy one.
	first := max(w.Waiting.OwnMs(&w.Steps, p.sit.NowMs, reused, o.tokens), w.Steps.IdleMs(reused, o.tokens))
	o.startMs = first - o.computeMs
	return o
}

// AppendSources appends the workers worth pulling from to dst: those that hold
// most of the prompt in the tier they export, of equal ones those that send
// least, then by the hash of request and worker, so that one holder does not
// send to all. sending counts the transfers a worker is sending.
func (b *Board) AppendSources(dst []Source, req *Request, matches *Matches, sending func(*Worker) int) []Source {
	if b.pulling == 0 {
		return dst
	}
	key := xxh3.HashString(req.ID)
	first := len(dst)
	before := func(a, b *Source) bool {
		if a.Tokens != b.Tokens {
			return a.Tokens > b.Tokens
		}
		if a.Sending != b.Sending {
			return a.Sending < b.Sending
		}
		return rendezvous(key, a.hash()) > rendezvous(key, b.hash())
	}
	for id, m := range matches.All() {
		at := b.position(id)
		if at < 0 || b.rows[at].flags&rowPulls == 0 {
			continue
		}
		w := b.workers[at]
		s := Source{Worker: w, Tokens: int(m.GPUTokens), Predicted: m.Predicted}
		if w.Transfer.ExportedTier == TierHost {
			s.Tokens = int(m.HostTokens)
		}
		full := len(dst)-first == MaxSources
		if w.Transfer.ExportedTier == "" || w.Barred != ReasonNone || s.Tokens <= 0 || full && s.Tokens < dst[len(dst)-1].Tokens {
			continue
		}
		s.Sending = sending(w)
		if full {
			if !before(&s, &dst[len(dst)-1]) {
				continue
			}
		} else {
			dst = append(dst, Source{})
		}
		to := len(dst) - 1
		for ; to > first && before(&s, &dst[to-1]); to-- {
			dst[to] = dst[to-1]
		}
		dst[to] = s
	}
	return dst
}
