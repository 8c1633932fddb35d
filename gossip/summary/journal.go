package summary

// journal keeps what a frame changes of a tree as it was before, so that a frame
// that turns out to be bad halfway leaves no trace. It copies the runs that are
// changed only: most frames change a few of hundreds.
type journal struct {
	was     tree // counts, and whatever replaces rather than changes its memory
	changed []uint64
	runs    []changedRun
	words   []uint16
}

// changedRun is a run as it was; its words follow those of the one before.
type changedRun struct {
	number uint32
	run
}

// begin starts a frame.
func (j *journal) begin(t *tree) {
	j.was = *t
	if len(t.limits) > 0 {
		j.was.limits = make(map[uint32]*limit, len(t.limits))
		for n, l := range t.limits {
			j.was.limits[n] = l // limits are replaced, never changed
		}
	}
}

// end lets go of what the frame changed.
func (j *journal) end() {
	for i := range j.runs {
		j.changed[j.runs[i].number/64] = 0
	}
	j.was, j.runs, j.words = tree{}, j.runs[:0], j.words[:0]
}

// keep notes a run that is about to change, or to begin.
func (j *journal) keep(t *tree, n uint32) {
	if int(n) >= len(j.was.runs) {
		return // undone by its number alone
	}
	for int(n/64) >= len(j.changed) {
		j.changed = append(j.changed, 0)
	}
	if bit := uint64(1) << (n % 64); j.changed[n/64]&bit == 0 {
		j.changed[n/64] |= bit
		var r run
		if int(n) < len(t.runs) {
			r = t.runs[n]
			j.words = append(j.words, t.wordsOf(&r)...)
		}
		j.runs = append(j.runs, changedRun{n, r})
	}
}

// undo brings the tree back to what it was at begin.
func (j *journal) undo(t *tree) {
	out := tree{
		runs: make([]run, len(j.was.runs)), used: make([]uint64, len(j.was.used)), words: make([]uint16, 0, len(t.words)+len(j.words)),
		live: j.was.live, keys: j.was.keys, digest: j.was.digest, limits: j.was.limits,
	}
	put := func(n int, r run, w []uint16) {
		if r.end() > 0 {
			r.at = uint32(len(out.words))
			out.words = append(out.words, w...)
		}
		if r.end() > 0 || n == 0 {
			out.used[n/64] |= 1 << (n % 64)
		}
		out.runs[n] = r
	}
	for n := range min(len(out.runs), len(t.runs)) {
		if n/64 >= len(j.changed) || j.changed[n/64]>>(n%64)&1 == 0 {
			put(n, t.runs[n], t.wordsOf(&t.runs[n]))
		}
	}
	words := j.words
	for i := range j.runs {
		c := &j.runs[i]
		put(int(c.number), c.run, words[:c.words()])
		words = words[c.words():]
	}
	*t = out
}
