package summary

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
)

// snapshotPartBytes is the size beyond which a snapshot goes on in another
// frame; one record more always fits.
const snapshotPartBytes = MaxFrameBytes - 128<<10

// A record of a snapshot is one run, parents before children:
//
//	up uv        levels between the run before and this one's parent: 0 if the
//	             run hangs on the one before, 1 if on that one's parent, …
//	number uv
//	back length  how far before the parent's end it hangs; not at the root
//	length
//	points uv    number << 1 | limited
//	points       (length since the one before << 1 | branch) uv, fingerprint
//	checkpoints  fingerprints
//	limits       if limited: bodies of USABLE and TIER

// snapshotBodies writes trees that differ in their cluster key only as the
// bodies of the parts of a snapshot. Runs with a high heat come first; nil: by
// number.
func snapshotBodies(trees []*tree, heat []uint64) [][]byte {
	t := trees[0]
	w := snapshotWriter{trees: trees, heat: heat, first: make([]uint32, len(t.runs)), next: make([]uint32, len(t.runs))}
	w.link()
	for n := w.root; n != 0; {
		w.record(n)
		n = w.follow(n)
	}
	return append(w.parts, w.b)
}

type snapshotWriter struct {
	trees []*tree
	heat  []uint64
	first []uint32 // first child by run
	next  []uint32 // next sibling by run
	root  uint32   // first run without a parent
	up    int      // levels between the run before and the next one's parent
	b     []byte
	parts [][]byte
}

// link makes lists of children, hot subtrees first.
func (w *snapshotWriter) link() {
	t := w.trees[0]
	order := t.numbers()
	if w.heat != nil {
		warm(t, w.heat)
	}
	slices.SortFunc(order, func(a, b uint32) int {
		if w.heat != nil && w.heat[a] != w.heat[b] {
			return cmp.Compare(w.heat[b], w.heat[a])
		}
		return cmp.Compare(a, b)
	})
	for _, n := range slices.Backward(order) {
		list := &w.root
		if p := t.runs[n].parent; p != 0 {
			list = &w.first[p]
		}
		w.next[n], *list = *list, n
	}
}

// warm makes every run as hot as the hottest one behind it; children come first,
// so each is final when it warms its parent.
func warm(t *tree, heat []uint64) {
	for _, n := range slices.Backward(t.byStart()) {
		if p := t.runs[n].parent; p != 0 {
			heat[p] = max(heat[p], heat[n])
		}
	}
}

// follow returns the run after another one in the order of records.
func (w *snapshotWriter) follow(n uint32) uint32 {
	w.up = 0
	if c := w.first[n]; c != 0 {
		return c
	}
	for n != 0 {
		w.up++
		if s := w.next[n]; s != 0 {
			return s
		}
		n = uint32(w.trees[0].runs[n].parent)
	}
	return 0
}

func (w *snapshotWriter) record(n uint32) {
	if len(w.b) > snapshotPartBytes {
		w.parts = append(w.parts, w.b)
		w.b = nil
	}
	t := w.trees[0]
	run := &t.runs[n]
	b := binary.AppendUvarint(w.b, uint64(w.up))
	b = binary.AppendUvarint(b, uint64(n))
	if run.parent != 0 {
		b = appendLength(b, t.runs[run.parent].end()-run.start())
	}
	b = appendLength(b, run.end()-run.start())
	points := uint64(run.points()) << 1
	l := t.limitOn(n)
	if l != nil {
		points |= 1
	}
	b = binary.AppendUvarint(b, points)
	var tails [maxClusterKeys][]uint16
	var heads [maxClusterKeys][]uint16
	for i, t := range w.trees {
		words := t.wordsOf(&t.runs[n])
		heads[i], tails[i] = words, words[run.checkpointWords():]
	}
	at := run.start()
	for range run.points() {
		for i := range w.trees {
			p := readPoint(tails[i])
			tails[i] = tails[i][pointWords:]
			if i == 0 {
				code := lengthCode(p.depth-at) << 1
				if p.branch {
					code |= 1
				}
				b = binary.AppendUvarint(b, code)
				at = p.depth
			}
			b = appendFingerprint(b, p.fingerprint, pointBytes(p.depth))
		}
	}
	for d := nextCheckpoint(run.start()); d <= run.end(); d = nextCheckpoint(d) {
		for i := range w.trees {
			var fp uint32
			fp, heads[i] = readCheckpoint(heads[i], d)
			b = appendFingerprint(b, fp, checkpointBytes(d))
		}
	}
	if l != nil {
		b = appendTier(appendUsable(b, &l.usable, run.start()), l.tier)
	}
	w.b = b
}

// builder reads the parts of a snapshot into a tree of its own.
type builder struct {
	head  header
	parts uint64
	tree  tree
	path  []uint32 // numbers from the root to the run before
	bytes int      // of all parts so far
}

// take reads one more part.
func (g *builder) take(body []byte, at place) error {
	g.parts++
	g.bytes += len(body)
	r := &reader{b: body}
	e := newEditor(&g.tree, at, false)
	defer e.release()
	for len(r.b) > 0 && r.err == nil {
		g.record(r, e)
	}
	return r.err
}

// mostSlots bounds the numbers of a tree of so many runs: an agent renumbers
// runs when it would be exceeded.
func mostSlots(runs int) int { return 4*runs + 64 }

// leastRecordBytes is the length of the shortest record.
const leastRecordBytes = 7

func (g *builder) record(r *reader, e *editor) {
	t := &g.tree
	up := r.bounded("up", uint64(len(g.path)))
	g.path = g.path[:len(g.path)-int(up)]
	n := r.bounded("number", uint64(min(MaxRuns, mostSlots(g.bytes/leastRecordBytes))))
	if r.err == nil && (n == 0 || t.has(n)) {
		r.fail("number", fmt.Sprintf("%d is the root or taken", n))
	}
	if r.err != nil {
		return
	}
	next := run{}
	if len(g.path) > 0 {
		parent := g.path[len(g.path)-1]
		p := &t.runs[parent]
		e.toil(r, p)
		back := r.length("attach")
		if back >= p.end()-p.start() {
			r.fail("attach", "not within the parent")
			return
		}
		start := p.end() - back
		next = newRun(t.keyAt(p, start), parent, start)
	}
	by := r.length("length")
	if by == 0 || by > MaxDepthTokens-next.start() {
		r.fail("length", "an empty run or one beyond the deepest prefix")
		return
	}
	next.setEnd(next.start() + by)
	limited := g.points(r, e, &next)
	w := e.words[:0]
	for d := nextCheckpoint(next.start()); d <= next.end() && r.err == nil; d = nextCheckpoint(d) {
		w = appendCheckpoint(w, d, r.fingerprint(checkpointBytes(d), e.at))
	}
	for _, p := range e.pts {
		w = appendPoint(w, p)
	}
	e.words = w
	if r.err != nil {
		return
	}
	t.mark(n)
	t.runs[n] = next
	if next.parent != 0 {
		t.runs[next.parent].children++
	}
	t.store(&t.runs[n], w, 0)
	e.scan = t.marks(&t.runs[n], next.start(), e.scan[:0])
	for _, m := range e.scan {
		e.add(n, m)
	}
	if limited {
		l := limit{usable: r.usable(&next), tier: r.tier()}
		if r.err == nil && l.ordinary() {
			r.fail("limit", "limits nothing")
		}
		if r.err != nil {
			return
		}
		t.setLimit(n, l)
	}
	g.path = append(g.path, n)
	e.bound(r)
}

// points reads the points of a record into e.pts; one must stand at the end
// unless that is a checkpoint.
func (g *builder) points(r *reader, e *editor, next *run) (limited bool) {
	code := r.bounded("points", maxPoints<<1|1)
	e.pts = e.pts[:0]
	at := next.start()
	for range code >> 1 {
		c := r.bounded("point", (MaxDepthTokens<<1|1)<<1|1)
		p := point{branch: c&1 != 0}
		by := lengthOf(c>>1, r, "point")
		if r.err != nil {
			return
		}
		p.depth = at + by
		if by == 0 || p.depth > next.end() || isCheckpoint(p.depth) {
			r.fail("point", "out of order, beyond the run or at a checkpoint")
			return
		}
		p.fingerprint = r.fingerprint(pointBytes(p.depth), e.at)
		e.pts = append(e.pts, p)
		next.startPoints++
		at = p.depth
	}
	if at != next.end() && !isCheckpoint(next.end()) {
		r.fail("point", "none at the end of the run")
	}
	return code&1 != 0
}

// everything records all of a tree, each checkpoint after the one before it.
func (e *editor) everything(t *tree) {
	e.changes = slices.Grow(e.changes, t.keys)
	for _, n := range t.byStart() {
		e.scan = t.marks(&t.runs[n], t.runs[n].start(), e.scan[:0])
		for _, m := range e.scan {
			e.call(m, addCheckpoint, addPoint)
		}
	}
}

// difference records what turns one tree into another, additions first.
func (e *editor) difference(from, to *tree) {
	if from.live == 0 {
		e.everything(to)
		e.extents(from, to)
		return
	}
	old, now := from.all(nil), to.all(nil)
	byKey := func(a, b mark) int { return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.depth, b.depth)) }
	slices.SortFunc(old, byKey)
	slices.SortFunc(now, byKey)
	var added, removed []mark
	i, j := 0, 0
	for i < len(old) || j < len(now) {
		switch c := compareAt(old, now, i, j, byKey); {
		case c < 0:
			removed = append(removed, old[i])
			i++
		case c > 0:
			added = append(added, now[j])
			j++
		default:
			e.turn(old[i], now[j])
			i, j = i+1, j+1
		}
	}
	byDepth := func(a, b mark) int { return cmp.Or(cmp.Compare(a.depth, b.depth), cmp.Compare(a.key, b.key)) }
	slices.SortFunc(added, byDepth)
	slices.SortFunc(removed, byDepth)
	for _, m := range added {
		e.call(m, addCheckpoint, addPoint)
	}
	for _, m := range slices.Backward(removed) {
		e.call(m, removeCheckpoint, removePoint)
	}
	e.extents(from, to)
}

// compareAt compares the next of two sorted lists; the end is after everything.
func compareAt(a, b []mark, i, j int, order func(a, b mark) int) int {
	switch {
	case i == len(a):
		return 1
	case j == len(b):
		return -1
	}
	return order(a[i], b[j])
}

// turn records what became of a key that both trees hold.
func (e *editor) turn(old, now mark) {
	switch {
	case old.branch == now.branch:
	case now.branch:
		e.changes = append(e.changes, change{mark: now, kind: setBranch})
	default:
		e.call(now, addCheckpoint, addPoint)
		e.call(old, removeCheckpoint, removePoint)
	}
}

func (e *editor) call(m mark, atCheckpoint, atPoint changeKind) {
	kind := atPoint
	if isCheckpoint(m.depth) {
		kind = atCheckpoint
	}
	e.changes = append(e.changes, change{mark: m, kind: kind})
}

// extents records the extents in which two trees differ.
func (e *editor) extents(from, to *tree) {
	if len(from.limits)+len(to.limits) == 0 {
		return
	}
	old, now := from.limitedKeys(), to.limitedKeys()
	var limited []mark
	for _, m := range to.all(nil) {
		_, is := now[m.key]
		if _, was := old[m.key]; is || was {
			limited = append(limited, m)
		}
	}
	slices.SortFunc(limited, func(a, b mark) int { return cmp.Compare(a.key, b.key) })
	for _, m := range slices.CompactFunc(limited, func(a, b mark) bool { return a.key == b.key }) {
		x, is := now[m.key]
		if !is {
			x = WholeExtent(m.depth)
		}
		if was, ok := old[m.key]; !ok || was != x {
			e.changes = append(e.changes, change{mark: m, kind: setExtent, extent: x})
		}
	}
}

// limitedKeys gives the extents of the keys that have no ordinary one.
func (t *tree) limitedKeys() map[IndexKey]Extent {
	out := map[IndexKey]Extent{}
	var ms []mark
	for n := range t.limits {
		ms = t.marks(&t.runs[n], t.runs[n].start(), ms[:0])
		for _, m := range ms {
			if x := t.extent(n, m.depth); x != WholeExtent(m.depth) {
				out[m.key] = x
			}
		}
	}
	return out
}

// numbers are those of all runs, ascending.
func (t *tree) numbers() []uint32 {
	out := make([]uint32, 0, t.live)
	for n := range t.runs {
		if t.runs[n].end() != 0 {
			out = append(out, uint32(n))
		}
	}
	return out
}

// byStart are the numbers of all runs, each after that of the run it hangs on:
// a run begins behind the start of its parent.
func (t *tree) byStart() []uint32 {
	out := t.numbers()
	slices.SortFunc(out, func(a, b uint32) int { return cmp.Compare(t.runs[a].start(), t.runs[b].start()) })
	return out
}

// all appends the keys of all runs.
func (t *tree) all(dst []mark) []mark {
	dst = slices.Grow(dst, t.keys)
	for i := range t.runs {
		if r := &t.runs[i]; r.end() != 0 {
			dst = t.marks(r, r.start(), dst)
		}
	}
	return dst
}
