package summary

import (
	"cmp"
	"slices"

	"waypost/gossip/prefix"
)

// rekey makes the trees that were told those of the wanted cluster keys. What
// was told must not exceed what is held.
func (e *Encoder) rekey() {
	same := slices.EqualFunc(e.told, e.wanted, func(t told, k prefix.ClusterKey) bool { return t.key == k })
	if same {
		return
	}
	next := make([]told, 0, len(e.wanted))
	for _, k := range e.wanted {
		i := slices.IndexFunc(e.told, func(t told) bool { return t.key == k })
		if i >= 0 {
			next = append(next, e.told[i])
		} else {
			next = append(next, e.translate(k))
		}
	}
	e.told = next
}

// translate makes what was told anew under another cluster key.
func (e *Encoder) translate(k prefix.ClusterKey) told {
	out := told{key: k, id: k.IDUint32()}
	e.told[0].tree.copyTo(&out.tree)
	t := &out.tree
	t.digest = 0
	var order []uint32
	for i := range e.runs {
		if e.runs[i].number != 0 {
			order = append(order, uint32(i))
		}
	}
	// A run begins behind the start of the one it hangs on.
	slices.SortFunc(order, func(a, b uint32) int { return cmp.Compare(e.runs[a].start, e.runs[b].start) })
	var pts []point
	var marks []mark
	for _, i := range order {
		r := &e.runs[i]
		to := &t.runs[r.number]
		if to.parent != 0 {
			base := t.keyAt(&t.runs[to.parent], to.start())
			to.baseLow, to.baseHigh = uint32(base), uint32(base>>32)
		}
		keyer := e.keyer(&out, r.domain)
		w := t.words[to.at:to.at]
		for n, c := range r.chains[:to.checkpoints()] {
			depth := nextCheckpoint(r.start) + uint32(n)*prefix.ChunkTokens
			w = appendCheckpoint(w, depth, fingerprintOf(keyer.Key(c, depth), depth))
		}
		pts = t.points(to, pts[:0])
		id := r.tip
		for k := len(pts) - 1; k >= 0; k-- {
			p := &pts[k]
			for e.nodes[id].end() > p.depth {
				id = e.nodes[id].parent
			}
			p.fingerprint = fingerprintOf(keyer.Key(e.blocks.PointOf(id), p.depth), p.depth)
		}
		for _, p := range pts {
			w = appendPoint(w, p)
		}
		marks = t.marks(to, to.start(), marks[:0])
		for _, m := range marks {
			t.digest += m.key.mix()
		}
	}
	for n, l := range t.limits {
		t.digest += l.mix(n)
	}
	return out
}

// compact numbers the runs anew without gaps, which begins a new epoch.
func (e *Encoder) compact() {
	var numbers []uint32
	for i := range e.told {
		numbers = e.told[i].tree.renumber()
	}
	for i := range e.runs {
		r := &e.runs[i]
		r.number = numbers[r.number]
	}
	for i, n := range e.gone {
		e.gone[i] = numbers[n]
	}
	e.nextEpoch()
	e.stats.Compactions++
}

// nextEpoch makes every follower take a snapshot.
func (e *Encoder) nextEpoch() {
	e.epoch++
	e.replay.reset()
}

// renumber gives the runs the numbers from 1 on, in their order, and returns
// the new number of each old one.
func (t *tree) renumber() []uint32 {
	numbers := make([]uint32, len(t.runs))
	n := uint32(0)
	for i := range t.runs {
		if t.runs[i].end() != 0 {
			n++
			numbers[i] = n
		}
	}
	old, limits := t.runs, t.limits
	t.runs, t.used, t.free, t.live, t.limits = nil, nil, 0, 0, nil
	for i := range old {
		if old[i].end() == 0 {
			continue
		}
		t.mark(numbers[i])
		r := &t.runs[numbers[i]]
		*r = old[i]
		r.parent = uint16(numbers[r.parent])
		if l := limits[uint32(i)]; l != nil {
			t.digest -= l.mix(uint32(i))
			t.setLimit(numbers[i], *l)
		}
	}
	return numbers
}
