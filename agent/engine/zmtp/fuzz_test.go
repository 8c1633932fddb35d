package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// memConn is a connection that says data in chunks and hears everything.
type memConn struct {
	data    []byte
	chunk   int
	written bytes.Buffer
}

func (c *memConn) Read(p []byte) (int, error) {
	if len(c.data) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.data[:min(len(c.data), c.chunk)])
	c.data = c.data[n:]
	return n, nil
}
func (c *memConn) Write(p []byte) (int, error)      { return c.written.Write(p) }
func (c *memConn) Close() error                     { return nil }
func (c *memConn) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *memConn) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *memConn) SetDeadline(time.Time) error      { return nil }
func (c *memConn) SetReadDeadline(time.Time) error  { return nil }
func (c *memConn) SetWriteDeadline(time.Time) error { return nil }

// fuzzOptions has limits that short inputs reach.
var fuzzOptions = &Options{MaxFrameBytes: 3 * bufferBytes, MaxMessageBytes: 4 * bufferBytes, MaxParts: 5, Topics: []string{"kv@"}}

// session runs a connection over the bytes and tells what came of it.
func session(data []byte, chunk int) (messages []string, c *conn, nc *memConn, err error) {
	nc = &memConn{data: data, chunk: chunk}
	c = newConn(1, nc, fuzzOptions)
	if err = c.handshake(subRole); err != nil {
		return nil, c, nc, err
	}
	nc.written.Reset()
	for {
		frames, err := c.next(true)
		if err != nil {
			return messages, c, nc, err
		}
		messages = append(messages, fmt.Sprintf("%q", frames))
	}
}

// reference is the plainest reading of the frames after a handshake: whole
// input, no state kept between bytes. It returns the messages, the PONGs to
// send, and whether the input ended before the peer broke a rule.
func reference(b []byte) (messages []string, pongs []byte, ended bool) {
	var frames [][]byte
	total := 0
	for {
		if len(b) == 0 {
			return messages, pongs, true
		}
		flags := b[0]
		if flags > 7 || flags&5 == 5 {
			return messages, pongs, false
		}
		header := 2
		if flags&2 != 0 {
			header = 9
		}
		if len(b) < header {
			return messages, pongs, true
		}
		length := uint64(b[1])
		if flags&2 != 0 {
			length = binary.BigEndian.Uint64(b[1:9])
		}
		command := flags&4 != 0
		if command && length > 8192 || !command && (length > 3*65536 || total+int(length) > 4*65536 || len(frames) == 5) {
			return messages, pongs, false
		}
		b = b[header:]
		if uint64(len(b)) < length {
			return messages, pongs, true
		}
		body := b[:length]
		b = b[length:]
		if command {
			if length == 0 || body[0] == 0 || int(body[0]) > len(body)-1 {
				return messages, pongs, false
			}
			name, data := string(body[1:1+int(body[0])]), body[1+int(body[0]):]
			if name == "ERROR" || name == "PING" && len(data) < 2 {
				return messages, pongs, false
			}
			if name == "PING" {
				// A context has at most 16 bytes in the standard; a longer
				// one is echoed as far as a command may be long.
				pongs = appendCommand(pongs, "PONG", data[2:])
			}
			continue
		}
		frames = append(frames, body)
		total += int(length)
		if flags&1 == 0 {
			messages = append(messages, fmt.Sprintf("%q", frames))
			frames, total = nil, 0
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, lines := range readTranscript(f) {
		var stream, greetedStream []byte
		for i, line := range lines {
			if !line.fromClient {
				stream = append(stream, line.bytes...)
				if i >= 4 { // after greeting and READY
					greetedStream = append(greetedStream, line.bytes...)
				}
			}
		}
		f.Add(stream, uint16(0), false)
		f.Add(stream, uint16(16), false)
		f.Add(greetedStream, uint16(0), true)
	}
	f.Add([]byte("\x01\x01a\x04\x0b\x04PING\x00\x0actx!\x00\x01b"), uint16(3), true)
	f.Add([]byte("\x04\x07\x05ERROR\x00"), uint16(3), true)
	f.Add([]byte(longHeader(0, 1<<62)), uint16(3), true)
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), uint16(3), false)
	f.Fuzz(func(t *testing.T, data []byte, chunk uint16, greeted bool) {
		frames := data
		if greeted {
			data = append(append(peerGreeting(), peerReady("PUB")...), data...)
		}
		messages, c, nc, err := session(data, int(chunk)+1)
		if err == nil {
			t.Fatal("the session ended without an error")
		}
		if held, limit := cap(c.dec.body)+cap(c.dec.cmd)+cap(c.pong), 4*len(data)+4*bufferBytes; held > limit {
			t.Errorf("%d bytes held after %d arrived", held, len(data))
		}
		if !greeted {
			again, _, _, errAgain := session(data, 1)
			if !equal(messages, again) || rootOf(err) != rootOf(errAgain) {
				t.Errorf("chunks of %d: %d messages, %v; byte by byte: %d, %v", int(chunk)+1, len(messages), err, len(again), errAgain)
			}
			return
		}
		want, pongs, ended := reference(frames)
		if !equal(messages, want) {
			t.Errorf("messages %.300q, want %.300q", messages, want)
		}
		if !bytes.Equal(nc.written.Bytes(), pongs) {
			t.Errorf("wrote %q, want %q", nc.written.Bytes(), pongs)
		}
		if ended != (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) {
			t.Errorf("error %v, want an end of input: %v", err, ended)
		}
	})
}

// rootOf is the sentinel an error wraps.
func rootOf(err error) error {
	for _, e := range []error{ErrNotZMTP, ErrVersion, ErrMechanism, ErrSocketType, ErrProtocol, ErrLimit, ErrRefused, io.EOF, io.ErrUnexpectedEOF} {
		if errors.Is(err, e) {
			return e
		}
	}
	return nil
}
