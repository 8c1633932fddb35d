package core

// Op says what an Event did to the cache.
type Op uint8

// The operations.
const (
	OpStored Op = iota + 1
	OpRemoved
	OpCleared
)

// String is the event's type name on the wire.
func (o Op) String() string {
	switch o {
	case OpStored:
		return "BlockStored"
	case OpRemoved:
		return "BlockRemoved"
	case OpCleared:
		return "AllBlocksCleared"
	}
	return "unknown"
}

// Event is one change of the cache. It is valid until the next Schedule.
type Event struct {
	Op Op
	// Hashes are the blocks stored, in prompt order, or the one removed.
	Hashes []Hash
	// Parent is the block before the first one stored, if HasParent.
	Parent    Hash
	HasParent bool
	// Tokens are those of the stored blocks, len(Hashes)*BlockTokens.
	Tokens []uint32
	// FirstBlock is the index of the first stored block in its request.
	FirstBlock int
	// Adapter, Salt and SessionID are those of the request that stored.
	Adapter   *Adapter
	Salt      string
	SessionID string
}
