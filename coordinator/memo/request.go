package memo

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/dchest/siphash"

	"waypost/gossip/prefix"
)

const (
	// longMessage is the size above which a message is cut into pieces, in bytes
	// of its canonical form; piece is the size of one.
	longMessage = 2048
	piece       = 1024
	// startBytes is how much of a message's beginning is told from others'.
	startBytes = 8
	// maxUnits bounds the units of one request; what lies behind is not keyed.
	maxUnits = 4096
)

// Key keys the hashes of the memo. It never leaves the process.
type Key struct{ k0, k1 uint64 }

// KeyOf derives the memo's key from the cluster's, so that all coordinators
// name the same text alike.
func KeyOf(k prefix.ClusterKey) Key {
	c0, c1 := binary.LittleEndian.Uint64(k[:8]), binary.LittleEndian.Uint64(k[8:])
	return Key{siphash.Hash(c0, c1, []byte("waypost text memo 0")), siphash.Hash(c0, c1, []byte("waypost text memo 1"))}
}

// String discloses nothing.
func (Key) String() string { return "memo-key" }

// GoString is String.
func (Key) GoString() string { return "memo-key" }

// neutral are the fields of a request that leave its prompt alone, but for
// messages and prompt, which are read by themselves; those that a placement sets in
// the body are among them. A field too many in the head
// costs a miss, one too few a wrong prediction: what is not listed counts.
var neutral = map[string]bool{
	"stream": true, "stream_options": true, "temperature": true, "top_p": true, "top_k": true, "min_p": true, "typical_p": true,
	"max_tokens": true, "max_completion_tokens": true, "min_tokens": true, "n": true, "best_of": true, "stop": true, "stop_token_ids": true, "seed": true,
	"user": true, "metadata": true, "priority": true, "logprobs": true, "top_logprobs": true, "prompt_logprobs": true, "logit_bias": true,
	"frequency_penalty": true, "presence_penalty": true, "repetition_penalty": true, "length_penalty": true, "ignore_eos": true, "include_stop_str_in_output": true,
	"skip_special_tokens": true, "spaces_between_special_tokens": true, "service_tier": true, "store": true, "safety_identifier": true,
	"prompt_cache_key": true, "request_id": true, "session_id": true, "id_slot": true, "cache_salt": true, "kv_transfer_params": true, "return_token_ids": true, "return_tokens_as_token_ids": true,
}

// ofTools are the fields that come and go with tools.
var ofTools = map[string]bool{"tools": true, "tool_choice": true, "parallel_tool_calls": true}

// role is who speaks, as far as it matters for rendering.
type role uint8

const (
	roleNone role = iota
	roleSystem
	roleUser
	roleAssistant
	roleOther
	roles
)

// unit is a prefix of a request's text.
type unit struct {
	hash uint64
	// tokens bounds what this unit alone adds, behind what comes after it.
	tokens, behind float64
	// end is where it ends, in bytes of the texts.
	end int
	// start names the first bytes of the message that begins here; 0: they say
	// nothing of what a template writes first.
	start uint16
	role  role
	// inner says that it ends inside a message, opaque that it or one before
	// holds something else than text, reasoning that the running turn has some up
	// to here, steps that it has an answer before it, closed that a user message
	// follows, nowhere that no place in the prompt belongs to it.
	inner, opaque, reasoning, steps, closed, nowhere bool
}

// Request is a prompt as the memo sees it: hashes and bounds, no text.
type Request struct {
	// plain is the end of the leading system messages whatever the tools, nextHash
	// what follows it, plainAt the unit that ends there too; 0: there is none.
	// someTools is the same for requests with tools, whatever they are. toolsMark
	// tells tools from others, as a rule; 0: there are none.
	plain, someTools unit
	nextHash         uint64
	plainAt          int
	toolsMark        uint8
	toolBytes        int
	units            []unit
	key              Key
	epoch            uint32
	tools            bool
	chat             bool
	textBytes        int
	headBytes        int // of tools and documents
	toolBound        float64
	rest             float64 // bound of what has no unit any more
	// shown counts the words of messages that templates show as they are; cut says
	// that the request wants its prompt shortened.
	shown int
	cut   bool
}

// TextBytes is the size of all that a prompt shows of a request in canonical form,
// in bytes: messages, tools and documents.
func (r *Request) TextBytes() int { return r.textBytes + r.headBytes }

// Opaque says that the prompt holds something else than text: behind that,
// nothing is known of it.
func (r *Request) Opaque() bool { return r.units[len(r.units)-1].opaque }

// Conversation names what the requests of one conversation have in common: head
// and first user message. Front doors keep those on one coordinator.
func (r *Request) Conversation() uint64 {
	for i := range r.units {
		if u := &r.units[i]; u.role == roleUser && !u.inner {
			return u.hash
		}
	}
	return r.units[len(r.units)-1].hash
}

// Reader reads requests and keeps its memory. It is not safe for concurrent use.
type Reader struct {
	buf, top []byte // canonical messages, and scratch
	fields   []field
	messages []message
	spans    []span
}

type field struct{ name, value string }

// span is a range of bytes in a Reader's buffer.
type span struct{ from, to int }

// message is one message in canonical form.
type message struct {
	span
	texts             span // of spans: what counts as text
	role              role
	opaque, reasoning bool
}

// Chat reads the JSON body of a chat request. Errors wrap [ErrBody] and quote no
// text.
func (rd *Reader) Chat(key Key, pool string, epoch uint32, body []byte) (*Request, error) {
	if err := rd.split(body, "messages"); err != nil {
		return nil, err
	}
	if len(rd.messages) == 0 {
		return nil, fmt.Errorf("%w: messages is missing or empty", ErrBody)
	}
	r := &Request{key: key, epoch: epoch, chat: true}
	rd.head(r, 'R', pool)
	leading := 0
	for leading < len(rd.messages) && rd.messages[leading].role == roleSystem {
		leading++
	}
	for _, m := range rd.messages[leading:] {
		if m.role == roleSystem {
			// Some templates pull it to the front.
			r.units[0].hash = key.step(r.units[0].hash, 'l', rd.buf[m.from:m.to])
			r.plain.hash = key.step(r.plain.hash, 'l', rd.buf[m.from:m.to])
		}
	}
	r.units[0].nowhere = leading > 0
	for i := range rd.messages {
		rd.append(r, &rd.messages[i])
		if i == leading-1 {
			r.plainAt = len(r.units) - 1
		}
	}
	r.finish(leading)
	rd.withoutTools(r, leading)
	return r, nil
}

// Completion reads a completion request: its prompt, and the JSON body, whose
// prompt is left aside, for the head; nil: there is nothing else.
func (rd *Reader) Completion(key Key, pool string, epoch uint32, body []byte, prompt string) (*Request, error) {
	if prompt == "" {
		return nil, fmt.Errorf("%w: the prompt is empty", ErrBody)
	}
	if body == nil {
		body = []byte("{}")
	}
	if err := rd.split(body, "prompt"); err != nil {
		return nil, err
	}
	r := &Request{key: key, epoch: epoch}
	rd.head(r, 'P', pool)
	r.units[0].nowhere = true
	rd.buf = AppendText(rd.buf[:0], prompt)
	inside := span{1, len(rd.buf) - 1}
	rd.spans = append(rd.spans[:0], inside)
	rd.append(r, &message{span: inside, texts: span{0, 1}})
	r.finish(0)
	return r, nil
}

// split reads messages and the fields of the head out of a body.
func (rd *Reader) split(body []byte, list string) error {
	rd.fields, rd.messages, rd.spans, rd.buf = rd.fields[:0], rd.messages[:0], rd.spans[:0], rd.buf[:0]
	s := scanner{b: body}
	err := s.members(func(key []byte) (err error) {
		name := string(key[1 : len(key)-1])
		switch {
		case name == list && list == "messages":
			rd.messages, rd.spans, rd.buf = rd.messages[:0], rd.spans[:0], rd.buf[:0]
			return s.elements(func() error {
				if err := rd.message(&s); err != nil {
					return fmt.Errorf("messages[%d]: %w", len(rd.messages), err)
				}
				return nil
			})
		case name == list || neutral[name]:
			rd.top, err = s.value(rd.top[:0])
			return err
		}
		if rd.top, err = s.value(rd.top[:0]); err == nil {
			rd.fields = slices.DeleteFunc(rd.fields, func(f field) bool { return f.name == name })
			if string(rd.top) != "null" {
				rd.fields = append(rd.fields, field{name, string(rd.top)})
			}
		}
		return err
	})
	if err == nil && s.next() != 0 {
		err = s.fail("something follows the body")
	}
	return err
}

// message reads one message.
func (rd *Reader) message(s *scanner) error {
	m := message{span: span{from: len(rd.buf)}, texts: span{from: len(rd.spans)}, role: roleOther}
	rd.buf = append(rd.buf, '{')
	err := s.members(func(key []byte) (err error) {
		before := len(rd.buf)
		if before > m.from+1 {
			rd.buf = append(rd.buf, ',')
		}
		rd.buf = append(append(rd.buf, key...), ':')
		from := len(rd.buf)
		if rd.buf, err = s.value(rd.buf); err != nil {
			return err
		}
		value := rd.buf[from:]
		if string(value) == "null" {
			rd.buf = rd.buf[:before]
			return nil
		}
		name := string(key[1 : len(key)-1])
		text := span{from, len(rd.buf)}
		if value[0] == '"' {
			text = span{from + 1, len(rd.buf) - 1}
		}
		switch name {
		case "role":
			m.role = roleOf(value)
			return nil
		case "content":
			m.opaque = m.opaque || holdsOther(value)
			m.reasoning = m.reasoning || bytes.Contains(value, []byte("<think>"))
		case "reasoning", "reasoning_content":
			m.reasoning = m.reasoning || text.to > text.from
		}
		rd.spans = append(rd.spans, text)
		return nil
	})
	if err != nil {
		return err
	}
	rd.buf = append(rd.buf, '}')
	m.to, m.texts.to = len(rd.buf), len(rd.spans)
	rd.messages = append(rd.messages, m)
	return nil
}

func roleOf(value []byte) role {
	switch string(value) {
	case `"system"`, `"developer"`:
		return roleSystem
	case `"user"`:
		return roleUser
	case `"assistant"`:
		return roleAssistant
	}
	return roleOther
}

// holdsOther says that a content has parts that are not text.
func holdsOther(canonical []byte) (other bool) {
	if canonical[0] != '[' {
		return false
	}
	s := scanner{b: canonical}
	// It was read before: no error can come of it.
	_ = s.elements(func() (err error) {
		if s.next() != '{' {
			_, err = s.value(nil)
			return err
		}
		return s.members(func(key []byte) error {
			value, err := s.value(nil)
			if string(key) == `"type"` {
				switch string(value) {
				case `"text"`, `"input_text"`, `"output_text"`, `"refusal"`, `"thinking"`:
				default:
					other = true
				}
			}
			return err
		})
	})
	return other
}

// head hashes what can change the first tokens.
func (rd *Reader) head(r *Request, tag byte, pool string) {
	slices.SortFunc(rd.fields, func(a, b field) int { return strings.Compare(a.name, b.name) })
	b := append(append(rd.top[:0], tag), pool...)
	b = append(strconv.AppendUint(append(b, '/'), uint64(r.epoch), 10), 0, '{')
	var bd bound
	for i, f := range rd.fields {
		r.cut = r.cut || f.name == "truncate_prompt_tokens"
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(append(append(b, '"'), f.name...), `":`...), f.value...)
		if f.name == "tools" || f.name == "documents" {
			r.tools = r.tools || f.value != "[]"
			r.headBytes += len(f.value)
			bd.add([]byte(f.value))
		}
	}
	rd.top = append(b, '}')
	r.toolBound = bd.total()
	r.units = append(r.units, unit{hash: siphash.Hash(r.key.k0, r.key.k1, rd.top)})
	b = append(append(rd.top[:0], tag, 't'), pool...)
	b = append(strconv.AppendUint(append(b, '/'), uint64(r.epoch), 10), 0)
	for _, f := range rd.fields {
		if ofTools[f.name] {
			r.toolBytes += len(f.value)
			continue
		}
		b = append(append(append(append(b, '"'), f.name...), `":`...), f.value...)
	}
	rd.top = b
	r.plain.hash = siphash.Hash(r.key.k0, r.key.k1, b)
}

// withoutTools hashes the leading system messages on top of a head without
// tools.
func (rd *Reader) withoutTools(r *Request, leading int) {
	at := r.plainAt
	if at == 0 || r.units[at].opaque || at+1 >= len(r.units) {
		r.plainAt = 0
		return
	}
	if r.tools {
		r.toolsMark = uint8(max(r.units[0].hash>>56, 1))
	}
	hash := r.plain.hash
	over := func(from, to int) {
		for ; to-from > piece; from += piece {
			hash = r.key.step(hash, 'c', rd.buf[from:from+piece])
		}
		hash = r.key.step(hash, 'm', rd.buf[from:to])
	}
	for i := range leading {
		over(rd.messages[i].from, rd.messages[i].to)
	}
	r.plain, r.someTools = r.units[at], r.units[at]
	r.plain.hash = hash
	r.someTools.hash = r.key.step(hash, 't', nil)
	next := &rd.messages[leading]
	over(next.from, min(next.to, next.from+longMessage))
	r.nextHash = hash
}

// step hashes the next unit on top of one.
func (k Key) step(parent uint64, tag byte, b []byte) uint64 {
	var stack [longMessage + 16]byte
	msg := append(binary.LittleEndian.AppendUint64(stack[:0], parent), tag)
	return siphash.Hash(k.k0, k.k1, append(msg, b...))
}

// append adds the units of one message.
func (rd *Reader) append(r *Request, m *message) {
	r.textBytes += m.to - m.from
	spans := rd.spans[m.texts.from:m.texts.to]
	extra := 0.
	if r.chat {
		extra = messageTokens
	}
	// Thoughts and calls are cut out at times, system messages and results dropped.
	shown := (m.role == roleUser || m.role == roleAssistant) && len(spans) == 1 && spans[0].from > m.from && rd.buf[spans[0].from-1] == '"' && !m.reasoning
	tokens := func(from, to int) (n float64) {
		var b bound
		for _, s := range spans {
			if s.from < to && s.to > from {
				b.add(rd.buf[max(s.from, from):min(s.to, to)])
				b.word()
			}
		}
		n, extra = b.total()+extra, 0
		if shown {
			r.shown += b.words
		}
		return n
	}
	from, start := m.from, rd.start(r.key, m, spans)
	if m.to-from > longMessage {
		for m.to-from > piece && len(r.units) < maxUnits {
			r.add('c', rd.buf[from:from+piece], unit{tokens: tokens(from, from+piece), role: m.role, opaque: m.opaque, inner: true, start: start})
			from, start = from+piece, 0
		}
	}
	if len(r.units) >= maxUnits {
		r.rest += tokens(from, m.to)
		return
	}
	r.add('m', rd.buf[from:m.to], unit{tokens: tokens(from, m.to), role: m.role, opaque: m.opaque, reasoning: m.reasoning, start: start})
}

// start names the first bytes of a message that has nothing but a text, white
// space aside, which templates cut.
func (rd *Reader) start(key Key, m *message, texts []span) uint16 {
	if len(texts) != 1 || m.opaque {
		return 0
	}
	b := rd.buf[texts[0].from:texts[0].to]
	if texts[0].from == m.from || rd.buf[texts[0].from-1] != '"' {
		return 0 // a list of parts
	}
	for {
		switch {
		case len(b) > 0 && b[0] == ' ':
			b = b[1:]
		case len(b) > 1 && b[0] == '\\' && bytes.IndexByte([]byte("nrtfb"), b[1]) >= 0:
			b = b[2:]
		case len(b) > 0 && (b[0] >= 0x80 || b[0] == '<') || bytes.HasPrefix(b, []byte(`\u`)):
			return 0 // white space as well, or thoughts, which are cut out
		default:
			h := siphash.Hash(key.k0, key.k1, b[:min(startBytes, len(b))])
			return uint16(max(h>>48, 1))
		}
	}
}

func (r *Request) add(tag byte, b []byte, u unit) {
	u.hash, u.end = r.key.step(r.units[len(r.units)-1].hash, tag, b), r.units[len(r.units)-1].end+len(b)
	r.units = append(r.units, u)
}

// finish computes what depends on other units. Tools may be rendered behind the
// leading system messages: for a unit among these they come after it.
func (r *Request) finish(leading int) {
	behind, closed := r.rest, false
	for i := len(r.units) - 1; i >= 0; i-- {
		u := &r.units[i]
		u.behind, u.closed = behind, closed
		behind += u.tokens
		// A piece of the last user message is as open as its end.
		closed = closed || u.role == roleUser && (i == 0 || r.units[i-1].role != roleUser || !r.units[i-1].inner)
	}
	opaque, reasoning, steps, seen := false, false, false, 0
	for i := range r.units {
		u := &r.units[i]
		opaque = opaque || u.opaque
		if u.role == roleUser {
			reasoning, steps = false, false
		}
		reasoning = reasoning || u.reasoning
		u.opaque, u.reasoning, u.steps = opaque, reasoning, steps
		steps = steps || u.role == roleAssistant && !u.inner
		if seen < leading || i == 0 {
			u.behind += r.toolBound
		}
		if i > 0 && !u.inner {
			seen++
		}
	}
}
