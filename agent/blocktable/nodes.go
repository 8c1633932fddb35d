package blocktable

const (
	pageShift = 10
	pageNodes = 1 << pageShift

	// maxNodes bounds the memory that a table can come to, about two gigabytes.
	maxNodes = 1<<24 - 1
)

// The flags of a node.
const (
	flagUsed     uint8 = 1 << iota // the node is not on the free list
	flagRoot                       // the empty prefix of a domain
	flagLinked                     // parent and tokens are known
	flagOpaque                     // the identity holds more than tokens
	flagResident                   // every required group holds a copy
	flagAttached                   // this node and its ancestors are resident
	flagUsable                     // a match may end here
	flagUnlisted                   // not in the index by content; see link
)

// node is one block the engine named, or a root. It is half a cache line with all
// that an event touches of it rather than a struct of arrays: events touch nodes at
// random places, and separate arrays would cost a miss each.
type node struct {
	hash     uint64
	parent   uint32
	first    uint32 // first child, or next free node
	siblings uint32 // slot of its neighbours among the children of its parent; 0: it has none
	end      uint32 // depth in tokens after the block; of attached nodes
	slot     uint32 // of the tokens in the slab of class
	domain   uint16 // of roots and attached nodes
	class    uint8  // index into slabs
	flags    uint8
}

// neighbours are the next and the previous child of one parent. Most blocks are the
// only ones.
type neighbours struct{ next, prev uint32 }

// nodes hands out nodes by id; id 0 is none. Pages never move and hold no
// pointers, so that a large table costs the garbage collector nothing.
type nodes struct {
	pages []*[pageNodes]node
	free  uint32
	made  uint32 // ids 1..made have been handed out at least once
	live  int

	siblings     []neighbours // by slot, from 1
	freeSiblings uint32       // first free slot; next links on
}

func (s *nodes) at(id uint32) *node {
	return &s.pages[id>>pageShift][id&(pageNodes-1)]
}

// take gives a fresh node; the caller has checked the bounds.
func (s *nodes) take() uint32 {
	s.live++
	if id := s.free; id != 0 {
		n := s.at(id)
		s.free = n.first
		*n = node{flags: flagUsed}
		return id
	}
	s.made++
	if int(s.made>>pageShift) >= len(s.pages) {
		s.pages = append(s.pages, new([pageNodes]node))
	}
	*s.at(s.made) = node{flags: flagUsed}
	return s.made
}

// give takes back a node that has no place.
func (s *nodes) give(id uint32) {
	s.live--
	*s.at(id) = node{first: s.free}
	s.free = id
}

// reset forgets every node and keeps the pages.
func (s *nodes) reset() {
	s.free, s.made, s.live = 0, 0, 0
	s.siblings, s.freeSiblings = s.siblings[:0], 0
}

// next is the child after a node; 0: none.
func (s *nodes) next(id uint32) uint32 { return s.neighbours(id).next }

func (s *nodes) neighbours(id uint32) neighbours {
	if k := s.at(id).siblings; k != 0 {
		return s.siblings[k-1]
	}
	return neighbours{}
}

// beside is where the neighbours of a node stand, which it has or is about to get.
func (s *nodes) beside(id uint32) *neighbours {
	n := s.at(id)
	switch {
	case n.siblings != 0:
	case s.freeSiblings != 0:
		n.siblings = s.freeSiblings
		k := &s.siblings[n.siblings-1]
		s.freeSiblings, *k = k.next, neighbours{}
	default:
		s.siblings = append(s.siblings, neighbours{})
		n.siblings = uint32(len(s.siblings))
	}
	return &s.siblings[n.siblings-1]
}

// alone is for a node that has no neighbours any more.
func (s *nodes) alone(id uint32) {
	n := s.at(id)
	if n.siblings != 0 {
		s.siblings[n.siblings-1] = neighbours{next: s.freeSiblings}
		s.freeSiblings, n.siblings = n.siblings, 0
	}
}

// addChild adds id to parent's children. The first one stays the first.
func (s *nodes) addChild(parent, id uint32) {
	p := s.at(parent)
	s.at(id).parent = parent
	if p.first == 0 {
		p.first = id
		return
	}
	after := s.next(p.first)
	s.beside(p.first).next = id
	*s.beside(id) = neighbours{next: after, prev: p.first}
	if after != 0 {
		s.beside(after).prev = id
	}
}

// dropChild takes id out of its parent's children.
func (s *nodes) dropChild(id uint32) {
	n, p := s.at(id), s.at(s.at(id).parent)
	at := s.neighbours(id)
	if at.prev != 0 {
		s.beside(at.prev).next = at.next
	} else {
		p.first = at.next
	}
	if at.next != 0 {
		s.beside(at.next).prev = at.prev
	}
	s.alone(id)
	if p.first != 0 && s.next(p.first) == 0 {
		s.alone(p.first)
	}
	n.parent = 0
}

// firstWith gives the first node with all flags of want and none of not, from
// id along its siblings.
func (s *nodes) firstWith(id uint32, want, not uint8) uint32 {
	for id != 0 {
		if s.at(id).flags&(want|not) == want {
			return id
		}
		id = s.next(id)
	}
	return 0
}
