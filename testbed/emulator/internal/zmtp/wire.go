package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// ErrProtocol is a peer that does not speak ZMTP 3 with the NULL mechanism, or
// breaks a limit.
var ErrProtocol = errors.New("zmtp protocol error")

// What a client may send is small: subscriptions and replay requests.
const (
	maxFrameBytes    = 64 << 10
	maxMessageFrames = 16
	maxMessageBytes  = 128 << 10
)

const (
	flagMore    = 1 << 0
	flagLong    = 1 << 1
	flagCommand = 1 << 2
)

const greetingLen = 64

// greeting is ours: version 3.1, mechanism NULL, not as a server, which NULL
// does not distinguish.
func greeting() []byte {
	g := make([]byte, greetingLen)
	g[0], g[8], g[9], g[10], g[11] = 0xff, 1, 0x7f, 3, 1
	copy(g[12:], "NULL")
	return g
}

func readGreeting(r io.Reader) error {
	var g [greetingLen]byte
	if _, err := io.ReadFull(r, g[:]); err != nil {
		return err
	}
	if g[0] != 0xff || g[9] != 0x7f {
		return fmt.Errorf("%w: the greeting has no signature", ErrProtocol)
	}
	if g[10] < 3 {
		return fmt.Errorf("%w: version %d.%d: want 3 or later", ErrProtocol, g[10], g[11])
	}
	if mechanism := bytes.TrimRight(g[12:32], "\x00"); string(mechanism) != "NULL" {
		return fmt.Errorf("%w: mechanism %q: want NULL", ErrProtocol, mechanism)
	}
	return nil
}

// frame is one frame as read.
type frame struct {
	more, command bool
	body          []byte
}

func readFrame(r io.Reader) (frame, error) {
	var head [9]byte
	if _, err := io.ReadFull(r, head[:2]); err != nil {
		return frame{}, err
	}
	flags := head[0]
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return frame{}, fmt.Errorf("%w: frame flags %#x", ErrProtocol, flags)
	}
	length := uint64(head[1])
	if flags&flagLong != 0 {
		if _, err := io.ReadFull(r, head[2:]); err != nil {
			return frame{}, err
		}
		length = binary.BigEndian.Uint64(head[1:])
	}
	if length > maxFrameBytes {
		return frame{}, fmt.Errorf("%w: a frame of %d bytes: the limit is %d", ErrProtocol, length, maxFrameBytes)
	}
	f := frame{more: flags&flagMore != 0, command: flags&flagCommand != 0, body: make([]byte, length)}
	if f.more && f.command {
		return frame{}, fmt.Errorf("%w: a command with more frames", ErrProtocol)
	}
	_, err := io.ReadFull(r, f.body)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return f, err
}

// message is one whole message, or a command.
type message struct {
	frames  [][]byte
	command bool
}

func readMessage(r io.Reader) (message, error) {
	var m message
	size := 0
	for {
		f, err := readFrame(r)
		if err != nil {
			return message{}, err
		}
		if f.command {
			if len(m.frames) > 0 {
				return message{}, fmt.Errorf("%w: a command within a message", ErrProtocol)
			}
			return message{frames: [][]byte{f.body}, command: true}, nil
		}
		m.frames = append(m.frames, f.body)
		size += len(f.body)
		if len(m.frames) > maxMessageFrames || size > maxMessageBytes {
			return message{}, fmt.Errorf("%w: a message of more than %d frames or %d bytes", ErrProtocol, maxMessageFrames, maxMessageBytes)
		}
		if !f.more {
			return m, nil
		}
	}
}

func appendFrame(dst []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		dst = append(dst, flags|flagLong)
		dst = binary.BigEndian.AppendUint64(dst, uint64(len(body)))
	} else {
		dst = append(dst, flags, byte(len(body)))
	}
	return append(dst, body...)
}

func appendMessage(dst []byte, frames ...[]byte) []byte {
	for i, f := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		dst = appendFrame(dst, flags, f)
	}
	return dst
}

func appendCommand(dst []byte, name string, body []byte) []byte {
	full := append([]byte{byte(len(name))}, name...)
	return appendFrame(dst, flagCommand, append(full, body...))
}

// splitCommand separates a command's name from its body.
func splitCommand(b []byte) (name string, body []byte, err error) {
	if len(b) == 0 || len(b) < 1+int(b[0]) {
		return "", nil, fmt.Errorf("%w: a command without a name", ErrProtocol)
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], nil
}

func appendProperty(dst []byte, name, value string) []byte {
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

// properties reads the metadata of READY. Names are lower-cased: they are case
// insensitive.
func properties(b []byte) (map[string]string, error) {
	p := make(map[string]string)
	for len(b) > 0 {
		n := int(b[0])
		if len(b) < 1+n+4 {
			return nil, fmt.Errorf("%w: metadata is cut", ErrProtocol)
		}
		name := string(bytes.ToLower(b[1 : 1+n]))
		b = b[1+n:]
		size := binary.BigEndian.Uint32(b)
		b = b[4:]
		if uint64(size) > uint64(len(b)) {
			return nil, fmt.Errorf("%w: metadata is cut", ErrProtocol)
		}
		p[name] = string(b[:size])
		b = b[size:]
	}
	return p, nil
}

// maxPingContext is the longest context that a PONG repeats.
const maxPingContext = 16

// pong answers a PING: it repeats the context after the 2 bytes of TTL.
func pong(ping []byte) ([]byte, error) {
	if len(ping) < 2 || len(ping) > 2+maxPingContext {
		return nil, fmt.Errorf("%w: a PING of %d bytes", ErrProtocol, len(ping))
	}
	return appendCommand(nil, "PONG", ping[2:]), nil
}
