package zmtp

import (
	"encoding/binary"
	"fmt"
	"slices"
)

const (
	// bufferBytes is the size of the one read buffer of a connection.
	bufferBytes = 64 << 10
	// directBytes is the rest of a frame from which bytes are read straight
	// into the message: below, one read that takes the next frames along is
	// cheaper than the copy it saves.
	directBytes = bufferBytes / 2
	// A message buffer above keepBytes is given back after shrinkAfter
	// messages in a row that used less than a quarter of it.
	keepBytes   = 1 << 20
	shrinkAfter = 1024
)

type event uint8

const (
	needMore event = iota
	gotMessage
	gotCommand
)

// decoder turns the bytes of one connection into messages and commands. It
// does no I/O and can stop anywhere: space says where the next bytes go,
// filled that they are there, next what they complete. Memory follows the
// bytes that arrived, not the lengths they announce.
type decoder struct {
	maxFrame, maxMessage, maxParts int

	buf  []byte
	r, w int // unread bytes are buf[r:w]

	handshaking bool // only commands may come
	direct      bool // the last space was in body

	inFrame bool
	flags   byte
	left    int // body bytes of the frame still to come

	whole bool   // parts is a finished message
	body  []byte // bodies of the message's frames so far
	ends  []int  // where each finished frame ends in body
	parts [][]byte
	cmd   []byte

	smallRun int // messages in a row that used little of a large body
}

func newDecoder(o *Options) decoder {
	return decoder{
		maxFrame:    o.MaxFrameBytes,
		maxMessage:  o.MaxMessageBytes,
		maxParts:    o.MaxParts,
		buf:         make([]byte, bufferBytes),
		handshaking: true,
	}
}

// space returns where to read the next bytes; it is never empty after next
// returned needMore.
func (d *decoder) space() []byte {
	d.direct = d.inFrame && d.flags&flagCommand == 0 && d.left >= directBytes && d.r == d.w
	if d.direct {
		// Double what arrived, so that a peer has to send half of what it
		// makes us allocate.
		d.body = slices.Grow(d.body, min(d.left, max(len(d.body), bufferBytes)))
		return d.body[len(d.body):min(cap(d.body), len(d.body)+d.left)]
	}
	if d.r == d.w {
		d.r, d.w = 0, 0
	} else if len(d.buf)-d.w < longHeaderBytes {
		d.w = copy(d.buf, d.buf[d.r:d.w])
		d.r = 0
	}
	return d.buf[d.w:]
}

// filled takes over n bytes read into the last space.
func (d *decoder) filled(n int) {
	if d.direct {
		d.body = d.body[:len(d.body)+n]
		d.left -= n
		return
	}
	d.w += n
}

// greeting takes the peer's greeting; false means that bytes are missing.
func (d *decoder) greeting() (bool, error) {
	b := d.buf[d.r:min(d.w, d.r+greetingBytes)]
	if err := checkGreeting(b); err != nil {
		return false, err
	}
	if len(b) < greetingBytes {
		return false, nil
	}
	d.r += greetingBytes
	return true, nil
}

// next returns what the buffered bytes complete. After gotMessage d.parts is
// the message and after gotCommand d.cmd the command, until the next call.
func (d *decoder) next() (event, error) {
	if d.whole {
		d.forget()
	}
	for {
		if !d.inFrame {
			ok, err := d.header()
			if err != nil || !ok {
				return needMore, err
			}
		}
		n := min(d.w-d.r, d.left)
		chunk := d.buf[d.r : d.r+n]
		d.r += n
		d.left -= n
		command := d.flags&flagCommand != 0
		if command {
			d.cmd = append(d.cmd, chunk...)
		} else {
			d.body = append(d.body, chunk...)
		}
		if d.left > 0 {
			return needMore, nil
		}
		d.inFrame = false
		if command {
			return gotCommand, nil
		}
		d.ends = append(d.ends, len(d.body))
		if d.flags&flagMore == 0 {
			d.finish()
			return gotMessage, nil
		}
	}
}

// header takes a frame header; false means that bytes are missing.
func (d *decoder) header() (bool, error) {
	b := d.buf[d.r:d.w]
	if len(b) == 0 {
		return false, nil
	}
	flags := b[0]
	if err := d.checkFlags(flags); err != nil {
		return false, err
	}
	var length uint64
	switch {
	case flags&flagLong == 0:
		if len(b) < shortHeaderBytes {
			return false, nil
		}
		length = uint64(b[1])
		d.r += shortHeaderBytes
	case len(b) < longHeaderBytes:
		return false, nil
	default:
		length = binary.BigEndian.Uint64(b[1:])
		d.r += longHeaderBytes
	}
	if err := d.checkLength(flags, length); err != nil {
		return false, err
	}
	if flags&flagCommand != 0 {
		d.cmd = d.cmd[:0]
	}
	d.inFrame, d.flags, d.left = true, flags, int(length)
	return true, nil
}

func (d *decoder) checkFlags(flags byte) error {
	if flags&^flagsKnown != 0 {
		return fmt.Errorf("%w: frame with reserved flags %#02x", ErrProtocol, flags)
	}
	if flags&flagCommand != 0 {
		if flags&flagMore != 0 {
			return fmt.Errorf("%w: command frame with the MORE flag", ErrProtocol)
		}
		return nil
	}
	if d.handshaking {
		return fmt.Errorf("%w: message before READY", ErrProtocol)
	}
	return nil
}

func (d *decoder) checkLength(flags byte, length uint64) error {
	if flags&flagCommand != 0 {
		if length > maxCommandBytes {
			return fmt.Errorf("%w: command of %d bytes, at most %d", ErrLimit, length, maxCommandBytes)
		}
		return nil
	}
	if length > uint64(d.maxFrame) {
		return fmt.Errorf("%w: frame of %d bytes, at most %d (MaxFrameBytes)", ErrLimit, length, d.maxFrame)
	}
	// body is within maxMessage, so the difference cannot be negative.
	if length > uint64(d.maxMessage-len(d.body)) {
		return fmt.Errorf("%w: message of more than %d bytes (MaxMessageBytes)", ErrLimit, d.maxMessage)
	}
	if len(d.ends) >= d.maxParts {
		return fmt.Errorf("%w: message of more than %d frames (MaxParts)", ErrLimit, d.maxParts)
	}
	return nil
}

// finish cuts body into parts; not before, because body moves as it grows.
func (d *decoder) finish() {
	d.whole = true
	d.parts = d.parts[:0]
	start := 0
	for _, end := range d.ends {
		d.parts = append(d.parts, d.body[start:end:end])
		start = end
	}
}

// forget makes room for the next message.
func (d *decoder) forget() {
	d.whole = false
	if cap(d.body) > keepBytes && len(d.body) < cap(d.body)/4 {
		if d.smallRun++; d.smallRun >= shrinkAfter {
			d.body, d.smallRun = nil, 0
			clear(d.parts[:cap(d.parts)])
		}
	} else {
		d.smallRun = 0
	}
	d.body = d.body[:0]
	d.ends = d.ends[:0]
}

// inMessage says whether a frame or message has begun and not ended.
func (d *decoder) inMessage() bool {
	return d.inFrame || !d.whole && len(d.ends) > 0 || d.r < d.w
}
