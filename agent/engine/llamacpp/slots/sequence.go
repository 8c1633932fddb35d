package slots

import (
	"sort"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// sequence is what a slot or an entry of the host cache holds.
type sequence struct {
	// keys name the prefixes at each ledger.PointTokens tokens, as far as known.
	keys []prefix.Key
	// tokens is the length; exact says that it is not a guess.
	tokens int
	exact  bool
	// partial says that keys end before the prompt does that left it: what follows
	// them is not only an answer.
	partial bool
	// task names the request that left it; 0: not known.
	task uint64
	// doubtful says that the host cache may have let go of it already.
	doubtful bool
}

// sure is the length of what is known of a sequence.
func (s *sequence) sure() int { return len(s.keys) * ledger.PointTokens }

// shared is the length of the longest common prefix of two sequences, rounded
// down to a point. A key names all before it, so the equal ones come first.
func (s *sequence) shared(keys []prefix.Key) int {
	n := min(len(s.keys), len(keys))
	return ledger.PointTokens * sort.Search(n, func(i int) bool { return s.keys[i] != keys[i] })
}

// share is a part of a whole; nothing is all of nothing.
func share(part, whole int) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}
