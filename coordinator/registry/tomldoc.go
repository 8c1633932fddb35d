package registry

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

const (
	// maxProblems bounds how many problems of one file are reported.
	maxProblems = 20
	// maxDepth bounds the parts of a key and the levels of a value together;
	// the deepest of a fleet file has four.
	maxDepth = 16
	// maxSiblings bounds the keys of a table and the names of tables.
	maxSiblings = 256
	// maxSections bounds the sections of one kind.
	maxSections = 4096
	// maxHints bounds the problems for which a suggestion is looked for.
	maxHints = 2 * maxProblems
)

// Problem is one thing wrong in a fleet file.
type Problem struct {
	// Line counts from 1; 0 when no line can be named.
	Line int
	// Key is the dotted key, without the number of its section; may be empty.
	Key string
	// Detail says what is wrong and what would be right.
	Detail string
}

// FleetError is all that is wrong in a fleet file, in the order of its lines,
// at most 20 problems.
type FleetError struct {
	File     string
	Problems []Problem
	// More counts the problems left out.
	More int
}

// Error has one line per problem: "fleet.toml:12: …".
func (e *FleetError) Error() string {
	var b strings.Builder
	for i, p := range e.Problems {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(e.File)
		if p.Line > 0 {
			b.WriteString(":" + strconv.Itoa(p.Line))
		}
		b.WriteString(": " + p.Detail)
	}
	if e.More > 0 {
		fmt.Fprintf(&b, "\n%s: and %d more", e.File, e.More)
	}
	return b.String()
}

// document is a TOML file with the line of every key.
type document struct {
	file     string
	lenient  bool
	lines    map[string]int // by path, parts joined by pathSep
	problems []Problem
}

// pathSep joins the parts of a path. TOML keys hold no control characters
// unless escaped, and those are no key of ours.
const pathSep = "\x00"

// section is one table of the document.
type section struct {
	doc    *document
	path   string
	name   string // dotted, as people write it; empty at the top
	line   int
	values map[string]any
	asked  []string
}

// openDocument parses the text. An error in the syntax is the only problem then.
func openDocument(file, text string, lenient bool) (*document, *section, error) {
	d := &document{file: file, lenient: lenient, lines: map[string]int{}}
	if p := tooMuch([]byte(text)); p != nil {
		return nil, nil, &FleetError{File: file, Problems: []Problem{*p}}
	}
	values := map[string]any{}
	if err := toml.Unmarshal([]byte(text), &values); err != nil {
		p := Problem{Detail: strings.TrimPrefix(err.Error(), "toml: ")}
		var de *toml.DecodeError
		if errors.As(err, &de) {
			p.Line, _ = de.Position()
		}
		return nil, nil, &FleetError{File: file, Problems: []Problem{p}}
	}
	d.index([]byte(text))
	return d, &section{doc: d, values: values, line: 1}, nil
}

// tooMuch finds what the parser would need time or memory for by its square: an
// expression with more than maxDepth parts in its key and levels in its value,
// or more than maxSiblings keys in one table or differently named tables. A
// fleet file has a handful of each.
func tooMuch(text []byte) *Problem {
	names := map[string]bool{}
	siblings := 0
	var p unstable.Parser
	p.Reset(text)
	for p.NextExpression() {
		e := p.Expression()
		parts, at, name := 0, uint32(0), ""
		for key := e.Key(); key.Next(); {
			parts++
			if at = key.Node().Raw.Offset; parts <= maxDepth {
				name = join(name, string(key.Node().Data))
			}
		}
		siblings++
		most := siblings
		switch e.Kind {
		case unstable.KeyValue:
			if parts <= maxDepth {
				depth, entries := sizeOf(e.Value(), parts)
				parts, most = depth, max(most, entries)
			}
		default:
			siblings = 0
			names[name] = true
			most = len(names)
		}
		line := bytes.Count(text[:at], []byte("\n")) + 1
		switch {
		case parts > maxDepth:
			return &Problem{Line: line, Detail: fmt.Sprintf("keys and values are nested more than %d deep", maxDepth)}
		case most > maxSiblings:
			return &Problem{Line: line, Detail: fmt.Sprintf("more than %d keys in one table, or tables of different names", maxSiblings)}
		}
	}
	return nil
}

// sizeOf returns how deep a value goes, from a depth on, and the most entries of
// an inline table in it. It stops where either is too much.
func sizeOf(n *unstable.Node, depth int) (deepest, entries int) {
	deepest = depth + 1
	if deepest > maxDepth || n.Kind != unstable.Array && n.Kind != unstable.InlineTable {
		return deepest, 0
	}
	own := 0
	for children := n.Children(); children.Next() && deepest <= maxDepth && entries <= maxSiblings; {
		c, at := children.Node(), depth+1
		if c.Kind == unstable.KeyValue {
			own++
			for key := c.Key(); key.Next(); {
				at++
			}
			c = c.Value()
		}
		d, e := maxDepth+1, 0
		if at <= maxDepth {
			d, e = sizeOf(c, at)
		}
		deepest, entries = max(deepest, d), max(entries, e, own)
	}
	return deepest, entries
}

// index records the line of every key. The text is known to be valid.
func (d *document) index(text []byte) {
	var starts []int
	for i, c := range text {
		if c == '\n' {
			starts = append(starts, i+1)
		}
	}
	line := func(n *unstable.Node) int {
		return sort.SearchInts(starts, int(n.Raw.Offset)+1) + 1
	}
	counts := map[string]int{} // entries of an array of tables so far
	// follow appends the key's parts to base, into the newest entry of each
	// array of tables on the way, and records their lines.
	follow := func(base string, key unstable.Iterator, opensEntry bool) string {
		for key.Next() {
			base = join(base, string(key.Node().Data))
			if _, ok := d.lines[base]; !ok {
				d.lines[base] = line(key.Node())
			}
			if opensEntry && key.IsLast() {
				counts[base]++
			}
			if n := counts[base]; n > 0 {
				base = join(base, strconv.Itoa(n-1))
				if _, ok := d.lines[base]; !ok {
					d.lines[base] = line(key.Node())
				}
			}
		}
		return base
	}
	var value func(path string, n *unstable.Node)
	value = func(path string, n *unstable.Node) {
		children := n.Children()
		switch n.Kind {
		case unstable.InlineTable:
			for children.Next() {
				kv := children.Node()
				value(follow(path, kv.Key(), false), kv.Value())
			}
		case unstable.Array:
			for i := 0; children.Next(); {
				c := children.Node()
				if c.Kind == unstable.Comment {
					continue
				}
				at := join(path, strconv.Itoa(i))
				if c.Raw.Length > 0 {
					d.lines[at] = line(c)
				}
				value(at, c)
				i++
			}
		}
	}
	var p unstable.Parser
	p.Reset(text)
	table := ""
	for p.NextExpression() {
		switch e := p.Expression(); e.Kind {
		case unstable.Table:
			table = follow("", e.Key(), false)
		case unstable.ArrayTable:
			table = follow("", e.Key(), true)
		case unstable.KeyValue:
			value(follow(table, e.Key(), false), e.Value())
		}
	}
}

func join(path, part string) string {
	if path == "" {
		return part
	}
	return path + pathSep + part
}

// err is all problems found, or nil.
func (d *document) err() error {
	if len(d.problems) == 0 {
		return nil
	}
	slices.SortFunc(d.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Detail, b.Detail))
	})
	e := &FleetError{File: d.file, Problems: d.problems}
	if extra := len(d.problems) - maxProblems; extra > 0 {
		e.Problems, e.More = d.problems[:maxProblems], extra
	}
	return e
}

// dotted is the name of a key of this section as people write it.
func (s *section) dotted(key string) string {
	if s.name == "" {
		return key
	}
	return s.name + "." + key
}

// lineOf is the line of a key, else the line of the nearest part above it.
func (s *section) lineOf(key string) int {
	for path := join(s.path, key); path != ""; {
		if l, ok := s.doc.lines[path]; ok {
			return l
		}
		i := strings.LastIndex(path, pathSep)
		if i < 0 {
			break
		}
		path = path[:i]
	}
	return s.line
}

// problem reports something wrong with a key of this section.
func (s *section) problem(key, format string, args ...any) {
	s.doc.problems = append(s.doc.problems, Problem{s.lineOf(key), s.dotted(key), s.dotted(key) + ": " + fmt.Sprintf(format, args...)})
}

// problemAt reports something wrong with entry i of a list.
func (s *section) problemAt(key string, i int, format string, args ...any) {
	name := fmt.Sprintf("%s[%d]", s.dotted(key), i)
	s.doc.problems = append(s.doc.problems, Problem{s.lineOf(join(key, strconv.Itoa(i))), s.dotted(key), name + ": " + fmt.Sprintf(format, args...)})
}

func (s *section) get(key string) (any, bool) {
	s.asked = append(s.asked, key)
	v, ok := s.values[key]
	return v, ok
}

// text is the string under a key. Something else there is a problem, and
// counts as nothing.
func (s *section) text(key, example string) (string, bool) {
	v, ok := s.get(key)
	if !ok {
		return "", false
	}
	t, ok := v.(string)
	if !ok {
		s.problem(key, "it is %s, want a text such as %q", describe(v), example)
	}
	return t, ok
}

// needText is text, and a problem if there is none.
func (s *section) needText(key, example, missing string) (string, bool) {
	if _, ok := s.values[key]; !ok {
		s.asked = append(s.asked, key)
		s.problem(key, "it is missing; %s", missing)
		return "", false
	}
	return s.text(key, example)
}

// texts is the list of strings under a key.
func (s *section) texts(key, example string) ([]string, bool) {
	v, ok := s.get(key)
	if !ok {
		return nil, false
	}
	list, isList := v.([]any)
	if !isList {
		s.problem(key, "it is %s, want a list of texts such as [%q]", describe(v), example)
		return nil, false
	}
	out := make([]string, 0, len(list))
	for i, e := range list {
		t, isText := e.(string)
		if !isText {
			s.problemAt(key, i, "it is %s, want a text such as %q", describe(e), example)
			return nil, false
		}
		out = append(out, t)
	}
	return out, true
}

// count is the whole number under a key, from lo to hi.
func (s *section) count(key string, lo, hi int64) (int64, bool) {
	v, ok := s.get(key)
	if !ok {
		return 0, false
	}
	n, isInt := v.(int64)
	if !isInt || n < lo || n > hi {
		s.problem(key, "it is %s, want a whole number from %d to %d", describe(v), lo, hi)
		return 0, false
	}
	return n, true
}

// table is the table under a key, empty if there is none.
func (s *section) table(key string) *section {
	v, ok := s.get(key)
	sub := &section{doc: s.doc, path: join(s.path, key), name: s.dotted(key), line: s.lineOf(key)}
	if !ok {
		return sub
	}
	values, isTable := v.(map[string]any)
	if !isTable {
		s.problem(key, "it is %s, want a table [%s]", describe(v), s.dotted(key))
	}
	sub.values = values
	return sub
}

// tables are the entries of the array of tables under a key.
func (s *section) tables(key string) []*section {
	v, ok := s.get(key)
	if !ok {
		return nil
	}
	list, isList := v.([]any)
	out := make([]*section, 0, len(list))
	for i, e := range list {
		values, isTable := e.(map[string]any)
		if !isTable {
			isList = false
			break
		}
		path := join(join(s.path, key), strconv.Itoa(i))
		out = append(out, &section{doc: s.doc, path: path, name: s.dotted(key), line: s.doc.lines[path], values: values})
	}
	switch {
	case !isList:
		s.problem(key, "it is %s, want tables [[%s]]", describe(v), s.dotted(key))
		return nil
	case len(out) > maxSections:
		s.problem(key, "there are %d, at most %d", len(out), maxSections)
		return nil
	}
	return out
}

// done reports the keys of this section that nobody asked for. known are the
// dotted keys of the whole file.
func (s *section) done(known []string) {
	if s.doc.lenient {
		return
	}
	for key := range s.values {
		if slices.Contains(s.asked, key) {
			continue
		}
		full := s.dotted(key)
		hint := s.doc.hint(full, known)
		if hint == "" {
			sorted := slices.Clone(s.asked)
			slices.Sort(sorted)
			hint = "; known here: " + strings.Join(sorted, ", ")
		}
		s.doc.problems = append(s.doc.problems, Problem{s.lineOf(key), full, fmt.Sprintf("unknown key %q%s", clip(full, 100), hint)})
	}
}

// hint is didYouMean while it is worth the work: few problems are shown.
func (d *document) hint(s string, candidates []string) string {
	if len(d.problems) > maxHints {
		return ""
	}
	return didYouMean(s, candidates)
}

// names are what the sections of one kind are called.
type names struct {
	doc  *document
	kind string
	list []string
	set  map[string]bool
}

func (d *document) namesOf(kind string, list ...string) *names {
	n := &names{doc: d, kind: kind, set: map[string]bool{}}
	for _, name := range list {
		n.add(name)
	}
	return n
}

func (n *names) add(name string) {
	if name != "" && !n.set[name] {
		n.list = append(n.list, name)
		n.set[name] = true
	}
}

// fault says that no section has a name, and which have; empty if one has it.
func (n *names) fault(name string) string {
	if n.set[name] {
		return ""
	}
	hint := n.doc.hint(name, n.list)
	if hint == "" {
		some := slices.Sorted(slices.Values(n.list[:min(len(n.list), 10)]))
		switch {
		case len(some) == 0:
			hint = "; there are none"
		case len(some) < len(n.list):
			hint = "; there are " + strings.Join(some, ", ") + ", …"
		default:
			hint = "; there are " + strings.Join(some, ", ")
		}
	}
	return fmt.Sprintf("no [[%s]] is named %q%s", n.kind, clip(name, 60), hint)
}

// describe says what a value is, for an error.
func describe(v any) string {
	switch v := v.(type) {
	case string:
		return strconv.Quote(clip(v, 60))
	case int64:
		return "the number " + strconv.FormatInt(v, 10)
	case float64:
		return "the number " + strconv.FormatFloat(v, 'g', -1, 64)
	case bool:
		return strconv.FormatBool(v)
	case []any:
		return "a list"
	case map[string]any:
		return "a table"
	}
	return fmt.Sprintf("a %T", v)
}
