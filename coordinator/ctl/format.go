package ctl

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"
	"unicode/utf8"
)

// table collects rows and prints them in columns two spaces apart.
type table struct {
	head  []string
	right map[int]bool
	rows  [][]string
}

// newTable returns a table; a header that begins with ">" is set flush right.
func newTable(head ...string) *table {
	t := &table{right: map[int]bool{}}
	for i, h := range head {
		if strings.HasPrefix(h, ">") {
			t.right[i], h = true, h[1:]
		}
		t.head = append(t.head, h)
	}
	return t
}

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print(w io.Writer) {
	width := make([]int, len(t.head))
	for _, r := range append([][]string{t.head}, t.rows...) {
		for i, c := range r {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	for _, r := range append([][]string{t.head}, t.rows...) {
		var b strings.Builder
		for i, c := range r {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(c))
			if i > 0 {
				b.WriteString("  ")
			}
			if t.right[i] {
				b.WriteString(pad + c)
			} else {
				b.WriteString(c + pad)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
}

// unknown is what people see where nothing is known; never zero.
const unknown = "?"

// millis prints milliseconds with the precision a person can use.
func millis(v *float64) string {
	if v == nil {
		return unknown
	}
	switch a := math.Abs(*v); {
	case a >= 10000:
		return fmt.Sprintf("%.1f s", *v/1000)
	case a >= 1000:
		return fmt.Sprintf("%.2f s", *v/1000)
	case a >= 100 || a == math.Trunc(a):
		return fmt.Sprintf("%.0f ms", *v)
	default:
		return fmt.Sprintf("%.1f ms", *v)
	}
}

// number prints a bare figure of a table whose unit stands in its head, or - where
// there is none to show.
func number(v *float64) string {
	if v == nil {
		return "-"
	}
	if a := math.Abs(*v); a > 0 && a < 10 {
		return fmt.Sprintf("%.1f", *v)
	}
	return thousands(*v)
}

// count prints a count, or ? if it is unknown.
func count(v *uint32) string {
	if v == nil {
		return unknown
	}
	return thousands(float64(*v))
}

func thousands(v float64) string {
	s := fmt.Sprintf("%.0f", v)
	neg := strings.HasPrefix(s, "-")
	s = strings.TrimPrefix(s, "-")
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	if neg {
		return "-" + s
	}
	return s
}

// short prints a quantity with k, M or G.
func short(v *float64) string {
	if v == nil {
		return unknown
	}
	switch x := *v; {
	case x >= 1e9:
		return fmt.Sprintf("%.1fG", x/1e9)
	case x >= 1e6:
		return fmt.Sprintf("%.1fM", x/1e6)
	case x >= 1e4:
		return fmt.Sprintf("%.0fk", x/1e3)
	default:
		return thousands(x)
	}
}

// percent prints a ratio from 0 to 1.
func percent(v *float64) string {
	if v == nil {
		return unknown
	}
	return fmt.Sprintf("%.0f%%", *v*100)
}

// age prints how long ago something was, given in ms.
func age(v *float64) string {
	if v == nil {
		return unknown
	}
	d := time.Duration(*v * float64(time.Millisecond))
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.0f h", d.Hours())
	default:
		return fmt.Sprintf("%.0f d", d.Hours()/24)
	}
}

// text prints a string, or - if it is empty.
func text(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// nearest returns the candidate closest to a mistyped name, or "".
func nearest(name string, candidates []string) string {
	best, bestDist := "", len(name)/2+1
	for _, c := range candidates {
		if d := distance(name, c); d < bestDist {
			best, bestDist = c, d
		}
	}
	return best
}

// distance is the number of single-character edits between two strings.
func distance(a, b string) int {
	prev := make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur := make([]int, len(b)+1)
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
		}
		prev = cur
	}
	return prev[len(b)]
}
