package engine

import (
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// Mirror follows the cache of one rank of an engine that publishes nothing, by
// the requests the rank is given. It tells a listener the prefixes that a new
// request could reuse; its blocks tell prefix keys in place of chain values. It
// is not safe for concurrent use.
type Mirror interface {
	summary.Blocks
	// Listen replaces the listener and tells it all that can be reused.
	Listen(summary.Listener)
	// Begin tells a request in the order of arrival: keys are its prompt's
	// prefix keys at each ledger.PointTokens tokens, slot is the one it names,
	// -1: none. expected is the reuse it gets by what is known; -1: not known
	// yet.
	Begin(id ledger.ClaimID, keys []prefix.Key, promptTokens, slot int) (expected int)
	// Learn tells that more is known of a request's prompt than when it was
	// told: keys and promptTokens are as those of Begin.
	Learn(id ledger.ClaimID, keys []prefix.Key, promptTokens int)
	// First tells that the first token of its answer came.
	First(id ledger.ClaimID)
	// Done tells its end, with the length of the answer, 0: not known, and the
	// reuse that the engine reported, -1: not known.
	Done(id ledger.ClaimID, outputTokens, cachedTokens int)
	// Gone tells that it came to no good end.
	Gone(id ledger.ClaimID)
	// Reset forgets everything: the engine's cache is empty.
	Reset()
	// Blocks is the number of blocks that can be reused.
	Blocks() int
	// Idle are the slots that a request could name for what they are known to
	// hold.
	Idle() []ledger.IdleSlot
}

// MirrorSink is a Sink that drives mirrors. A Sink that is none leaves them
// alone, and nothing is then known of such an engine's cache.
type MirrorSink interface {
	// Mirror gives the sink a rank's mirror, which replaces the former one.
	// From now on it is used within Update only.
	Mirror(rank int, m Mirror)
	// Update calls change while nobody else uses the rank's mirror.
	Update(rank int, change func())
}
