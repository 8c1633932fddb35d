package core

import "time"

// Finish says why a request ended.
type Finish string

// The reasons; empty while the request runs.
const (
	FinishStop   Finish = "stop"
	FinishLength Finish = "length"
	FinishAbort  Finish = "abort"
)

// Request is one prompt to generate for.
type Request struct {
	// ID is unique among the live requests.
	ID string
	// Prompt is not changed; it must not change while the request lives.
	Prompt []uint32
	// MaxTokens is the largest number of generated tokens, at least 1.
	MaxTokens int
	// Generate is the generated token i, from 0, and whether it ends the
	// answer. It must depend on its argument only.
	Generate func(i int) (token uint32, end bool)
	// Salt and Adapter separate cache namespaces.
	Salt    string
	Adapter *Adapter
	// SessionID is copied to the store events the request causes.
	SessionID string
	// SkipCacheRead computes the whole prompt, as for prompt logprobs.
	SkipCacheRead bool
	// ReportHits announces hit blocks again although no copy is made.
	ReportHits bool
}

// Sequence is the life of one request in the engine. Its methods may be called
// between the calls of the Core that owns it.
type Sequence struct {
	req    Request
	tokens []uint32
	hashes []Hash
	blocks []uint32
	// computed is the number of tokens whose KV exists; named is the number of
	// leading blocks that are in the cache under their hash.
	computed, named int
	// step is the number of tokens the current step computes for it.
	step int

	cachedTokens int
	preemptions  int
	finish       Finish

	arrived, started, first, last time.Duration
}

// ID is the request's.
func (s *Sequence) ID() string { return s.req.ID }

// Adapter is the request's, nil for the base model.
func (s *Sequence) Adapter() *Adapter { return s.req.Adapter }

// PromptTokens is the length of the prompt.
func (s *Sequence) PromptTokens() int { return len(s.req.Prompt) }

// OutputTokens is the number of tokens generated so far.
func (s *Sequence) OutputTokens() int { return len(s.tokens) - len(s.req.Prompt) }

// CachedTokens is the number of prompt tokens found in the cache when the
// request was first admitted, or -1 before that.
func (s *Sequence) CachedTokens() int { return s.cachedTokens }

// Preemptions counts how often the request lost its blocks.
func (s *Sequence) Preemptions() int { return s.preemptions }

// Finish is empty while the request lives.
func (s *Sequence) Finish() Finish { return s.finish }

// Arrived is when the request was added. This and the other times are on the
// caller's clock, and zero before they happen.
func (s *Sequence) Arrived() time.Duration { return s.arrived }

// Started is when the request was first admitted.
func (s *Sequence) Started() time.Duration { return s.started }

// First is when the first token was ready.
func (s *Sequence) First() time.Duration { return s.first }

// Last is when the newest token was ready.
func (s *Sequence) Last() time.Duration { return s.last }

// hash returns the sequence's block hashes up to block n, exclusive.
func (s *Sequence) hash(h *hasher, n, blockTokens int) []Hash {
	for i := len(s.hashes); i < n; i++ {
		parent, salt := h.root, s.req.Salt
		if i > 0 {
			parent, salt = s.hashes[i-1], ""
		}
		tokens := s.tokens[i*blockTokens : (i+1)*blockTokens]
		s.hashes = append(s.hashes, h.block(parent, tokens, s.req.Adapter, salt))
	}
	return s.hashes[:n]
}
