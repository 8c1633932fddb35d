package boundary

import (
	"fmt"
	"math"
	"slices"
)

// Relation is how two boundaries stand to each other.
type Relation uint8

// The relations. Unknown: nothing that was measured of both can be compared.
const (
	Unknown Relation = iota
	Agree
	Differ
)

// Difference is the first thing in which two boundaries differ.
type Difference struct {
	Part Part
	// Number is the probe; 0: the part has none.
	Number int
	// Token is the first token that differs, from 0; -1: there are none.
	Token int
}

// String is how people read it: "chat rendering, probe 3".
func (d Difference) String() string {
	if d.Number == 0 {
		return d.Part.Title()
	}
	return fmt.Sprintf("%s, probe %d", d.Part.Title(), d.Number)
}

// CostsCredit says that nothing that one side holds is worth anything to the
// other. Where only the rule of adapters and salts differs, requests with
// neither mean the same blocks.
func (d Difference) CostsCredit() bool { return d.Part != PartRule }

// Compare compares what was measured of both. A rule differs last.
func Compare(a, b *Vector) (Relation, Difference) {
	if a == nil || b == nil {
		return Unknown, Difference{}
	}
	if a.Declared != "" && b.Declared != "" {
		if a.Declared != b.Declared {
			return Differ, Difference{Part: PartDeclared, Token: -1}
		}
		return Agree, Difference{}
	}
	found := Unknown
	if a.KeyID == b.KeyID {
		i, j := 0, 0
		for i < len(a.Probes) && j < len(b.Probes) {
			x, y := &a.Probes[i], &b.Probes[j]
			switch order := compareProbes(*x, *y); {
			case order < 0:
				i++
				continue
			case order > 0:
				j++
				continue
			}
			if at, differ := firstDifference(x.Tokens, y.Tokens); differ {
				return Differ, Difference{Part: x.Part, Number: x.Number, Token: at}
			}
			found, i, j = Agree, i+1, j+1
		}
	}
	if a.Rule != "" && b.Rule != "" && a.Rule != b.Rule {
		return Differ, Difference{Part: PartRule, Token: -1}
	}
	return found, Difference{}
}

// Alike says that two measurements of a probe differ in no more than a date that
// is masked in one of them.
func Alike(a, b []Token) bool {
	_, differ := firstDifference(a, b)
	return !differ
}

// tokensPerMask is how many tokens one masked token may stand for, beside none:
// "1 May" and "30 September" are dates.
const tokensPerMask = 3

// firstDifference finds the first token of a that is not that of b; dates are
// alike.
func firstDifference(a, b []Token) (at int, differ bool) {
	if !slices.Contains(a, Masked) && !slices.Contains(b, Masked) {
		for i := range min(len(a), len(b)) {
			if a[i] != b[i] {
				return i, true
			}
		}
		return min(len(a), len(b)), len(a) != len(b)
	}
	// used[j] is how much of the date's room at a[i] or b[j] it takes to have
	// matched all before; it is infinite where they cannot match. One row per i.
	const never = math.MaxUint8
	row, next := make([]uint8, len(b)+1), make([]uint8, len(b)+1)
	fill := func(r []uint8) {
		for j := range r {
			r[j] = never
		}
	}
	fill(row)
	row[0] = 0
	furthest := 0
	for i := 0; i <= len(a); i++ {
		fill(next)
		for j := 0; j <= len(b); j++ {
			used := row[j]
			if used == never {
				continue
			}
			furthest = i
			maskA, maskB := i < len(a) && a[i] == Masked, j < len(b) && b[j] == Masked
			if i < len(a) && j < len(b) && a[i] == b[j] {
				next[j+1] = 0
			}
			if maskA {
				next[j] = 0
				if j < len(b) && used < tokensPerMask {
					row[j+1] = min(row[j+1], used+1)
				}
			}
			if maskB {
				row[j+1] = 0
				if i < len(a) && used < tokensPerMask {
					next[j] = min(next[j], used+1)
				}
			}
		}
		if i == len(a) {
			break
		}
		row, next = next, row
	}
	return furthest, row[len(b)] == never
}
