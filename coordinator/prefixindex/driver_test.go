package prefixindex

import (
	"fmt"
	"maps"
	"slices"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// driver makes changes to a model and an index alike.
type driver struct {
	t     interface{ Fatalf(string, ...any) }
	intn  func(int) int
	x     *Index
	m     *model
	edges []*edge
	ids   []WorkerID
	sinks map[WorkerID]*Sink
	stale []*Sink // of dropped workers
	claim uint64

	// windows: extents of listed texts are those of an engine whose blocks end
	// elsewhere, for workers of odd number, instead of random ones.
	windows bool
}

func newDriver(t interface{ Fatalf(string, ...any) }, intn func(int) int, seed uint64) *driver {
	return &driver{
		t: t, intn: intn, x: New(Options{Seed: seed}), m: newModel(), edges: forest(intn, 1+intn(20)),
		ids: []WorkerID{0, 3, 63, 64, 130, 700, 1, 2, 4, 5, 6, 7}, sinks: map[WorkerID]*Sink{},
	}
}

func (d *driver) sink(id WorkerID) *Sink {
	if d.sinks[id] == nil {
		d.sinks[id] = d.x.WorkerSink(id)
		d.m.worker(id)
	}
	return d.sinks[id]
}

// steps are the kinds of changes.
var steps = []struct {
	name string
	do   func(d *driver, id WorkerID)
}{
	{"store", (*driver).store},
	{"store", (*driver).store},
	{"store", (*driver).store},
	{"evict", (*driver).evict},
	{"trim", (*driver).trim},
	{"list twice", (*driver).listTwice},
	{"extent", (*driver).extent},
	{"claim", (*driver).claimText},
	{"claim", (*driver).claimText},
	{"end claim", (*driver).endClaim},
	{"replace claim", (*driver).replaceClaim},
	{"reset", (*driver).reset},
	{"drop", (*driver).drop},
	{"verify", (*driver).verify},
	{"stale", (*driver).stray},
}

func (d *driver) step() string {
	s := steps[d.intn(len(steps))]
	id := d.ids[d.intn(len(d.ids))]
	s.do(d, id)
	return fmt.Sprintf("%s of worker %d", s.name, id)
}

// store lists a text, in one go or call by call.
func (d *driver) store(id WorkerID) { d.storeText(id, anyText(d.intn, d.edges)) }

func (d *driver) storeText(id WorkerID, t text) {
	s, w := d.sink(id), d.m.worker(id)
	if d.intn(3) > 0 || d.windows { // a key and its extent come at once
		s.Begin()
		defer s.End()
	}
	for _, k := range t.known() {
		if w.listed[k] == 0 {
			d.list(s, w, k)
		}
	}
}

func (d *driver) list(s *Sink, w *modelWorker, k text) {
	n := k.name()
	if n.isPoint() {
		s.AddPoint(n.key, n.parent, n.depth, false)
	} else {
		s.AddCheckpoint(n.key, n.parent, n.depth)
	}
	w.listed[k]++
	if d.windows && s.w.id%2 == 1 {
		e := summary.Extent{UsableTokens: k.depth / 96 * 96, GPUTokens: k.depth / 2, HostTokens: k.depth}
		s.SetExtent(n.key, n.parent, n.depth, e)
		w.extents[k] = e
	}
}

// evict takes out a listed text with all that is listed behind it, and what
// claims predict there stays.
func (d *driver) evict(id WorkerID) {
	s, w := d.sink(id), d.m.worker(id)
	all := sorted(w.listed)
	if len(all) == 0 {
		return
	}
	s.Begin()
	d.unlistFrom(s, w, all, all[d.intn(len(all))])
	s.End()
}

// trim takes out a listed text with all behind it, and lists a shorter one in its
// place.
func (d *driver) trim(id WorkerID) {
	s, w := d.sink(id), d.m.worker(id)
	all := sorted(w.listed)
	if len(all) == 0 {
		return
	}
	from := all[d.intn(len(all))]
	s.Begin()
	d.unlistFrom(s, w, all, from)
	if n := int(from.depth) / step; n > 1 {
		for _, k := range from.at(step * uint32(1+d.intn(n-1))).known() {
			if w.listed[k] == 0 {
				d.list(s, w, k)
			}
		}
	}
	s.End()
}

func (d *driver) unlistFrom(s *Sink, w *modelWorker, all []text, from text) {
	for _, k := range slices.Backward(all) {
		if from.isPrefixOf(k) {
			for ; w.listed[k] > 0; w.listed[k]-- {
				d.unlist(s, k)
			}
			delete(w.listed, k)
			delete(w.extents, k)
		}
	}
}

func (d *driver) unlist(s *Sink, k text) {
	n := k.name()
	if n.isPoint() {
		s.RemovePoint(n.key, n.parent, n.depth, false)
	} else {
		s.RemoveCheckpoint(n.key, n.parent, n.depth)
	}
}

// sorted returns listed texts, shallow first.
func sorted(of map[text]int) []text {
	return slices.SortedFunc(maps.Keys(of), func(a, b text) int {
		return 1000*(int(a.depth)-int(b.depth)) + a.on.id - b.on.id
	})
}

// listTwice lists a text again, or takes one such listing back.
func (d *driver) listTwice(id WorkerID) {
	s, w := d.sink(id), d.m.worker(id)
	all := sorted(w.listed)
	if len(all) == 0 {
		return
	}
	k := all[d.intn(len(all))]
	if w.listed[k] > 1 && d.intn(2) == 0 {
		d.unlist(s, k)
		w.listed[k]--
		return
	}
	d.list(s, w, k)
}

// extent changes that of a listed text, or of one that is just being listed.
func (d *driver) extent(id WorkerID) {
	s, w := d.sink(id), d.m.worker(id)
	all := sorted(w.listed)
	if len(all) == 0 || d.windows {
		return
	}
	s.Begin()
	defer s.End()
	k := all[d.intn(len(all))]
	if d.intn(3) == 0 {
		k = anyText(d.intn, d.edges)
		for _, up := range k.known() {
			if w.listed[up] == 0 {
				d.list(s, w, up)
			}
		}
	}
	n := k.name()
	host := uint32(d.intn(int(k.depth) + 1))
	e := summary.Extent{UsableTokens: step * uint32(d.intn(int(k.depth)/step+1)), HostTokens: host, GPUTokens: uint32(d.intn(int(host) + 1))}
	if d.intn(3) == 0 {
		e = summary.WholeExtent(k.depth)
	}
	s.SetExtent(n.key, n.parent, n.depth, e)
	w.extents[k] = e
	if e == summary.WholeExtent(k.depth) {
		delete(w.extents, k)
	}
}

func (d *driver) claimText(id WorkerID) {
	d.sink(id)
	t := anyText(d.intn, d.edges)
	d.claim++
	keys, depths := t.keys()
	d.x.AddPredicted(id, d.claim, 0, keys, depths)
	d.m.worker(id).claims[d.claim] = t
}

func (d *driver) anyClaim(w *modelWorker) (uint64, bool) {
	all := slices.Sorted(maps.Keys(w.claims))
	if len(all) == 0 {
		return 0, false
	}
	return all[d.intn(len(all))], true
}

func (d *driver) endClaim(id WorkerID) {
	d.sink(id)
	if c, ok := d.anyClaim(d.m.worker(id)); ok {
		d.x.RemovePredicted(id, c)
		delete(d.m.worker(id).claims, c)
	}
	d.x.RemovePredicted(id, 1<<60) // never made
}

func (d *driver) replaceClaim(id WorkerID) {
	d.sink(id)
	if c, ok := d.anyClaim(d.m.worker(id)); ok {
		t := anyText(d.intn, d.edges)
		keys, depths := t.keys()
		d.x.AddPredicted(id, c, 0, keys, depths)
		d.m.worker(id).claims[c] = t
	}
}

func (d *driver) reset(id WorkerID) {
	s, w := d.sink(id), d.m.worker(id)
	s.Begin()
	s.Reset()
	clear(w.listed)
	clear(w.extents)
	s.End()
}

func (d *driver) drop(id WorkerID) {
	d.x.Drop(id)
	delete(d.m.workers, id)
	if s := d.sinks[id]; s != nil {
		d.stale = append(d.stale, s)
		delete(d.sinks, id)
	}
}

func (d *driver) verify(id WorkerID) {
	d.sink(id)
	w := d.m.worker(id)
	w.unverified = !w.unverified
	d.x.SetVerified(id, !w.unverified)
}

// stray writes to sinks of dropped workers, and nonsense to others.
func (d *driver) stray(id WorkerID) {
	s, nobody := d.sink(id), newModel().worker(id)
	s.AddCheckpoint(5, 0, 0)
	s.AddCheckpoint(0, 0, 512)
	s.AddCheckpoint(7, 6, summary.MaxDepthTokens+512)
	s.AddPoint(7, 0, 700, false)
	s.SetExtent(99, 0, 512, summary.Extent{})
	s.RemoveCheckpoint(98, 0, 512)
	s.RemovePoint(98, 97, 700, false)
	for _, s := range d.stale {
		for _, k := range anyText(d.intn, d.edges).known() {
			d.list(s, nobody, k)
			d.unlist(s, k)
			n := k.name()
			s.SetExtent(n.key, n.parent, n.depth, summary.Extent{})
		}
		s.Reset()
	}
}

// compareSome asks for some texts, whatever their owners do.
func (d *driver) compareSome(p *prefix.Probe, n int) {
	for range n {
		d.m.compare(d.t, d.x, p, anyText(d.intn, d.edges), step*uint32(d.intn(60)))
	}
}
