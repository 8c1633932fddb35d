package engine

import (
	"slices"
	"strings"
)

// Capability is a set of things that an engine was seen to do, or that it
// leaves out. Zero is none known.
type Capability uint32

// The capabilities.
const (
	// ReportsCachedTokens: usage of an answer tells how many prompt tokens were
	// reused.
	ReportsCachedTokens Capability = 1 << iota
	// OmitsZeroCachedTokens: usage without that number says that none were.
	OmitsZeroCachedTokens
	// PublishesEvents: block events arrive.
	PublishesEvents
	// ReplaysEvents: asked for earlier events, the engine answered to the end.
	ReplaysEvents
	// StoresLate: blocks of an answer may be told only after it has ended, so a
	// next turn that is sent at once can overtake them.
	StoresLate
	// OmitsAdapters and OmitsSalts: events have no place for an adapter's name
	// or a cache salt. Prompts with one are mirrored under nobody's or a wrong
	// name, so requests with one earn no credit.
	OmitsAdapters
	OmitsSalts
	// TokenizesText and TokenizesChats: the engine tells the token ids of a
	// text, or those that a chat request becomes.
	TokenizesText
	TokenizesChats
	// PinsSlots: a request can name the slot that serves it.
	PinsSlots
	// RecomputesLastBlock: of a match the last block is computed again although
	// it is held, besides the one with the last token of the prompt, which every
	// engine computes: speculative decoding needs it.
	RecomputesLastBlock
	// WantsClaimPoints: the engine publishes nothing, and the agent follows its
	// cache by claims, which carry a point every 16 tokens for it.
	WantsClaimPoints
	// SelfTestEvents: a probe prompt's blocks were told. SelfTestKeys: under the
	// keys that coordinators make of it. SelfTestReuse: run again, the engine
	// reported as many cached tokens as that predicts. SelfTestFailed: one of
	// these was tried and is not so.
	SelfTestEvents
	SelfTestKeys
	SelfTestReuse
	SelfTestFailed
	// NamesSessions: events of stored blocks name the session that the request
	// which stored them gave itself.
	NamesSessions
	// ReadsHostTier: KV that the engine offloaded to host memory is read back when
	// a prompt begins with it, and what comes and goes there is told or followed.
	ReadsHostTier
)

// capabilityNames are the names that operators and coordinators see, in the
// order of the bits.
var capabilityNames = [...]string{
	"cached-tokens", "cached-tokens-if-any", "kv-events", "kv-replay", "late-stores", "omits-adapters", "omits-salts", "tokenize", "render", "slots", "recomputes-last-block", "claim-points",
	"self-test-events", "self-test-keys", "self-test-reuse", "self-test-failed",
	"event-sessions", "host-tier",
}

// Has says whether all of some capabilities are among c.
func (c Capability) Has(some Capability) bool { return c&some == some }

// With is c with some capabilities, or without them.
func (c Capability) With(some Capability, on bool) Capability {
	if on {
		return c | some
	}
	return c &^ some
}

// Names are the names of the capabilities, in a fixed order.
func (c Capability) Names() (names []string) {
	for i, name := range capabilityNames {
		if c.Has(1 << i) {
			names = append(names, name)
		}
	}
	return names
}

// CapabilityOf is the set of some names; those that are not known count for
// nothing.
func CapabilityOf(names []string) (c Capability) {
	for i, name := range capabilityNames {
		if slices.Contains(names, name) {
			c |= 1 << i
		}
	}
	return c
}

// String names the capabilities.
func (c Capability) String() string { return strings.Join(c.Names(), ",") }
