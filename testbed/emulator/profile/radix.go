package profile

import (
	"encoding/binary"
	"slices"
)

// event is one change of a cache, in the form that all encoders share.
type event struct {
	op        op
	hashes    []digest
	parent    *digest
	tokens    []uint32
	pageSize  int
	salt      string
	partial   bool // the last page is not full
	namespace string
}

type op uint8

const (
	opStored op = iota + 1
	opRemoved
	opCleared
)

// digest names a page and everything before it.
type digest [32]byte

// first64 is the integer form of SGLang: the first eight bytes.
func (d digest) first64() int64 { return int64(binary.BigEndian.Uint64(d[:8])) }

// hashPage names a page by what is before it; prev is nil at the beginning of
// an unsalted prompt.
type hashPage func(prev *digest, salt string, tokens []uint32) digest

// radix is a prefix cache of pages in a tree whose nodes are runs of pages that
// were stored together, as SGLang's: matching splits a node where prompts part,
// what is evicted are the least recently used leaves whole. It is not safe for
// concurrent use.
type radix struct {
	page  int
	whole bool // false: one node per page
	hash  hashPage
	root  *node
	// clock orders uses; pages are those that are held.
	clock uint64
	pages int
	seen  func(event)
}

type node struct {
	parent    *node
	children  map[string]*node
	tokens    []uint32
	hashes    []digest
	locks     int
	used      uint64
	namespace string
	depth     int // tokens before
	// tails are unfull pages behind this one that were told of.
	tails []digest
}

func newRadix(page int, whole bool, hash hashPage, seen func(event)) *radix {
	return &radix{page: page, whole: whole, hash: hash, seen: seen, root: &node{children: map[string]*node{}}}
}

// childKey is the namespace and the first page of what follows.
func (r *radix) childKey(namespace string, tokens []uint32) string {
	b := make([]byte, 0, len(namespace)+1+4*r.page)
	b = append(append(b, namespace...), 0)
	for _, t := range tokens[:r.page] {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return string(b)
}

func common(a, b []uint32) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// walk follows tokens, marks what it passes as used and splits the node where
// they part. It returns the last node and how many tokens it stands for.
func (r *radix) walk(namespace string, tokens []uint32) (*node, int) {
	r.clock++
	at, n := r.root, 0
	tokens = tokens[:len(tokens)/r.page*r.page]
	at.used = r.clock
	for n < len(tokens) {
		child := at.children[r.childKey(namespace, tokens[n:])]
		if child == nil {
			break
		}
		child.used = r.clock
		same := common(child.tokens, tokens[n:]) / r.page * r.page
		if same < len(child.tokens) {
			child = r.split(child, same)
		}
		at, n = child, n+same
	}
	return at, n
}

// split puts the first tokens of a node into a parent of their own.
func (r *radix) split(low *node, tokens int) *node {
	pages := tokens / r.page
	up := &node{
		parent: low.parent, tokens: low.tokens[:tokens], hashes: low.hashes[:pages], locks: low.locks, used: low.used,
		namespace: low.namespace, depth: low.depth, children: map[string]*node{},
	}
	low.parent.children[r.childKey(low.namespace, low.tokens)] = up
	low.parent, low.tokens, low.hashes, low.depth = up, low.tokens[tokens:], low.hashes[pages:], low.depth+tokens
	up.children[r.childKey(low.namespace, low.tokens)] = low
	return up
}

// insert stores the full pages of tokens and tells of those that are new.
func (r *radix) insert(namespace, salt string, tokens []uint32) *node {
	at, n := r.walk(namespace, tokens)
	fresh := tokens[n : len(tokens)/r.page*r.page]
	if len(fresh) == 0 {
		return at
	}
	told := event{op: opStored, tokens: slices.Clone(fresh), pageSize: r.page, salt: salt, namespace: namespace}
	var prev *digest
	if at != r.root {
		d := at.hashes[len(at.hashes)-1]
		prev, told.parent = &d, &d
	}
	step := len(fresh)
	if !r.whole {
		step = r.page
	}
	for ; len(fresh) > 0; fresh = fresh[step:] {
		leaf := &node{parent: at, tokens: slices.Clone(fresh[:step]), used: r.clock, namespace: namespace, depth: n, children: map[string]*node{}}
		for i := 0; i < step; i += r.page {
			d := r.hash(prev, salt, fresh[i:i+r.page])
			leaf.hashes, prev = append(leaf.hashes, d), &d
		}
		told.hashes = append(told.hashes, leaf.hashes...)
		at.children[r.childKey(namespace, fresh)] = leaf
		r.pages += step / r.page
		at, n = leaf, n+step
	}
	r.seen(told)
	return at
}

// lock keeps a node and what is before it, n = 1, or lets it go, n = -1.
func (r *radix) lock(at *node, n int) {
	for ; at != r.root; at = at.parent {
		at.locks += n
	}
}

// evict gives up pages, the least recently used leaves first, until enough are
// free or all that is left is in use. It returns how many were given up.
func (r *radix) evict(pages int) int {
	var gone []digest
	n := 0
	for n < pages {
		leaf := r.oldest(r.root, nil)
		if leaf == nil {
			break
		}
		gone = append(append(gone, leaf.hashes...), leaf.tails...)
		delete(leaf.parent.children, r.childKey(leaf.namespace, leaf.tokens))
		r.pages -= len(leaf.hashes)
		n += len(leaf.hashes)
	}
	if len(gone) > 0 {
		r.seen(event{op: opRemoved, hashes: gone})
	}
	return n
}

func (r *radix) oldest(at, best *node) *node {
	for _, c := range at.children {
		if len(c.children) > 0 {
			best = r.oldest(c, best)
		} else if c.locks == 0 && (best == nil || c.used < best.used) {
			best = c
		}
	}
	return best
}

// clear forgets everything that no request uses; with requests running it does
// nothing and says so.
func (r *radix) clear(running bool) bool {
	if running {
		return false
	}
	r.root, r.pages = &node{children: map[string]*node{}}, 0
	r.seen(event{op: opCleared})
	return true
}

// tail tells of a page that is not full.
func (r *radix) tail(at *node, salt string, tokens []uint32) {
	var prev *digest
	if at != r.root {
		prev = &at.hashes[len(at.hashes)-1]
	}
	d := r.hash(prev, salt, tokens)
	for _, told := range at.tails {
		if told == d {
			return
		}
	}
	if at != r.root {
		at.tails = append(at.tails, d)
	}
	r.seen(event{op: opStored, hashes: []digest{d}, parent: prev, tokens: slices.Clone(tokens), pageSize: r.page, partial: true, salt: salt})
}

// pinned is how many pages at and under a node are in use.
func (r *radix) pinned(at *node) (n int) {
	if at.locks > 0 {
		n = len(at.hashes)
	}
	for _, c := range at.children {
		if at == r.root || at.locks > 0 {
			n += r.pinned(c)
		}
	}
	return n
}
