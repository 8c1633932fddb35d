package ledger

import "waypost/gossip/prefix"

// ClaimID is the identity of a claim at one worker.
type ClaimID struct {
	// Coordinator is the process mark of its issuer.
	Coordinator uint64
	// Seq is the claim's.
	Seq uint64
}

// PointTokens is the distance of a claim's points.
const PointTokens = 16

// Claim is one placement as told to the chosen worker's agent and to other
// coordinators. Its identity is (coordinator process, worker, seq).
type Claim struct {
	// Seq is dense per coordinator process and worker.
	Seq uint64
	// EngineProcess is the engine life it was made for; equality only.
	EngineProcess uint64
	// MadeMs is when it was made, on the holder's monotonic clock.
	MadeMs float64
	// PromptTokens is the prompt length, UncachedTokens the part of it that
	// is expected to be computed, at least 1.
	PromptTokens, UncachedTokens int
	// OutputTokens is the expected output length.
	OutputTokens float64
	// Sequences is the number of answers asked for, at least 1.
	Sequences int
	// Keys are the prefix keys of the new part, KeyDepths their depths in
	// tokens; both have the same length.
	Keys      []prefix.Key
	KeyDepths []uint32
	// AfterKey is the index key (see gossip/summary) of the last checkpoint
	// before the first of Keys, on which they hang; 0: there is none, or none is
	// known.
	AfterKey uint64
	// Points are the prefix keys of the whole prompt at each PointTokens tokens,
	// as far as known, for workers whose agent follows the cache by the requests
	// it is told; else none.
	Points []prefix.Key
	// Slot is the slot that the request names; nil: none.
	Slot *uint32
	// Session is the name that the request gives itself, by which the worker's
	// agent shall tell what the engine stores of the prompt; empty: it shall not.
	Session string
}

// MaxSessionBytes bounds the name of a session.
const MaxSessionBytes = 64

// IdleSlot is a slot of an engine that serves nobody, and the longest prefix
// that it is known to hold.
type IdleSlot struct {
	// Slot is its number, as requests name it.
	Slot uint32
	// DepthTokens is the length of the prefix, Key names it.
	DepthTokens uint32
	Key         prefix.Key
}

// ReusedTokens is the part of the prompt expected to be found in the cache.
func (c *Claim) ReusedTokens() int { return max(c.PromptTokens-c.UncachedTokens, 0) }

// Mark says what happened to a claim. Marks are never repeated; unknown,
// second or late ones change nothing.
type Mark string

// The marks.
const (
	// MarkFirst: the first token was seen; the prefill is over.
	MarkFirst Mark = "first"
	// MarkDone: the answer is complete.
	MarkDone Mark = "done"
	// MarkFailed: the worker failed it.
	MarkFailed Mark = "failed"
	// MarkGone: the caller gave it up or never sent it.
	MarkGone Mark = "gone"
	// MarkSuperseded: a later attempt took its place.
	MarkSuperseded Mark = "superseded"
)

// Ends reports whether the mark ends a claim.
func (m Mark) Ends() bool {
	switch m {
	case MarkDone, MarkFailed, MarkGone, MarkSuperseded:
		return true
	}
	return false
}

// Valid reports whether m is a known mark.
func (m Mark) Valid() bool { return m == MarkFirst || m.Ends() }
