package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// feed gives the decoder b in chunks and collects messages and commands as
// text, up to the first error.
func feed(d *decoder, b []byte, chunk func() int) (got []string, err error) {
	for {
		ev, err := d.next()
		switch {
		case err != nil:
			return got, err
		case ev == gotMessage:
			got = append(got, fmt.Sprintf("%q", d.parts))
		case ev == gotCommand:
			got = append(got, fmt.Sprintf("command %q", d.cmd))
		case len(b) == 0:
			return got, nil
		default:
			n := copy(d.space(), b[:min(len(b), chunk())])
			if n == 0 {
				return got, errors.New("the decoder has no space")
			}
			d.filled(n)
			b = b[n:]
		}
	}
}

func testDecoder(frame, message, parts int) *decoder {
	d := newDecoder(&Options{MaxFrameBytes: frame, MaxMessageBytes: message, MaxParts: parts})
	d.handshaking = false
	return &d
}

func longHeader(flags byte, length uint64) string {
	return string(binary.BigEndian.AppendUint64([]byte{flags | 2}, length))
}

func TestDecoder(t *testing.T) {
	long := strings.Repeat("x", 300)
	for _, tc := range []struct {
		name  string
		in    string
		want  []string
		err   error
		about string // in the error
	}{
		{name: "one frame", in: "\x00\x02hi", want: []string{`["hi"]`}},
		{name: "empty message", in: "\x00\x00", want: []string{`[""]`}},
		{name: "three parts", in: "\x01\x01a\x01\x00\x00\x01c", want: []string{`["a" "" "c"]`}},
		{name: "two messages", in: "\x00\x01a\x00\x01b", want: []string{`["a"]`, `["b"]`}},
		{name: "long frame", in: longHeader(0, 300) + long, want: []string{`["` + long + `"]`}},
		{name: "short body in long form", in: longHeader(0, 1) + "a", want: []string{`["a"]`}},
		{name: "empty body in long form", in: longHeader(1, 0) + "\x00\x01b", want: []string{`["" "b"]`}},
		{name: "command inside a message", in: "\x01\x01a\x04\x05\x04PING\x00\x01b", want: []string{`command "\x04PING"`, `["a" "b"]`}},
		{name: "long command", in: longHeader(4, 5) + "\x04PING", want: []string{`command "\x04PING"`}},
		{name: "frame at the limit", in: longHeader(0, 1000) + strings.Repeat("x", 1000), want: []string{`["` + strings.Repeat("x", 1000) + `"]`}},

		{name: "half a header", in: "\x02\x00\x00"},
		{name: "half a body", in: "\x00\x05ab"},
		{name: "first part only", in: "\x01\x01a"},

		{name: "frame of 2^62", in: longHeader(0, 1<<62), err: ErrLimit, about: "frame of 4611686018427387904 bytes, at most 1000 (MaxFrameBytes)"},
		{name: "frame of 2^64-1", in: longHeader(1, 1<<64-1), err: ErrLimit, about: "MaxFrameBytes"},
		{name: "frame over the limit", in: longHeader(0, 1001), err: ErrLimit, about: "frame of 1001 bytes"},
		{name: "message over the limit", in: longHeader(1, 900) + strings.Repeat("x", 900) + longHeader(0, 601), err: ErrLimit, about: "more than 1500 bytes (MaxMessageBytes)"},
		{name: "too many parts", in: strings.Repeat("\x01\x00", 4) + "\x00\x00", err: ErrLimit, about: "more than 4 frames (MaxParts)"},
		{name: "command over the limit", in: longHeader(4, maxCommandBytes+1), err: ErrLimit, about: "command of 8193 bytes"},
		{name: "command of 2^63", in: longHeader(4, 1<<63), err: ErrLimit, about: "command"},
		{name: "reserved flag", in: "\x08\x00", err: ErrProtocol, about: "reserved flags 0x08"},
		{name: "command with more", in: "\x05\x00", err: ErrProtocol, about: "MORE"},
		{name: "messages up to the damage", in: "\x00\x01a\x80\x01b", want: []string{`["a"]`}, err: ErrProtocol},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, chunk := range []int{1, 2, 7, 1 << 20} {
				got, err := feed(testDecoder(1000, 1500, 4), []byte(tc.in), func() int { return chunk })
				if !equal(got, tc.want) {
					t.Errorf("chunks of %d: got %q, want %q", chunk, got, tc.want)
				}
				if !errors.Is(err, tc.err) || err != nil && !strings.Contains(err.Error(), tc.about) {
					t.Errorf("chunks of %d: error %v, want %v about %q", chunk, err, tc.err, tc.about)
				}
			}
		})
	}
}

// A header cut by the end of the read buffer makes room for itself, wherever
// it is cut.
func TestDecoderHeaderAtTheEndOfTheBuffer(t *testing.T) {
	message := peerMessage(strings.Repeat("x", 256)) // 9 + 256 bytes
	const fits = bufferBytes/265 + 2
	for offset := range len(message) {
		wire := append(peerMessage(strings.Repeat("y", offset)), bytes.Repeat(message, fits)...)
		got, err := feed(testDecoder(1000, 1000, 4), wire, func() int { return 1 << 20 })
		if err != nil || len(got) != fits+1 {
			t.Fatalf("shifted by %d: %d messages, %v; want %d", offset, len(got), err, fits+1)
		}
	}
}

func TestDecoderRefusesMessagesInHandshake(t *testing.T) {
	d := testDecoder(1000, 1000, 4)
	d.handshaking = true
	_, err := feed(d, []byte("\x00\x01a"), func() int { return 100 })
	wantErr(t, err, ErrProtocol)
}

// Whatever the messages and however TCP cuts them, they come out whole and in
// order, and what came out first is not overwritten by what is read next.
func TestDecoderProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.OneOf(rapid.IntRange(0, 300), rapid.IntRange(directBytes-10, 3*bufferBytes))
		var wire []byte
		var want []string
		for range rapid.IntRange(1, 8).Draw(t, "messages") {
			var frames []string
			for range rapid.IntRange(1, 4).Draw(t, "parts") {
				fill := string(rune('a' + rapid.IntRange(0, 25).Draw(t, "fill")))
				frames = append(frames, strings.Repeat(fill, size.Draw(t, "size")))
			}
			wire = append(wire, peerMessage(frames...)...)
			want = append(want, fmt.Sprintf("%q", frames))
			if rapid.Bool().Draw(t, "command") {
				wire = append(wire, peerCommand("PING", "\x00\x00")...)
				want = append(want, fmt.Sprintf("command %q", "\x04PING\x00\x00"))
			}
		}
		cut := rapid.OneOf(rapid.IntRange(1, 12), rapid.IntRange(1, 2*bufferBytes))
		got, err := feed(testDecoder(1<<20, 1<<20, 4), wire, func() int { return cut.Draw(t, "chunk") })
		if err != nil || !equal(got, want) {
			t.Fatalf("got %d messages, %v; want %d", len(got), err, len(want))
		}
	})
}

// A peer that announces much and sends little gets little memory.
func TestDecoderMemoryFollowsBytes(t *testing.T) {
	for _, sent := range []int{0, 1, 100, bufferBytes, 1 << 20} {
		d := testDecoder(1<<40, 1<<40, 4)
		wire := append([]byte(longHeader(0, 1<<40)), make([]byte, sent)...)
		if _, err := feed(d, wire, func() int { return 1 << 20 }); err != nil {
			t.Fatal(err)
		}
		d.space()
		if got, limit := cap(d.body), 3*sent+2*bufferBytes; got > limit {
			t.Errorf("after %d bytes the message holds %d, want at most %d", sent, got, limit)
		}
	}
}

// One huge message must not pin its memory for as long as small ones follow,
// and frequent large ones must not allocate each time.
func TestDecoderGivesMemoryBack(t *testing.T) {
	d := testDecoder(1<<30, 1<<30, 4)
	whole := func() int { return bufferBytes }
	large := peerMessage(strings.Repeat("x", 8<<20))
	if _, err := feed(d, large, whole); err != nil {
		t.Fatal(err)
	}
	if cap(d.body) < 8<<20 {
		t.Fatalf("body holds %d", cap(d.body))
	}
	small := peerMessage("kv", "12345678", "payload")
	if _, err := feed(d, bytes.Repeat(small, shrinkAfter-1), whole); err != nil {
		t.Fatal(err)
	}
	if cap(d.body) < 8<<20 {
		t.Errorf("body was given back after %d small messages", shrinkAfter-1)
	}
	if _, err := feed(d, bytes.Repeat(small, 2), whole); err != nil {
		t.Fatal(err)
	}
	if cap(d.body) > keepBytes {
		t.Errorf("body still holds %d bytes after %d small messages", cap(d.body), shrinkAfter+1)
	}
}

func TestPartsDoNotOverlap(t *testing.T) {
	d := testDecoder(1000, 1000, 4)
	if _, err := feed(d, peerMessage("ab", "cd"), func() int { return 100 }); err != nil {
		t.Fatal(err)
	}
	_ = append(d.parts[0], 'X')
	if string(d.parts[1]) != "cd" {
		t.Errorf("appending to one part changed the next to %q", d.parts[1])
	}
}
