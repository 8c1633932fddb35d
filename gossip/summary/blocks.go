package summary

import "waypost/gossip/prefix"

// Block is one block of an unbroken prefix as a block table tells it.
type Block struct {
	// ID names the block at the table until it is detached; it is never 0 and
	// a later block may get it again.
	ID uint32
	// Parent is the ID of the block before this one; 0 is the root.
	Parent uint32
	// StartTokens and EndTokens are the depths in tokens before the block's
	// first and after its last token: EndTokens > StartTokens, and StartTokens
	// is the parent's EndTokens (0 at the root).
	StartTokens, EndTokens uint32
	// Domain is the index of the prefix's domain, for Blocks.DomainOf.
	Domain uint16
	// Usable says whether the engine could end a match here: window groups of
	// hybrid models hold only some ends.
	Usable bool
	// Tier is where the block is held.
	Tier Tier
}

// Tier is the fastest memory that holds a block.
type Tier uint8

// The tiers, fast ones first.
const (
	TierGPU Tier = iota
	TierHost
	TierDisk
)

// String names the tier.
func (t Tier) String() string {
	switch t {
	case TierGPU:
		return "gpu"
	case TierHost:
		return "host"
	case TierDisk:
		return "disk"
	}
	return "unknown tier"
}

// Listener is told the changes of the unbroken prefixes of one block table, in
// order and on the table's goroutine. Calls must not reenter the table's
// mutating methods; the methods of Blocks may be called.
type Listener interface {
	// Attached tells that b became part of an unbroken prefix; its parent is
	// attached already.
	Attached(b Block)
	// Detached tells that a block ceased to be part of one; its children are
	// detached already. The block may still be asked about during the call.
	Detached(id uint32)
	// UsableChanged tells that a match may, or may no longer, end at an
	// attached block.
	UsableChanged(id uint32, usable bool)
	// StoreEnded tells that an attached block is the last one of a store
	// event: the end of a prompt or of a step of growth.
	StoreEnded(id uint32)
	// Cleared tells that every block is detached at once.
	Cleared()
}

// TierListener is a Listener for tables that follow blocks into lower tiers: a
// block stays attached while any tier holds it.
type TierListener interface {
	Listener
	// TierChanged tells that another tier is now the fastest one that holds an
	// attached block.
	TierChanged(id uint32, tier Tier)
}

// Checkpoint is a point of a prefix at a multiple of prefix.ChunkTokens.
type Checkpoint struct {
	// DepthTokens is the length of the prefix in tokens.
	DepthTokens uint32
	// Chain is the chain value of the prefix.
	Chain prefix.Chain
}

// Blocks is what an encoder asks of a block table about attached blocks.
type Blocks interface {
	// PlaceOf gives the ID of the block before a block, 0: the root, and the depth
	// in tokens after the block's last token.
	PlaceOf(id uint32) (parent, endTokens uint32)
	// PointOf gives the chain value of the prefix that ends with the block.
	PointOf(id uint32) prefix.Chain
	// CheckpointsIn appends the checkpoints of the block's depths in
	// (StartTokens, EndTokens] to dst, shallow first.
	CheckpointsIn(id uint32, dst []Checkpoint) []Checkpoint
	// DomainOf gives a domain by its index.
	DomainOf(i uint16) prefix.Domain
}
