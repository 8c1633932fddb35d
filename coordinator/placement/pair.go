package placement

import (
	"cmp"
	"math"
	"slices"
)

// Role says which part of a request a worker serves.
type Role uint8

// The roles. RoleWhole is the zero value: prefill and decode.
const (
	RoleWhole Role = iota
	RolePrefill
	RoleDecode
)

var roleWords = [...]string{"", "prefill", "decode"}

// String is the word of the wire; empty for RoleWhole.
func (r Role) String() string { return roleWords[min(int(r), len(roleWords)-1)] }

// RoleOf reads a word of the wire.
func RoleOf(word string) (r Role, ok bool) {
	i := slices.Index(roleWords[:], word)
	return Role(max(i, 0)), i >= 0
}

// MaxPartners bounds the decode workers that are kept per prefill worker.
const MaxPartners = 4

// Partner is a worker that may decode what a candidate prefills.
type Partner struct {
	*Worker
	// MatchedTokens and Predicted say what it holds already, as in Candidate.
	MatchedTokens int
	Predicted     bool
	// DistanceMs and SurchargeMs are its way from the caller.
	DistanceMs, SurchargeMs float64
	// Path is the way from the candidate to it.
	Path Path
}

// handOver is the price of decoding at a partner.
type handOver struct {
	// ms stands before the first token: the transfer of what the partner does
	// not hold, its room, the step in flight and the doubt about it.
	ms float64
	// transferMs is the transfer alone.
	transferMs float64
	distanceMs float64
	gapMs      float64
}

// handOver prices decoding at q what w prefilled; false: they cannot.
func (p *pricer) handOver(w *Worker, q *Partner) (h handOver, ok bool) {
	note := eligible(q.Worker, w, &q.Path)
	if note != PullNone && note != PullPairOff || q.Path.Never {
		return h, false
	}
	move := func(tokens int) (ms float64) {
		if note == PullPairOff {
			// Transfers of the pair were not seen to work: the decode worker is
			// expected to compute what it does not hold. That is no reason to
			// refuse where there is no other pair.
			return q.Steps.PrefillMs(p.promptTokens-tokens, tokens)
		}
		ms, _ = p.transferMs(&Source{Worker: w}, &q.Path, tokens)
		return ms
	}
	c := Candidate{Worker: q.Worker, MatchedTokens: q.MatchedTokens, Predicted: q.Predicted}
	held := max(p.reuse(&c), 0)
	h.transferMs = move(p.promptTokens - held)
	if limit := p.req.MaxTransferMs; limit > 0 && note == PullNone && h.transferMs > limit {
		return h, false
	}
	h.gapMs = p.gapMs(q.Worker)
	h.distanceMs = q.DistanceMs + q.SurchargeMs
	h.ms = h.transferMs + q.Steps.DecodeMs()/2 + positive(p.roomMs(q.Worker, p.promptTokens-held)) + p.ageDoubtMs(q.Worker)
	if held > 0 {
		h.ms += (1 - p.stillThere(&q.View, q.Predicted)) * (move(p.promptTokens) - h.transferMs)
	}
	return h, true
}

// worth is what a hand-over adds to the total.
func (h *handOver) worth(theta float64) float64 {
	return h.ms + positive(h.distanceMs) + theta*positive(h.gapMs)
}

// partner chooses the best of a prefill candidate's partners and writes its
// terms; it returns the partner's way from the caller, and false if none can
// take the request.
func (p *pricer) partner(c *Candidate, t *Terms) (distanceMs float64, ok bool) {
	best, least := -1, math.Inf(1)
	for i := range c.Partners {
		q := &c.Partners[i]
		h, ok := p.handOver(c.Worker, q)
		if !ok || p.reason(q.Worker) != ReasonNone {
			continue
		}
		worth := h.worth(p.policy.Theta)
		if worth > least || best >= 0 && worth == least && q.Worker.ID > c.Partners[best].Worker.ID {
			continue
		}
		best, least = i, worth
		t.HandMs, t.GapMs, t.Partner = h.ms, h.gapMs, i
		distanceMs = h.distanceMs
	}
	return distanceMs, best >= 0
}

// PairUp gives every candidate that only prefills the decode workers of its
// pool that are best for it, at most MaxPartners, so that Decide chooses the
// pair and the transfer between them jointly. It changes the candidates'
// Partners and nothing else; path is the way between two workers. Candidates
// of a pool without roles stay as they are.
//
// Decode workers are visited by what they cost without the transfer, until
// that alone exceeds what was found.
func PairUp(req *Request, candidates []Candidate, policy *Policy, sit Situation, path func(from, to *Worker) Path) {
	p := newPricer(req, policy, sit)
	type side struct {
		c    *Candidate
		base float64
	}
	var decoders []side
	for i := range candidates {
		c := &candidates[i]
		if c.Worker == nil || c.Role != RoleDecode || p.reason(c.Worker) != ReasonNone {
			continue
		}
		held := max(p.reuse(c), 0)
		base := c.Steps.DecodeMs()/2 + positive(p.roomMs(c.Worker, p.promptTokens-held)) + p.ageDoubtMs(c.Worker) +
			positive(c.DistanceMs+c.SurchargeMs) + policy.Theta*positive(p.gapMs(c.Worker))
		decoders = append(decoders, side{c, base})
	}
	slices.SortFunc(decoders, func(a, b side) int {
		return cmp.Or(cmp.Compare(a.base, b.base), cmp.Compare(a.c.Worker.ID, b.c.Worker.ID))
	})
	for i := range candidates {
		c := &candidates[i]
		if c.Worker == nil || c.Role != RolePrefill {
			continue
		}
		c.Partners = nil
		var worths []float64
		for _, d := range decoders {
			if len(worths) == MaxPartners && d.base > slack(worths[MaxPartners-1]) {
				break
			}
			q := Partner{
				Worker: d.c.Worker, MatchedTokens: d.c.MatchedTokens, Predicted: d.c.Predicted,
				DistanceMs: d.c.DistanceMs, SurchargeMs: d.c.SurchargeMs, Path: path(c.Worker, d.c.Worker),
			}
			h, ok := p.handOver(c.Worker, &q)
			if !ok {
				continue
			}
			worth := h.worth(policy.Theta)
			at, _ := slices.BinarySearchFunc(worths, worth, func(a, b float64) int {
				if a <= b {
					return -1
				}
				return 1
			})
			if at == MaxPartners {
				continue
			}
			worths, c.Partners = slices.Insert(worths, at, worth), slices.Insert(c.Partners, at, q)
			worths, c.Partners = worths[:min(len(worths), MaxPartners)], c.Partners[:min(len(worths), MaxPartners)]
		}
	}
}
