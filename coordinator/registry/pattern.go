package registry

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxPatternBytes bounds the text of a pattern.
const maxPatternBytes = 256

// Pattern matches one name: * is any run of characters, ? any one, [abc], [a-c]
// and [!a] one of a set, and [1-12], [01-12] or [1,3,7-9] a number. A number
// with a leading zero in its bounds has that many digits. Everything else
// stands for itself. A name with a slash never matches.
type Pattern struct {
	text  string
	parts []patternPart
}

type patternPart struct {
	kind    partKind
	literal string      // partLiteral
	not     bool        // partSet: none of the ranges
	ranges  [][2]uint32 // partSet: characters; partNumber: numbers
	width   int         // partNumber: digits; 0: as many as there are
}

type partKind uint8

const (
	partLiteral partKind = iota
	partAny
	partRun
	partSet
	partNumber
)

// ParsePattern reads a pattern.
func ParsePattern(text string) (Pattern, error) {
	if text == "" || len(text) > maxPatternBytes {
		return Pattern{}, fmt.Errorf("a pattern has 1 to %d characters, %q has %d", maxPatternBytes, clip(text, 40), len(text))
	}
	if strings.ContainsRune(text, '/') {
		return Pattern{}, fmt.Errorf("%q: a slash is not part of a name", text)
	}
	p := Pattern{text: text}
	for rest := text; rest != ""; {
		switch rest[0] {
		case '*':
			if n := len(p.parts); n == 0 || p.parts[n-1].kind != partRun {
				p.parts = append(p.parts, patternPart{kind: partRun})
			}
			rest = rest[1:]
		case '?':
			p.parts = append(p.parts, patternPart{kind: partAny})
			rest = rest[1:]
		case '[':
			inner, after, closed := strings.Cut(rest[1:], "]")
			if !closed || inner == "" {
				return Pattern{}, fmt.Errorf("%q: a [ needs characters and a ]", text)
			}
			part, err := parseBracket(inner)
			if err != nil {
				return Pattern{}, fmt.Errorf("%q: [%s]: %w", text, inner, err)
			}
			p.parts = append(p.parts, part)
			rest = after
		case ']':
			return Pattern{}, fmt.Errorf("%q: a ] without a [", text)
		default:
			n := strings.IndexAny(rest, "*?[]")
			if n < 0 {
				n = len(rest)
			}
			p.parts = append(p.parts, patternPart{kind: partLiteral, literal: rest[:n]})
			rest = rest[n:]
		}
	}
	return p, nil
}

func parseBracket(inner string) (patternPart, error) {
	if !strings.ContainsFunc(inner, func(r rune) bool { return !(r >= '0' && r <= '9') && r != '-' && r != ',' }) &&
		(strings.ContainsRune(inner, ',') || strings.ContainsRune(inner, '-') && len(inner) > 3) {
		return parseNumbers(inner)
	}
	part := patternPart{kind: partSet}
	inner, part.not = strings.CutPrefix(inner, "!")
	for runes := []rune(inner); len(runes) > 0; {
		lo, hi, n := runes[0], runes[0], 1
		if len(runes) >= 3 && runes[1] == '-' {
			hi, n = runes[2], 3
		}
		if lo > hi {
			return patternPart{}, fmt.Errorf("%q comes after %q", lo, hi)
		}
		part.ranges = append(part.ranges, [2]uint32{uint32(lo), uint32(hi)})
		runes = runes[n:]
	}
	if len(part.ranges) == 0 {
		return patternPart{}, fmt.Errorf("no characters")
	}
	return part, nil
}

func parseNumbers(inner string) (patternPart, error) {
	part := patternPart{kind: partNumber}
	widths := map[int]bool{}
	for item := range strings.SplitSeq(inner, ",") {
		from, to, isRange := strings.Cut(item, "-")
		if !isRange {
			to = from
		}
		var bounds [2]uint32
		for i, text := range []string{from, to} {
			n, err := strconv.ParseUint(text, 10, 31)
			if err != nil {
				return patternPart{}, fmt.Errorf("%q is not a number or a range such as 1-12", item)
			}
			bounds[i] = uint32(n)
			widths[len(text)] = true
			if len(text) > 1 && text[0] == '0' {
				part.width = len(text)
			}
		}
		if bounds[0] > bounds[1] {
			return patternPart{}, fmt.Errorf("%s comes after %s", from, to)
		}
		part.ranges = append(part.ranges, bounds)
	}
	if part.width > 0 && len(widths) > 1 {
		return patternPart{}, fmt.Errorf("numbers with leading zeros need the same number of digits throughout")
	}
	return part, nil
}

// String is the pattern as it was written.
func (p Pattern) String() string { return p.text }

// literal returns the one name the pattern matches, if it is a plain name.
func (p Pattern) literal() (string, bool) {
	if len(p.parts) == 1 && p.parts[0].kind == partLiteral {
		return p.parts[0].literal, true
	}
	return "", false
}

// Match says whether the whole name matches.
func (p Pattern) Match(name string) bool {
	if strings.ContainsRune(name, '/') {
		return false
	}
	// The last * that can take more, and where the name continued after it.
	retryPart, retryAt := -1, 0
	part, at := 0, 0
	for part < len(p.parts) || at < len(name) {
		if part < len(p.parts) {
			if p.parts[part].kind == partRun {
				retryPart, retryAt = part, at
				part++
				continue
			}
			if n, ok := p.parts[part].take(name[at:]); ok {
				part, at = part+1, at+n
				continue
			}
		}
		if retryPart < 0 || retryAt >= len(name) {
			return false
		}
		retryAt++
		part, at = retryPart+1, retryAt
	}
	return true
}

// take says how many bytes of the name this part matches at its beginning.
func (p patternPart) take(name string) (int, bool) {
	switch p.kind {
	case partLiteral:
		return len(p.literal), strings.HasPrefix(name, p.literal)
	case partNumber:
		return p.takeNumber(name)
	}
	r, n := utf8.DecodeRuneInString(name)
	if p.kind == partAny {
		return n, n > 0
	}
	return n, n > 0 && p.inRanges(uint32(r)) != p.not
}

func (p patternPart) takeNumber(name string) (int, bool) {
	n := 0
	for n < len(name) && n < 10 && name[n] >= '0' && name[n] <= '9' && (p.width == 0 || n < p.width) {
		n++
	}
	if n == 0 || p.width > 0 && n != p.width || p.width == 0 && n > 1 && name[0] == '0' {
		return 0, false
	}
	v, err := strconv.ParseUint(name[:n], 10, 31)
	return n, err == nil && p.inRanges(uint32(v))
}

func (p patternPart) inRanges(v uint32) bool {
	return slices.ContainsFunc(p.ranges, func(r [2]uint32) bool { return v >= r[0] && v <= r[1] })
}

// WorkerPattern matches workers by host, host/engine or host/engine/rank.
type WorkerPattern struct {
	text  string
	parts []Pattern
}

// ParseWorkerPattern reads up to three patterns with slashes between.
func ParseWorkerPattern(text string) (WorkerPattern, error) {
	parts := strings.Split(text, "/")
	if len(parts) > 3 {
		return WorkerPattern{}, fmt.Errorf("%q has %d parts; it is host, host/engine or host/engine/rank", clip(text, 100), len(parts))
	}
	w := WorkerPattern{text: text}
	for _, p := range parts {
		pattern, err := ParsePattern(p)
		if err != nil {
			return WorkerPattern{}, err
		}
		w.parts = append(w.parts, pattern)
	}
	return w, nil
}

// String is the pattern as it was written.
func (w WorkerPattern) String() string { return w.text }

// Match says whether a worker (host/engine/rank) matches in the parts given.
func (w WorkerPattern) Match(worker string) bool {
	for _, p := range w.parts {
		name, rest, _ := strings.Cut(worker, "/")
		if !p.Match(name) {
			return false
		}
		worker = rest
	}
	return true
}
