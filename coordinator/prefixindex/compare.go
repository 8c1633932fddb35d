package prefixindex

import (
	"waypost/gossip/summary"
)

// Listing is one prefix as a worker's stream lists it.
type Listing struct {
	// Key names the prefix, Checkpoint the last checkpoint before it; 0: none.
	Key, Checkpoint summary.IndexKey
	DepthTokens     uint32
	// Times is how often it is listed: more than once where two of the worker's
	// own prefixes have one key.
	Times int
	// Extent is what of it is worth how much.
	Extent summary.Extent
}

// Comparison is the result of [Index.Compare]. It counts keys.
type Comparison struct {
	// Equal are listed as they should be, Missing are not listed or too seldom,
	// Extra are listed without being in the list, or too often. Extents are
	// listed, but with another extent.
	Equal, Missing, Extra, Extents int
	// MissingKeys and ExtentKeys are the first of those; of what is extra the
	// index keeps no name.
	MissingKeys, ExtentKeys []Listing
}

const (
	// maxNamed bounds the keys that a Comparison names.
	maxNamed = 16
	// compareSegments is how much is compared under one hold of the writer lock.
	compareSegments = 64
)

// wanted is what a worker should list at a spot.
type wanted struct {
	Listing
	found bool
}

// Compare compares all that the index lists for a worker, predictions left out,
// with what its stream should have listed. Sinks of the worker must not be
// written to meanwhile; changes of other workers go on, and searches as well.
// The extent of a key listed more than once is the one told last, which a list
// does not tell; it is not compared.
func (x *Index) Compare(id WorkerID, want []Listing) Comparison {
	byPlace := make(map[spot]*wanted, len(want))
	order := make([]*wanted, 0, len(want))
	for _, l := range want {
		at := x.spot(&name{l.Key, l.Checkpoint, l.DepthTokens})
		if w := byPlace[at]; w != nil {
			w.Times += l.Times
			continue
		}
		w := &wanted{Listing: l}
		byPlace[at] = w
		order = append(order, w)
	}
	var c Comparison
	for first := 0; first < segments; first += compareSegments {
		x.compareSome(id, first, byPlace, &c)
	}
	for _, w := range order {
		if !w.found {
			c.missing(&w.Listing)
		}
	}
	return c
}

// compareSome compares some segments.
func (x *Index) compareSome(id WorkerID, first int, want map[spot]*wanted, c *Comparison) {
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.workers[id]
	if w == nil {
		return
	}
	for number := first; number < first+compareSegments; number++ {
		for _, word := range x.held.dir[number].view().words() {
			if word == 0 {
				continue
			}
			e := x.full.entryOf(word)
			if !x.sets.has(e.members, w.slot) {
				continue
			}
			at := spot{segment: uint32(number), tag: word & tagMask}
			if e.info&infoPredicted != 0 && x.predicted.has(at, w.slot) {
				continue
			}
			d, ok := x.detail(w, at)
			if !ok {
				d = ordinary
			}
			c.take(&d, want[at])
		}
	}
}

// take compares one key that is listed with what it should be; nil: nothing.
func (c *Comparison) take(d *detail, w *wanted) {
	if w == nil {
		c.Extra++
		return
	}
	w.found = true
	is := summary.WholeExtent(w.DepthTokens)
	if d.partial {
		is = d.extent
	}
	switch {
	case int(d.listed) < w.Times:
		c.missing(&w.Listing)
	case int(d.listed) > w.Times:
		c.Extra++
	case w.Times == 1 && is != w.Extent:
		c.Extents++
		if len(c.ExtentKeys) < maxNamed {
			c.ExtentKeys = append(c.ExtentKeys, w.Listing)
		}
	default:
		c.Equal++
	}
}

func (c *Comparison) missing(l *Listing) {
	c.Missing++
	if len(c.MissingKeys) < maxNamed {
		c.MissingKeys = append(c.MissingKeys, *l)
	}
}
