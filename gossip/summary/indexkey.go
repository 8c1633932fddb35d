package summary

import (
	"math/bits"

	"waypost/gossip/prefix"
)

// IndexKey is the chained name under which a coordinator keeps a prefix; 0 is
// the root, the empty prefix. It is made of the top bits of prefix keys, chained
// from checkpoint to checkpoint: a collision needs the same predecessor, so two
// bytes per checkpoint and point suffice on the wire. With one byte per point, a
// chunk in which a hundred conversations leave a shared system prompt would
// promise every third newcomer a prefix that is not there.
type IndexKey uint64

// Widths of the fingerprints that an index key is made of, in bits. The wide
// ones stand where no checkpoint precedes.
const (
	firstCheckpointBits = 32
	checkpointBits      = 16
	firstPointBits      = 24
	pointBits           = 16
)

// CheckpointKey is the index key of the prefix named k that ends at a
// checkpoint, depthTokens deep; prev is the index key of the checkpoint before
// it, 0 if there is none. It uses the top 16 bits of k, and the top 32 for the
// first checkpoint.
func CheckpointKey(prev IndexKey, depthTokens uint32, k prefix.Key) IndexKey {
	if prev == 0 {
		return chain(0, depthTokens, uint32(k>>(64-firstCheckpointBits)))
	}
	return chain(prev, depthTokens, uint32(k>>(64-checkpointBits)))
}

// PointKey is the index key of the prefix named k that ends between
// checkpoints, depthTokens deep; checkpoint is the index key of the last
// checkpoint before it, 0 if there is none. It uses the top 16 bits of k, and
// the top 24 before the first checkpoint.
func PointKey(checkpoint IndexKey, depthTokens uint32, k prefix.Key) IndexKey {
	if checkpoint == 0 {
		return chain(0, depthTokens, uint32(k>>(64-firstPointBits)))
	}
	return chain(checkpoint, depthTokens, uint32(k>>(64-pointBits)))
}

// chain mixes a fingerprint into the key before it; never 0. The result is
// spread over all 64 bits, but anybody who knows the fingerprints can compute it.
func chain(prev IndexKey, depthTokens, fingerprint uint32) IndexKey {
	hi, lo := bits.Mul64(uint64(prev)^0x9e3779b97f4a7c15, (uint64(depthTokens)<<32|uint64(fingerprint))^0xa0761d6478bd642f)
	if x := hi ^ lo; x != 0 {
		return IndexKey(x)
	}
	return 1
}

// Extent says what of a held prefix is worth how much. All three are depths in
// tokens, at most the depth of the key it belongs to. An ordinary key has the
// extent of its depth: everything can be reused and is in GPU memory.
type Extent struct {
	// UsableTokens is the deepest end, at or before the key, at which the engine
	// can end a match; 0: there is none. It is less than the depth where the
	// engine's blocks end elsewhere or a window group of a hybrid model lacks
	// blocks. Residency alone drives a search; a match is rounded down to this.
	UsableTokens uint32
	// GPUTokens is how much of the prefix, from its start, is in GPU memory.
	GPUTokens uint32
	// HostTokens, at least GPUTokens, is how much of the prefix, from its start,
	// is in GPU or host memory; the rest up to the key is on disk.
	HostTokens uint32
}

// WholeExtent is the extent of an ordinary key.
func WholeExtent(depthTokens uint32) Extent {
	return Extent{UsableTokens: depthTokens, GPUTokens: depthTokens, HostTokens: depthTokens}
}

// IndexSink is told one worker's set of prefixes as index keys. A decoder calls
// it from one goroutine at a time.
//
// A key may be added more than once (a collision within the worker's own keys,
// or two copies of one prefix); it is held until it is removed as often. A
// checkpoint is added after the one before it and removed before that, so that
// whoever holds one holds those in front of it; a snapshot is told as the
// difference, additions first, so that what old and new agree on never blinks.
type IndexSink interface {
	// Begin and End enclose the calls that one frame causes; what lies between
	// may be applied in one go. They are not called for a frame without changes.
	Begin()
	End()
	// AddCheckpoint tells that the worker holds everything up to a checkpoint.
	// parent is the key of the checkpoint before it, 0 at the first one.
	AddCheckpoint(key, parent IndexKey, depthTokens uint32)
	// AddPoint tells a known end between checkpoints: where a run ends, ended
	// once, or (branch) forks. checkpoint is the key of the last checkpoint
	// before it, 0 if there is none.
	AddPoint(key, checkpoint IndexKey, depthTokens uint32, branch bool)
	// RemoveCheckpoint takes an AddCheckpoint back, with the same arguments.
	RemoveCheckpoint(key, parent IndexKey, depthTokens uint32)
	// RemovePoint takes an AddPoint back, with the same arguments and the
	// latest value of branch.
	RemovePoint(key, checkpoint IndexKey, depthTokens uint32, branch bool)
	// SetBranch tells that a known point became one at which a run forks.
	SetBranch(key, checkpoint IndexKey, depthTokens uint32)
	// SetExtent replaces the extent of a held key, checkpoint or point; checkpoint
	// is the key of the last checkpoint before it, 0 if there is none. An added
	// key has WholeExtent until told otherwise, and a removed key has none; of a
	// key held twice the latest counts. Only hybrid engines, engines whose blocks
	// do not end at checkpoints, and engines with lower tiers cause calls.
	SetExtent(key, checkpoint IndexKey, depthTokens uint32, e Extent)
	// Reset takes everything back.
	Reset()
}
