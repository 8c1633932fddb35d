package daemon

import "strings"

// nearest returns the candidate that key was most likely meant to be. Besides a
// small typing error it forgives a wrong table before the right name
// ("gosip.listen", or "listen" at the top).
func nearest(key string, candidates []string) (string, bool) {
	best, bestCost := "", -1
	for _, c := range candidates {
		cost := distance(key, c)
		sameName := lastPart(c) == lastPart(key)
		if cost > max(2, len(lastPart(key))/3) && !sameName {
			continue
		}
		if !sameName {
			cost += 2 // a right name in the wrong table is likelier than two wrong halves
		}
		if bestCost < 0 || cost < bestCost {
			best, bestCost = c, cost
		}
	}
	return best, bestCost >= 0
}

func lastPart(key string) string { return key[strings.LastIndexByte(key, '.')+1:] }

// distance is the number of insertions, deletions, replacements and swaps of
// neighbours that turn a into b (optimal string alignment).
func distance(a, b string) int {
	const most = 64 // longer keys are no typing errors
	a, b = a[:min(len(a), most)], b[:min(len(b), most)]
	before, prev, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(prev[j]+1, row[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, prev, row = prev, row, before
	}
	return prev[len(b)]
}
