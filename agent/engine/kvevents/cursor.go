package kvevents

import (
	"encoding/binary"
	"math"
)

// cursor reads msgpack. Every count is compared with the bytes that are left,
// so that a header cannot promise more than the message holds. A failed read
// leaves the cursor anywhere; the caller returns to a position it kept.
type cursor struct {
	b []byte
	i int
}

func (c *cursor) left() int { return len(c.b) - c.i }

// peek gives the next byte, or 0xc1, which msgpack never uses.
func (c *cursor) peek() byte {
	if c.i >= len(c.b) {
		return 0xc1
	}
	return c.b[c.i]
}

func (c *cursor) null() bool {
	if c.peek() != 0xc0 {
		return false
	}
	c.i++
	return true
}

// size reads a big-endian length of 1, 2 or 4 bytes after a head byte.
func (c *cursor) size(bytes int) (int, bool) {
	if c.left() < 1+bytes {
		return 0, false
	}
	b := c.b[c.i+1:]
	c.i += 1 + bytes
	switch bytes {
	case 1:
		return int(b[0]), true
	case 2:
		return int(binary.BigEndian.Uint16(b)), true
	}
	return int(binary.BigEndian.Uint32(b)), true
}

// array reads an array's header and gives its length.
func (c *cursor) array() (n int, ok bool) {
	switch h := c.peek(); {
	case h&0xf0 == 0x90:
		c.i++
		n, ok = int(h&0x0f), true
	case h == 0xdc:
		n, ok = c.size(2)
	case h == 0xdd:
		n, ok = c.size(4)
	}
	return n, ok && n <= c.left()
}

// dict reads a map's header and gives its number of pairs.
func (c *cursor) dict() (n int, ok bool) {
	switch h := c.peek(); {
	case h&0xf0 == 0x80:
		c.i++
		n, ok = int(h&0x0f), true
	case h == 0xde:
		n, ok = c.size(2)
	case h == 0xdf:
		n, ok = c.size(4)
	}
	return n, ok && n <= c.left()/2
}

// text reads a string or bytes; the result is part of the message.
func (c *cursor) text() ([]byte, bool) {
	n, ok := 0, false
	switch h := c.peek(); {
	case h&0xe0 == 0xa0:
		c.i++
		n, ok = int(h&0x1f), true
	case h == 0xd9, h == 0xc4:
		n, ok = c.size(1)
	case h == 0xda, h == 0xc5:
		n, ok = c.size(2)
	case h == 0xdb, h == 0xc6:
		n, ok = c.size(4)
	}
	if !ok || n > c.left() {
		return nil, false
	}
	v := c.b[c.i : c.i+n]
	c.i += n
	return v, true
}

// integer reads any form of integer; negative ones as two's complement.
func (c *cursor) integer() (v uint64, negative, ok bool) {
	h := c.peek()
	switch {
	case h < 0x80:
		c.i++
		return uint64(h), false, true
	case h >= 0xe0:
		c.i++
		return uint64(int64(int8(h))), true, true
	case h < 0xcc || h > 0xd3:
		return 0, false, false
	}
	bytes := 1 << ((h - 0xcc) & 3)
	if c.left() < 1+bytes {
		return 0, false, false
	}
	b := c.b[c.i+1 : c.i+1+bytes]
	c.i += 1 + bytes
	for _, x := range b {
		v = v<<8 | uint64(x)
	}
	if h >= 0xd0 { // signed
		shift := 64 - 8*bytes
		s := int64(v<<shift) >> shift
		return uint64(s), s < 0, true
	}
	return v, false, true
}

// small reads null as 0, or an integer from 0 to limit.
func (c *cursor) small(limit uint64) (v int32, ok bool) {
	if c.null() {
		return 0, true
	}
	u, negative, ok := c.integer()
	return int32(u), ok && !negative && u <= limit
}

// number reads a float or an integer.
func (c *cursor) number() (float64, bool) {
	switch c.peek() {
	case 0xcb:
		if c.left() < 9 {
			return 0, false
		}
		v := math.Float64frombits(binary.BigEndian.Uint64(c.b[c.i+1:]))
		c.i += 9
		return v, true
	case 0xca:
		if c.left() < 5 {
			return 0, false
		}
		v := math.Float32frombits(binary.BigEndian.Uint32(c.b[c.i+1:]))
		c.i += 5
		return float64(v), true
	}
	v, negative, ok := c.integer()
	if negative {
		return float64(int64(v)), ok
	}
	return float64(v), ok
}

// skip passes over one value. It counts the values still to pass instead of
// calling itself, so nesting costs neither stack nor memory.
func (c *cursor) skip() bool {
	for todo := 1; todo > 0; todo-- {
		if todo > c.left() { // a value is at least one byte
			return false
		}
		n, ok := c.skipHead()
		if !ok {
			return false
		}
		todo += n
	}
	return true
}

// skipHead passes over a value, or over the head of one that holds n more.
func (c *cursor) skipHead() (n int, ok bool) {
	h := c.peek()
	switch {
	case h < 0x80 || h >= 0xe0 || h == 0xc0 || h == 0xc2 || h == 0xc3:
		return 0, c.pass(1)
	case h&0xf0 == 0x90 || h == 0xdc || h == 0xdd:
		return c.array()
	case h&0xf0 == 0x80 || h == 0xde || h == 0xdf:
		n, ok = c.dict()
		return 2 * n, ok
	case h&0xe0 == 0xa0 || h >= 0xd9 && h <= 0xdb || h >= 0xc4 && h <= 0xc6:
		_, ok = c.text()
		return 0, ok
	case h >= 0xcc && h <= 0xd3:
		return 0, c.pass(1 + 1<<((h-0xcc)&3))
	case h == 0xca:
		return 0, c.pass(5)
	case h == 0xcb:
		return 0, c.pass(9)
	case h >= 0xd4 && h <= 0xd8: // fixed extensions
		return 0, c.pass(2 + 1<<(h-0xd4))
	case h >= 0xc7 && h <= 0xc9: // extensions: length, type, data
		n, ok = c.size(1 << (h - 0xc7))
		return 0, ok && c.pass(1+n)
	}
	return 0, false
}

func (c *cursor) pass(n int) bool {
	if n > c.left() {
		return false
	}
	c.i += n
	return true
}
