package api

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
)

// liftTokens takes input.tokenIds out of the JSON body of a placement request,
// because a general JSON decoder needs a hundred times as long for a long
// prompt's ids. The ids come as an array of numbers or as base64 of
// little-endian u32. It returns the body without the ids and the ids; ids is
// nil if there are none. Only the first request object is looked into; what is
// not JSON is left for the general decoder to complain about.
func liftTokens(body []byte, pool *idPool) (rest []byte, ids []uint32, err error) {
	s := scanner{b: body}
	start, end, found := s.findTokens()
	if !found {
		return body, nil, nil
	}
	value := body[start:end]
	if value[0] == '"' {
		ids, err = tokensOfBase64(value[1:len(value)-1], pool)
	} else {
		ids, err = tokensOfArray(value, pool)
	}
	if err != nil {
		return nil, nil, err
	}
	rest = make([]byte, 0, len(body)-len(value)+4)
	rest = append(rest, body[:start]...)
	rest = append(rest, "null"...)
	return append(rest, body[end:]...), ids, nil
}

func tokensOfBase64(b []byte, pool *idPool) ([]uint32, error) {
	raw := make([]byte, base64.StdEncoding.DecodedLen(len(b)))
	n, err := base64.StdEncoding.Decode(raw, b)
	if err != nil {
		return nil, BadField("input.token_ids", "a string here is base64 of little-endian u32: "+err.Error())
	}
	return tokensOfLE("input.token_ids", raw[:n], pool)
}

// tokensOfLE unpacks little-endian u32 token ids.
func tokensOfLE(field string, raw []byte, pool *idPool) ([]uint32, error) {
	if len(raw)%4 != 0 {
		return nil, BadField(field, fmt.Sprintf("%d bytes are not a whole number of 4-byte token ids", len(raw)))
	}
	ids := pool.get(len(raw) / 4)
	for i := range ids {
		ids[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return ids, nil
}

func tokensOfArray(b []byte, pool *idPool) ([]uint32, error) {
	ids := pool.get(bytes.Count(b, []byte{','}) + 1)[:0]
	i := 1
	for {
		if id, next, ok := plainID(b, i); ok {
			ids, i = append(ids, id), next
			continue
		}
		i = skipSpace(b, i)
		if i < len(b) && b[i] == ']' {
			return ids, nil
		}
		start := i
		for i < len(b) && b[i] != ',' && b[i] != ']' && !isSpace(b[i]) {
			i++
		}
		id, err := tokenID(b[start:i])
		if err != nil {
			return nil, BadField(fmt.Sprintf("input.token_ids[%d]", len(ids)), err.Error())
		}
		ids = append(ids, id)
		i = skipSpace(b, i)
		switch {
		case i < len(b) && b[i] == ',':
			i++
		case i < len(b) && b[i] == ']':
		default:
			return nil, BadField(fmt.Sprintf("input.token_ids[%d]", len(ids)), "a comma or ] must follow a token id")
		}
	}
}

// plainID reads a token id of at most nine digits that a comma follows at once,
// as nearly all do, and returns where the next one begins.
func plainID(b []byte, i int) (id uint32, next int, ok bool) {
	end := min(len(b), i+10)
	for at := i; at < end; at++ {
		digit := b[at] - '0'
		if digit > 9 {
			return id, at + 1, b[at] == ',' && at > i
		}
		id = id*10 + uint32(digit)
	}
	return 0, 0, false
}

var errNotID = errors.New("is not a token id")

func tokenID(b []byte) (uint32, error) {
	if len(b) == 0 {
		return 0, fmt.Errorf("nothing %w (0 to %d)", errNotID, uint32(math.MaxUint32))
	}
	var v uint64
	for _, c := range b {
		if c < '0' || c > '9' || v > math.MaxUint32 {
			return 0, fmt.Errorf("%.40s %w (0 to %s)", b, errNotID, strconv.FormatUint(math.MaxUint32, 10))
		}
		v = v*10 + uint64(c-'0')
	}
	if v > math.MaxUint32 {
		return 0, fmt.Errorf("%.40s %w (0 to %s)", b, errNotID, strconv.FormatUint(math.MaxUint32, 10))
	}
	return uint32(v), nil
}

// scanner walks JSON just far enough to find one value by its place.
type scanner struct {
	b []byte
	i int
}

// findTokens returns where the value of input.tokenIds (or its proto name)
// begins and ends, if it is an array of plain values or a string.
func (s *scanner) findTokens() (start, end int, ok bool) {
	depth, inInput := 0, -1
	for s.i < len(s.b) {
		switch c := s.b[s.i]; {
		case c == '{' || c == '[':
			depth++
			s.i++
		case c == '}' || c == ']':
			depth--
			if depth < inInput {
				inInput = -1
			}
			s.i++
		case c == '"':
			str, good := s.str()
			if !good {
				return 0, 0, false
			}
			j := skipSpace(s.b, s.i)
			if j >= len(s.b) || s.b[j] != ':' {
				continue // a value, not a key
			}
			s.i = skipSpace(s.b, j+1)
			switch {
			case depth == 1 && string(str) == "input":
				inInput = 2
			case depth == 2 && inInput == 2 && (string(str) == "tokenIds" || string(str) == "token_ids"):
				return s.value()
			case depth == 1:
				inInput = -1
			}
		default:
			s.i++
		}
	}
	return 0, 0, false
}

// str reads the string that begins here and returns its bytes without quotes,
// escapes as they stand.
func (s *scanner) str() ([]byte, bool) {
	start := s.i + 1
	for j := start; j < len(s.b); j++ {
		switch s.b[j] {
		case '\\':
			j++
		case '"':
			s.i = j + 1
			return s.b[start:j], true
		}
	}
	return nil, false
}

func (s *scanner) value() (start, end int, ok bool) {
	start = s.i
	if start >= len(s.b) {
		return 0, 0, false
	}
	if s.b[start] == '"' {
		_, ok = s.str()
		return start, s.i, ok
	}
	if s.b[start] != '[' {
		return 0, 0, false
	}
	end = bytes.IndexByte(s.b[start:], ']')
	return start, start + end + 1, end >= 0
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

func skipSpace(b []byte, i int) int {
	for i < len(b) && isSpace(b[i]) {
		i++
	}
	return i
}
