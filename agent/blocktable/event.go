package blocktable

// Op is what an event did to the engine's block table.
type Op uint8

// The operations.
const (
	// OpNone is no operation; it is ignored.
	OpNone Op = iota
	// OpStore adds one copy of each block.
	OpStore
	// OpRemove removes one copy of each block.
	OpRemove
	// OpClear removes every copy in the event's medium.
	OpClear
)

// Medium is where a copy of a block is held.
type Medium uint8

// The media. Copies in GPU memory make a block resident, and those in host memory
// where that is followed.
const (
	MediumGPU Medium = iota
	MediumCPU
	MediumDisk
	// MediumExternal is a place that is none of the others.
	MediumExternal
	// MediumUnknown is a place that the engine did not tell, or by a name that
	// nobody knows. What is stored there counts for nothing; what is removed or
	// cleared there may have been in GPU memory, so it is gone from there too.
	MediumUnknown

	mediums = int(MediumUnknown) + 1
)

// Spec is the kind of attention a group of layers computes; it decides which
// blocks of a prefix the group must hold for the prefix to be reused.
type Spec uint8

// The kinds.
const (
	// SpecUnknown is a kind that was not told; such a group must hold all blocks.
	SpecUnknown Spec = iota
	SpecFull
	SpecMLA
	SpecSinkFull
	SpecSlidingWindow
	SpecSlidingWindowMLA
	SpecMamba
	SpecChunkedLocal
	SpecEncoderOnly
	SpecCrossAttention

	specs = int(SpecCrossAttention) + 1
)

// Event is one change of the engine's block table. The slices are read during
// Apply only.
type Event struct {
	Op     Op
	Medium Medium
	// Spec is the kind of the group, told on stores only.
	Spec Spec
	// HasParent says whether Parent names a block; without one the first
	// block of a store begins a prompt.
	HasParent bool
	// Group is the KV cache group, 0 to 15.
	Group int32
	// WindowTokens is the window of a sliding-window group, 0 if unknown.
	WindowTokens int32
	// BlockTokens is the number of tokens per block of this event; 0 is a
	// placeholder that names hashes only.
	BlockTokens int32
	// Parent is the engine hash of the block before the first one.
	Parent uint64
	// Hashes are the engine hashes of the blocks in prompt order.
	Hashes []uint64
	// Tokens are the token ids of the blocks, BlockTokens each; empty if
	// unknown. Another length means that hashes were left out.
	Tokens []uint32
	// Adapter is the name of the LoRA adapter of a prompt; empty for the base
	// model.
	Adapter string
	// Salt is the cache salt of a prompt, told with its first block.
	Salt string
	// Session is the name that the request which stored gave itself; empty:
	// none. It is no part of a block's identity: the table leaves it alone.
	Session string
	// Marks holds one value per hash, or is empty. A value other than 0 is a
	// digest of what the block's identity holds besides tokens, adapter and
	// salt (an image, embeddings, an adapter that the event does not name).
	Marks []uint64
}
