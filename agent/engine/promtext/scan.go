package promtext

import (
	"bytes"
	"math"
	"strconv"
)

// Scanner walks the series of a page:
//
//	for s := promtext.NewScanner(page); s.Next(); {
//		if string(s.Name()) != "x" {
//			s.Skip()
//			continue
//		}
//		for s.Label() { ... s.LabelName(), s.LabelValue() ... }
//		v, ok := s.Value()
//	}
type Scanner struct {
	page        []byte
	name, rest  []byte
	open, done  bool // the labels: begun, at their end
	broken      bool
	label, text []byte
}

// NewScanner makes a scanner of a page.
func NewScanner(page []byte) Scanner { return Scanner{page: page} }

// Next goes to the next series; comments and empty lines are passed over.
func (s *Scanner) Next() bool {
	for len(s.page) > 0 {
		line := s.page
		if i := bytes.IndexByte(line, '\n'); i >= 0 {
			line, s.page = line[:i], line[i+1:]
		} else {
			s.page = nil
		}
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		end := nameEnd(line)
		if end <= 0 {
			continue
		}
		s.name, s.rest, s.open, s.done, s.broken = line[:end], line[end:], false, false, false
		return true
	}
	return false
}

// nameEnd is where the name at the beginning of a line ends; -1: nowhere, so that
// it is no series.
func nameEnd(line []byte) int {
	end := -1
	// Most engines label every series; what is behind the first brace is not read.
	for _, c := range [...]byte{'{', ' ', '\t'} {
		if i := bytes.IndexByte(line, c); i >= 0 {
			line, end = line[:i], i
		}
	}
	return end
}

func endsName(c byte) bool { return c == '{' || c == ' ' || c == '\t' }

// Skip passes over the series that follow under the same name: pages are long, as
// they tell of each bucket of each histogram, and little of them is looked for.
func (s *Scanner) Skip() {
	n := len(s.name)
	for len(s.page) > n && bytes.Equal(s.page[:n], s.name) && endsName(s.page[n]) {
		i := bytes.IndexByte(s.page[n:], '\n')
		if i < 0 {
			s.page = nil
			return
		}
		s.page = s.page[n+i+1:]
	}
}

// Name is the name of the series, valid as long as the page.
func (s *Scanner) Name() []byte { return s.name }

// Label goes to the next label of the series.
func (s *Scanner) Label() bool {
	b := s.rest
	if s.done || s.broken {
		return false
	}
	if !s.open {
		if len(b) == 0 || b[0] != '{' {
			s.done = true
			return false
		}
		s.open, b = true, b[1:]
	}
	for len(b) > 0 && (b[0] == ',' || b[0] == ' ') {
		b = b[1:]
	}
	if len(b) > 0 && b[0] == '}' {
		s.rest, s.done = b[1:], true
		return false
	}
	eq := bytes.IndexByte(b, '=')
	if eq < 0 || eq+1 >= len(b) || b[eq+1] != '"' {
		s.broken = true
		return false
	}
	s.label, b = b[:eq], b[eq+2:]
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			s.text, s.rest = b[:i], b[i+1:]
			return true
		}
	}
	s.broken = true
	return false
}

// LabelName is the name of the label.
func (s *Scanner) LabelName() []byte { return s.label }

// LabelValue is the text of the label as written, escapes included.
func (s *Scanner) LabelValue() []byte { return s.text }

// Value is the number of the series, once its labels were walked; ok is false
// for one that cannot be, see Number, and for a line that is broken.
func (s *Scanner) Value() (v float64, ok bool) {
	for s.Label() {
	}
	if s.broken {
		return 0, false
	}
	return Number(s.rest)
}

// Broken says that the labels could not be read, so that it cannot be said
// whose the number is.
func (s *Scanner) Broken() bool { return s.broken }

// Number reads a number that can be a count, a share or a time: finite, not
// negative and below 2^63, where an overflowed counter ends up.
func Number(b []byte) (v float64, ok bool) {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for i, c := range b {
		if c == ' ' || c == '\t' || c == '\r' {
			b = b[:i]
			break
		}
	}
	if len(b) == 0 || len(b) > 31 { // a longer one would be copied to the heap
		return 0, false
	}
	v, err := strconv.ParseFloat(string(b), 64)
	return v, err == nil && Plausible(v)
}

// Plausible says whether a number can be a count, a share or a time.
func Plausible(v float64) bool { return v >= 0 && v < 1<<63 }

// Small reads a whole number from 0 to limit-1 of at most three digits, such
// as a rank; -1 for anything else.
func Small(v []byte, limit int) int {
	n := 0
	if len(v) == 0 || len(v) > 3 {
		return -1
	}
	for _, c := range v {
		if c < '0' || c > '9' {
			return -1
		}
		n = n*10 + int(c-'0')
	}
	if n >= limit {
		return -1
	}
	return n
}

// Reading is one number of an engine; what is absent or cannot be is not
// known, which is never zero.
type Reading struct {
	V     float64
	Known bool
	bad   bool
}

// Add sums series that differ in labels that do not matter. One that cannot be
// spoils the sum.
func (r *Reading) Add(v float64, ok bool) {
	if !ok || r.bad {
		*r = Reading{bad: true}
		return
	}
	r.V, r.Known = r.V+v, true
}

// Float is the number, nil if not known.
func (r Reading) Float() *float64 {
	if !r.Known {
		return nil
	}
	v := r.V
	return &v
}

// Share is the number if it is a share from 0 to 1, else nil.
func (r Reading) Share() *float64 {
	if r.V > 1 {
		return nil
	}
	return r.Float()
}

// Count is the number as a small count, nil if it is none.
func (r Reading) Count() *int {
	if !r.Known || r.V > math.MaxInt32 || r.V != math.Trunc(r.V) {
		return nil
	}
	n := int(r.V)
	return &n
}

// Whole is the number if it is whole and at most limit, else 0.
func (r Reading) Whole(limit float64) int {
	if !r.Known || r.V != math.Trunc(r.V) || r.V > limit {
		return 0
	}
	return int(r.V)
}

// UnmarshalJSON reads a number; what is none, or cannot be, is not known.
func (r *Reading) UnmarshalJSON(b []byte) error {
	*r = Reading{}
	if string(b) == "null" {
		return nil
	}
	r.Add(Number(b))
	return nil
}

// Bad says that there was something that cannot be.
func (r Reading) Bad() bool { return r.bad }
