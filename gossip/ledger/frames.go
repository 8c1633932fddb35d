package ledger

import (
	"errors"
	"fmt"

	"waypost/gossip/prefix"
)

// ErrFrame is wrapped by every error about a frame of claims or marks.
var ErrFrame = errors.New("bad ledger frame")

// Bounds of frames. A frame beyond them is refused whole.
const (
	// MaxOffers bounds the claims of one frame: as many as an agent keeps of
	// one worker.
	MaxOffers = 4096
	// MaxClaimKeys bounds the prefix keys of one claim.
	MaxClaimKeys = 1 << 16
	// MaxSequences bounds the answers that one request asks for.
	MaxSequences = 256
	// MaxClaimAgeMs bounds the age of a claim or mark on its way; it is the
	// longest life of a claim.
	MaxClaimAgeMs = 600_000
)

// Offer is a claim on its way to another process. Its age stands in place of
// the time it was made: nobody compares clocks.
type Offer struct {
	// AgeMs is the age of the claim at sending, 0 to MaxClaimAgeMs.
	AgeMs float64
	// Claim is the claim; its MadeMs means nothing to the receiver.
	Claim
}

// Received is the claim on the receiver's clock.
func (o *Offer) Received(nowMs float64) Claim {
	c := o.Claim
	c.MadeMs = nowMs - o.AgeMs
	c.Sequences = max(c.Sequences, 1)
	return c
}

// Validate reports the first field that is out of range, by its wire name.
func (o *Offer) Validate() error {
	field, detail := "", ""
	switch {
	case o.Seq == 0:
		field, detail = "seq", "is 0; seqs count from 1"
	case o.EngineProcess == 0:
		field, detail = "engineProcess", "is 0; name the engine life it was made for"
	case !(o.AgeMs >= 0 && o.AgeMs <= MaxClaimAgeMs):
		field, detail = "ageMs", fmt.Sprintf("%v is not in 0 to %d", o.AgeMs, MaxClaimAgeMs)
	default:
		field, detail = o.Fault()
	}
	if field == "" {
		return nil
	}
	return fmt.Errorf("%w: %s: %s", ErrFrame, field, detail)
}

// Fault names the first size of a claim that is out of range, by its wire name,
// and says what is wrong with it; empty: nothing is.
func (c *Claim) Fault() (field, detail string) {
	switch {
	case c.PromptTokens < 1 || c.PromptTokens > MaxTokens:
		return "promptTokens", fmt.Sprintf("%d is not in 1 to %d", c.PromptTokens, MaxTokens)
	case c.UncachedTokens < 1 || c.UncachedTokens > c.PromptTokens:
		return "uncachedTokens", fmt.Sprintf("%d is not in 1 to the prompt's %d", c.UncachedTokens, c.PromptTokens)
	case !(c.OutputTokens >= 0 && c.OutputTokens <= MaxTokens):
		return "outputTokens", fmt.Sprintf("%v is not in 0 to %d", c.OutputTokens, MaxTokens)
	case c.Sequences < 0 || c.Sequences > MaxSequences:
		return "n", fmt.Sprintf("%d is not in 1 to %d", c.Sequences, MaxSequences)
	case len(c.Keys) != len(c.KeyDepths):
		return "keyDepths", fmt.Sprintf("%d depths for %d keys", len(c.KeyDepths), len(c.Keys))
	case len(c.Points) > c.PromptTokens/PointTokens:
		return "points", fmt.Sprintf("%d are more than a prompt of %d tokens has", len(c.Points), c.PromptTokens)
	case len(c.Session) > MaxSessionBytes:
		return "session", fmt.Sprintf("%d bytes are more than %d", len(c.Session), MaxSessionBytes)
	case len(c.Keys) > MaxClaimKeys:
		return "keys", fmt.Sprintf("%d are more than %d", len(c.Keys), MaxClaimKeys)
	}
	for i, depth := range c.KeyDepths {
		if depth == 0 || int(depth) > c.PromptTokens || i > 0 && depth <= c.KeyDepths[i-1] {
			return fmt.Sprintf("keyDepths[%d]", i), fmt.Sprintf("%d is not above the former and within the prompt", depth)
		}
	}
	return "", ""
}

// ClaimFrame is claims of one coordinator for one worker on a lane.
type ClaimFrame struct {
	// Coordinator is the process mark of the coordinator.
	Coordinator uint64
	// Agent is the process mark of the agent it is meant for; another one
	// ignores it.
	Agent uint64
	// Prev is the last seq offered on this lane before the frame, or the echo
	// when claims are offered again.
	Prev uint64
	// Offers are the claims by seq, all above Prev.
	Offers []Offer
	// PointsKeyID is the id of the cluster key that the claims' points are made
	// with.
	PointsKeyID string
}

// Validate reports the first field that is out of range, by its wire name.
func (f *ClaimFrame) Validate() error {
	if f.Coordinator == 0 {
		return fmt.Errorf("%w: coordinator: is 0; the coordinator must send its process mark", ErrFrame)
	}
	if len(f.Offers) > MaxOffers {
		return fmt.Errorf("%w: claims: %d are more than %d", ErrFrame, len(f.Offers), MaxOffers)
	}
	last := f.Prev
	for i := range f.Offers {
		o := &f.Offers[i]
		if o.Seq <= last {
			return fmt.Errorf("%w: claims[%d].seq: %d is not above %d", ErrFrame, i, o.Seq, last)
		}
		last = o.Seq
		if err := o.Validate(); err != nil {
			return fmt.Errorf("claims[%d]: %w", i, err)
		}
	}
	return nil
}

// Marked is a mark on its way to the agent of the claim's worker.
type Marked struct {
	// Seq is the claim's.
	Seq uint64
	// What happened to it.
	What Mark
	// AgeMs is the age of the mark at sending, 0 to MaxClaimAgeMs.
	AgeMs float64
	// OutputTokens is the length of the answer for MarkDone; 0: unknown.
	OutputTokens int
	// CachedTokens is how much of the prompt the engine reused, for MarkDone;
	// nil: unknown.
	CachedTokens *int
}

// LearntPrompt is the prompt of a claim of which more is known than when it was
// told: it was placed by a text.
type LearntPrompt struct {
	// Seq is the claim's.
	Seq uint64
	// PromptTokens is the prompt length, Points are as those of a claim.
	PromptTokens int
	Points       []prefix.Key
}

// MarkFrame is marks of one coordinator on its claims of one worker.
type MarkFrame struct {
	// Coordinator is the process mark of the coordinator.
	Coordinator uint64
	// Learnt are prompts that became known; they come before the marks.
	Learnt []LearntPrompt
	// PointsKeyID is the id of the cluster key that their points are made with.
	PointsKeyID string
	// Marks are in the order they were made.
	Marks []Marked
}

// Validate reports the first field that is out of range, by its wire name.
func (f *MarkFrame) Validate() error {
	if f.Coordinator == 0 {
		return fmt.Errorf("%w: coordinator: is 0; the coordinator must send its process mark", ErrFrame)
	}
	if len(f.Marks) > MaxOffers {
		return fmt.Errorf("%w: marks: %d are more than %d", ErrFrame, len(f.Marks), MaxOffers)
	}
	if len(f.Learnt) > MaxOffers {
		return fmt.Errorf("%w: learnt: %d are more than %d", ErrFrame, len(f.Learnt), MaxOffers)
	}
	for i := range f.Learnt {
		switch l := &f.Learnt[i]; {
		case l.Seq == 0:
			return fmt.Errorf("%w: learnt[%d].seq: is 0; seqs count from 1", ErrFrame, i)
		case l.PromptTokens < 1 || l.PromptTokens > MaxTokens:
			return fmt.Errorf("%w: learnt[%d].promptTokens: %d is not in 1 to %d", ErrFrame, i, l.PromptTokens, MaxTokens)
		case len(l.Points) > l.PromptTokens/PointTokens:
			return fmt.Errorf("%w: learnt[%d].points: %d are more than a prompt of %d tokens has", ErrFrame, i, len(l.Points), l.PromptTokens)
		}
	}
	for i := range f.Marks {
		m := &f.Marks[i]
		bad := func(field, format string, args ...any) error {
			return fmt.Errorf("%w: marks[%d].%s: %s", ErrFrame, i, field, fmt.Sprintf(format, args...))
		}
		switch {
		case m.Seq == 0:
			return bad("seq", "is 0; seqs count from 1")
		case !m.What.Valid():
			return bad("what", "%.40q is not first, done, failed, gone or superseded", string(m.What))
		case !(m.AgeMs >= 0 && m.AgeMs <= MaxClaimAgeMs):
			return bad("ageMs", "%v is not in 0 to %d", m.AgeMs, MaxClaimAgeMs)
		case m.CachedTokens != nil && (*m.CachedTokens < 0 || *m.CachedTokens > MaxTokens):
			return bad("cachedTokens", "%d is not in 0 to %d", *m.CachedTokens, MaxTokens)
		case m.OutputTokens < 0 || m.OutputTokens > MaxTokens:
			return bad("outputTokens", "%d is not in 0 to %d", m.OutputTokens, MaxTokens)
		}
	}
	return nil
}

// Placed is one placement as told to the other coordinators. It may be lost.
type Placed struct {
	// Worker is host/engine/rank.
	Worker string
	// Tenant and RequestID name the request, Attempt counts from 1.
	Tenant, RequestID string
	Attempt           uint32
	// Placement is the placement's id, which its issuer knows it by; empty: not
	// told.
	Placement string
	// Offer is the claim.
	Offer
}

// maxPlacedNameBytes bounds the names in a placement.
const maxPlacedNameBytes = 1024

// Validate reports the first field that is out of range, by its wire name.
func (p *Placed) Validate() error {
	for _, f := range [...]struct{ name, value string }{
		{"worker", p.Worker}, {"tenant", p.Tenant}, {"requestId", p.RequestID}, {"placementId", p.Placement},
	} {
		if len(f.value) > maxPlacedNameBytes {
			return fmt.Errorf("%w: %s: %d bytes are more than %d", ErrFrame, f.name, len(f.value), maxPlacedNameBytes)
		}
	}
	if p.Worker == "" {
		return fmt.Errorf("%w: worker: is empty", ErrFrame)
	}
	return p.Offer.Validate()
}
