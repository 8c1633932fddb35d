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

// node is one block the engine named, or a root. It is one cache line with
// its neighbours rather than a struct of arrays: an event touches most fields
// of a node at a random place, and separate arrays would cost a miss each.
type node struct {
	hash   uint64
	parent uint32
	first  uint32 // first child
	next   uint32 // next sibling, or next free node
	prev   uint32 // previous sibling
	end    uint32 // depth in tokens after the block; of attached nodes
	slot   uint32 // of the tokens in the slab of class
	chain  uint32 // slot of the chain value at the last checkpoint at or before end; of attached nodes
	domain uint16 // of roots and attached nodes
	class  uint8  // index into slabs
	flags  uint8
}

// nodes hands out nodes by id; id 0 is none. Pages never move and hold no
// pointers, so that a large table costs the garbage collector nothing.
type nodes struct {
	pages []*[pageNodes]node
	free  uint32
	made  uint32 // ids 1..made have been handed out at least once
	live  int
}

func (s *nodes) at(id uint32) *node {
	return &s.pages[id>>pageShift][id&(pageNodes-1)]
}

// take gives a fresh node; the caller has checked the bounds.
func (s *nodes) take() uint32 {
	s.live++
	if id := s.free; id != 0 {
		n := s.at(id)
		s.free = n.next
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

func (s *nodes) give(id uint32) {
	s.live--
	*s.at(id) = node{next: s.free}
	s.free = id
}

// reset forgets every node and keeps the pages.
func (s *nodes) reset() {
	s.free, s.made, s.live = 0, 0, 0
}

// addChild adds id to parent's children. The first one stays the first.
func (s *nodes) addChild(parent, id uint32) {
	p, n := s.at(parent), s.at(id)
	n.parent, n.prev, n.next = parent, p.first, 0
	if p.first == 0 {
		p.first = id
		return
	}
	first := s.at(p.first)
	if n.next = first.next; n.next != 0 {
		s.at(n.next).prev = id
	}
	first.next = id
}

// dropChild takes id out of its parent's children.
func (s *nodes) dropChild(id uint32) {
	n := s.at(id)
	if n.prev != 0 {
		s.at(n.prev).next = n.next
	} else {
		s.at(n.parent).first = n.next
	}
	if n.next != 0 {
		s.at(n.next).prev = n.prev
	}
	n.parent, n.prev, n.next = 0, 0, 0
}

// firstWith gives the first node with all flags of want and none of not, from
// id along its siblings.
func (s *nodes) firstWith(id uint32, want, not uint8) uint32 {
	for id != 0 {
		n := s.at(id)
		if n.flags&(want|not) == want {
			return id
		}
		id = n.next
	}
	return 0
}
