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
)

var pullWords = [...]string{
	"", "no connector", "connectors differ", "no side channel known", "transfer fingerprints differ", "tier is not exported", "source holds no more",
	"pair is off: pulls were not confirmed", "transfers are forbidden on the link", "link or KV size unknown", "over the pool's max_transfer",
	"recomputing is cheaper", "pulled",
}

// String is the note for a person.
func (n PullNote) String() string { return pullWords[min(int(n), len(pullWords)-1)] }

// Pull is the best transfer found for a candidate.
type Pull struct {
	// Note says whether it is made, or why not.
	Note PullNote
	// Source is the source's index in Situation.Sources; meaningful from
	// PullDearer on.
	Source int
	// Tokens are moved, the rest of the prompt is computed behind them.
	Tokens int
	// TransferMs is the time on the way.
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
	startMs, computeMs float64
	tokens             int // to compute
	doubtMs            float64
}

// pull finds the cheapest source for a candidate whose own way costs own, and
// returns the better of both. Among sources closer than the policy's tie the
// hash of request and source decides, so that one holder does not send to all.
func (p *pricer) pull(c *Candidate, t *Terms, own offer) offer {
	best, bestMs := own, math.Inf(1)
	var bestHash uint64
	ownMs := own.startMs + own.computeMs + own.doubtMs
	for i := range p.sit.Sources {
		s := &p.sit.Sources[i]
		if s.Worker == nil || s.Worker.ID == c.Worker.ID || s.Worker.Name == c.Worker.Name || i >= len(c.Paths) {
			continue
		}
		path := &c.Paths[i]
		note := eligible(c.Worker, s.Worker, path)
		held := reusableTokens(s.Tokens, p.promptTokens, c.Worker.BlockTokens)
		if note == PullNone && held <= max(t.ReuseTokens, 0) {
			note = PullNoMore
		}
		if note != PullNone {
			t.Pull.Note = max(t.Pull.Note, note)
			continue
		}
		moved := held - max(t.ReuseTokens, 0)
		transfer, share := p.transferMs(s, path, moved)
		if limit := p.req.MaxTransferMs; limit > 0 && transfer > limit {
			t.Pull.Note = max(t.Pull.Note, PullTooLong)
			continue
		}
		o := p.offer(c.Worker, held)
		there := p.stillThere(&s.View, s.Predicted)
		o.doubtMs = own.doubtMs + (1-there)*positive(own.computeMs-o.computeMs)
		total := o.startMs + transfer + o.computeMs + o.doubtMs
		hash := rendezvous(p.tieKey(), s.hash())
		if total > bestMs+p.policy.TieMs || total >= bestMs-p.policy.TieMs && hash < bestHash {
			continue
		}
		bestMs, bestHash = total, hash
		t.Pull = Pull{Note: PullDearer, Source: i, Tokens: moved, TransferMs: transfer, BytesPerMs: share, Figure: path.Figure, StillThere: there, PaysFromBytesPerMs: math.Inf(1)}
		bytes := float64(moved) * s.Transfer.BytesPerToken
		if spare := ownMs - (total - bytes/share); spare > 0 {
			t.Pull.PaysFromBytesPerMs = bytes / spare
		}
		t.PullMs = transfer + o.computeMs
		best = own
		if total < ownMs {
			t.Pull.Note = PullTaken
			best = o
		}
	}
	return best
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
