package registry

import "strings"

// maxSuggestBytes bounds what a suggestion is looked for: longer text is no slip
// of the finger.
const maxSuggestBytes = 100

// nearest is the candidate a person most likely meant by s, empty if none is
// near: at most one edit in three characters.
func nearest(s string, candidates []string) string {
	best, bestEdits := "", len(s)/3+1
	if len(s) > maxSuggestBytes {
		return ""
	}
	s = strings.ToLower(s)
	for _, c := range candidates {
		if d := len(c) - len(s); d >= bestEdits || -d >= bestEdits || len(c) > maxSuggestBytes {
			continue
		}
		if e := edits(s, strings.ToLower(c)); e < bestEdits {
			best, bestEdits = c, e
		}
	}
	return best
}

// didYouMean is the tail of an error message, empty if nothing is near.
func didYouMean(s string, candidates []string) string {
	if n := nearest(s, candidates); n != "" {
		return `; did you mean "` + n + `"?`
	}
	return ""
}

// edits counts insertions, deletions and replacements of one character, and
// swaps of two neighbours, between a and b of at most maxSuggestBytes each.
func edits(a, b string) int {
	var rows [3][maxSuggestBytes + 1]int
	before, prev, row := &rows[0], &rows[1], &rows[2]
	for j := range len(b) + 1 {
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
