package memo

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// maxDepth bounds how deep JSON may nest.
const maxDepth = 128

// ErrBody reports a request body that cannot be read.
var ErrBody = errors.New("request body")

// scanner reads JSON strictly and writes it compactly: no white space between
// values, strings unescaped to UTF-8 but for quotes, backslashes and control
// characters, numbers and the order of keys as they stand.
type scanner struct {
	b     []byte
	i     int
	depth int
}

func (s *scanner) fail(what string) error {
	return fmt.Errorf("%w: not JSON at byte %d: %s", ErrBody, s.i, what)
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\n', '\r':
			s.i++
		default:
			return
		}
	}
}

// next returns the next byte that is not white space; 0: the end.
func (s *scanner) next() byte {
	s.space()
	if s.i == len(s.b) {
		return 0
	}
	return s.b[s.i]
}

// value appends the compact form of the next value.
func (s *scanner) value(dst []byte) ([]byte, error) {
	if s.depth++; s.depth > maxDepth {
		return dst, s.fail("nested too deep")
	}
	defer func() { s.depth-- }()
	switch c := s.next(); c {
	case 0:
		return dst, s.fail("it ends where a value must stand")
	case '"':
		return s.text(dst)
	case '{':
		first := true
		dst = append(dst, '{')
		err := s.members(func(key []byte) (err error) {
			if !first {
				dst = append(dst, ',')
			}
			first = false
			dst = append(append(dst, key...), ':')
			dst, err = s.value(dst)
			return err
		})
		return append(dst, '}'), err
	case '[':
		first := true
		dst = append(dst, '[')
		err := s.elements(func() (err error) {
			if !first {
				dst = append(dst, ',')
			}
			first = false
			dst, err = s.value(dst)
			return err
		})
		return append(dst, ']'), err
	default:
		return s.literal(dst)
	}
}

// members calls each with the compact key of every member of an object; each
// must read the value.
func (s *scanner) members(each func(key []byte) error) error {
	if s.next() != '{' {
		return s.fail("an object must stand here")
	}
	s.i++
	if s.next() == '}' {
		s.i++
		return nil
	}
	var scratch [64]byte
	for {
		if s.next() != '"' {
			return s.fail("a key must stand here")
		}
		key, err := s.text(scratch[:0])
		if err != nil {
			return err
		}
		if s.next() != ':' {
			return s.fail("a colon must follow a key")
		}
		s.i++
		if err := each(key); err != nil {
			return err
		}
		switch s.next() {
		case ',':
			s.i++
		case '}':
			s.i++
			return nil
		default:
			return s.fail("a comma or } must follow a member")
		}
	}
}

// elements calls each for every element of an array; each must read it.
func (s *scanner) elements(each func() error) error {
	if s.next() != '[' {
		return s.fail("an array must stand here")
	}
	s.i++
	if s.next() == ']' {
		s.i++
		return nil
	}
	for {
		if err := each(); err != nil {
			return err
		}
		switch s.next() {
		case ',':
			s.i++
		case ']':
			s.i++
			return nil
		default:
			return s.fail("a comma or ] must follow an element")
		}
	}
}

// literal copies true, false, null or a number.
func (s *scanner) literal(dst []byte) ([]byte, error) {
	start := s.i
	for s.i < len(s.b) && (s.b[s.i] >= '0' && s.b[s.i] <= '9' || s.b[s.i] >= 'a' && s.b[s.i] <= 'z' || s.b[s.i] == '-' || s.b[s.i] == '+' || s.b[s.i] == '.' || s.b[s.i] == 'E') {
		s.i++
	}
	word := s.b[start:s.i]
	switch {
	case len(word) == 0:
		return dst, s.fail("a value must stand here")
	case string(word) == "true" || string(word) == "false" || string(word) == "null":
	case !isNumber(word):
		s.i = start
		return dst, s.fail("neither a word of JSON nor a number")
	}
	return append(dst, word...), nil
}

// isNumber says whether b is a number of JSON.
func isNumber(b []byte) bool {
	digits := func() bool {
		n := 0
		for n < len(b) && b[n] >= '0' && b[n] <= '9' {
			n++
		}
		b = b[n:]
		return n > 0
	}
	if len(b) > 0 && b[0] == '-' {
		b = b[1:]
	}
	zero := len(b) > 0 && b[0] == '0'
	before := len(b)
	if !digits() || zero && before-len(b) > 1 {
		return false
	}
	if len(b) > 0 && b[0] == '.' {
		b = b[1:]
		if !digits() {
			return false
		}
	}
	if len(b) > 0 && (b[0] == 'e' || b[0] == 'E') {
		b = b[1:]
		if len(b) > 0 && (b[0] == '+' || b[0] == '-') {
			b = b[1:]
		}
		return digits() && len(b) == 0
	}
	return len(b) == 0
}

// text appends a string with its quotes.
func (s *scanner) text(dst []byte) ([]byte, error) {
	dst = append(dst, '"')
	s.i++
	for {
		start := s.i
		for s.i < len(s.b) && s.b[s.i] != '"' && s.b[s.i] != '\\' && s.b[s.i] >= ' ' {
			s.i++
		}
		dst = append(dst, s.b[start:s.i]...)
		if s.i == len(s.b) {
			return dst, s.fail("a string does not end")
		}
		switch c := s.b[s.i]; {
		case c == '"':
			s.i++
			return append(dst, '"'), nil
		case c < ' ':
			return dst, s.fail("a control character in a string")
		}
		if s.i+1 == len(s.b) {
			return dst, s.fail("a string does not end")
		}
		s.i += 2
		switch c := s.b[s.i-1]; c {
		case '"', '\\', 'b', 'f', 'n', 'r', 't':
			dst = append(dst, '\\', c)
		case '/':
			dst = append(dst, '/')
		case 'u':
			var err error
			if dst, err = s.escape(dst); err != nil {
				return dst, err
			}
		default:
			return dst, s.fail("no such escape")
		}
	}
}

// escape appends the character behind \u.
func (s *scanner) escape(dst []byte) ([]byte, error) {
	r, ok := s.hex4()
	if !ok {
		return dst, s.fail("four hex digits must follow \\u")
	}
	if r >= 0xd800 && r < 0xdc00 && s.i+1 < len(s.b) && s.b[s.i] == '\\' && s.b[s.i+1] == 'u' {
		back := s.i
		s.i += 2
		low, ok := s.hex4()
		if !ok {
			return dst, s.fail("four hex digits must follow \\u")
		}
		if low >= 0xdc00 && low < 0xe000 {
			return utf8.AppendRune(dst, 0x10000+(r-0xd800)<<10+(low-0xdc00)), nil
		}
		s.i = back
	}
	switch {
	case r == '"' || r == '\\':
		return append(dst, '\\', byte(r)), nil
	case r < ' ':
		return appendControl(dst, byte(r)), nil
	case r >= 0xd800 && r < 0xe000:
		// Half a pair is no character: it stays as it is written.
		return fmt.Appendf(dst, "\\u%04x", r), nil
	}
	return utf8.AppendRune(dst, r), nil
}

// appendControl appends a control character in its shortest escaped form.
func appendControl(dst []byte, c byte) []byte {
	switch c {
	case '\b':
		return append(dst, `\b`...)
	case '\f':
		return append(dst, `\f`...)
	case '\n':
		return append(dst, `\n`...)
	case '\r':
		return append(dst, `\r`...)
	case '\t':
		return append(dst, `\t`...)
	}
	const digits = "0123456789abcdef"
	return append(dst, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
}

func (s *scanner) hex4() (rune, bool) {
	if s.i+4 > len(s.b) {
		return 0, false
	}
	var r rune
	for _, c := range s.b[s.i : s.i+4] {
		switch {
		case c >= '0' && c <= '9':
			r = r<<4 | rune(c-'0')
		case c >= 'a' && c <= 'f':
			r = r<<4 | rune(c-'a'+10)
		case c >= 'A' && c <= 'F':
			r = r<<4 | rune(c-'A'+10)
		default:
			return 0, false
		}
	}
	s.i += 4
	return r, true
}

// AppendText appends a text as a JSON string in canonical form.
func AppendText(dst []byte, text string) []byte {
	dst = append(dst, '"')
	for i := range len(text) {
		switch c := text[i]; {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c < ' ':
			dst = appendControl(dst, c)
		default:
			dst = append(dst, c)
		}
	}
	return append(dst, '"')
}
