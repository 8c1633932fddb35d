package queue

import (
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// maxKeyers bounds the domains whose keyers are kept.
const maxKeyers = 64

// Recorder turns what a block table tells its listener into stores: the blocks
// that became part of an unbroken prefix, as the prefix keys that claims name.
// It passes everything on to the next listener. It belongs to the table's
// goroutine.
type Recorder struct {
	summary.Listener // the next one
	key              prefix.ClusterKey
	blocks           summary.Blocks
	keyers           map[prefix.Domain]*prefix.Keyer
	// domain and keyer are those of the block before, which most blocks share.
	domain prefix.Domain
	keyer  *prefix.Keyer
	stores []Store
	points []Point // of all stores, one after the other
	last   uint32  // the block recorded last
}

// NewRecorder records what a table tells and passes it on to next.
func NewRecorder(key prefix.ClusterKey, blocks summary.Blocks, next summary.Listener) *Recorder {
	return &Recorder{Listener: next, key: key, blocks: blocks, keyers: map[prefix.Domain]*prefix.Keyer{}}
}

// ForTable is the listener to give to the table: one that follows blocks into
// lower tiers if the next listener does.
func (r *Recorder) ForTable() summary.Listener {
	if next, ok := r.Listener.(summary.TierListener); ok {
		return &tierRecorder{r, next}
	}
	return r
}

// tierRecorder is a Recorder before a summary.TierListener.
type tierRecorder struct {
	*Recorder
	next summary.TierListener
}

// TierChanged implements summary.TierListener.
func (r *tierRecorder) TierChanged(id uint32, tier summary.Tier) { r.next.TierChanged(id, tier) }

// Attached implements summary.Listener.
func (r *Recorder) Attached(b summary.Block) {
	r.Listener.Attached(b)
	keyer := r.keyerOf(b.Domain)
	if b.Parent == 0 || b.Parent != r.last || len(r.stores) == 0 {
		s := Store{}
		if b.Parent != 0 {
			s.Parent = keyer.Key(r.blocks.PointOf(b.Parent), b.StartTokens)
		}
		r.stores = append(r.stores, s)
	}
	r.points = append(r.points, Point{keyer.Key(r.blocks.PointOf(b.ID), b.EndTokens), int(b.EndTokens)})
	s := &r.stores[len(r.stores)-1]
	n := len(s.Points) + 1
	s.Points = r.points[len(r.points)-n:]
	r.last = b.ID
}

// Cleared implements summary.Listener.
func (r *Recorder) Cleared() {
	r.Listener.Cleared()
	r.Take()
}

func (r *Recorder) keyerOf(domain uint16) *prefix.Keyer {
	d := r.blocks.DomainOf(domain)
	if r.keyer != nil && d == r.domain {
		return r.keyer
	}
	k := r.keyers[d]
	if k == nil {
		if len(r.keyers) >= maxKeyers {
			clear(r.keyers)
		}
		k = prefix.NewKeyer(r.key, d)
		r.keyers[d] = k
	}
	r.domain, r.keyer = d, k
	return k
}

// Take hands over what was recorded since the last call; it is valid until the
// next event. Blocks of a replay are to be taken and dropped: they say nothing
// of the present.
func (r *Recorder) Take() []Store {
	stores := r.stores
	r.stores, r.points, r.last = r.stores[:0], r.points[:0], 0
	return stores
}
