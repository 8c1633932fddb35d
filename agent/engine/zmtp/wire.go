package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// Frame flags. The other bits are reserved and must be zero.
const (
	flagMore    = 1 << 0
	flagLong    = 1 << 1
	flagCommand = 1 << 2
	flagsKnown  = flagMore | flagLong | flagCommand
)

const (
	greetingBytes     = 64
	mechanismOffset   = 12
	mechanismBytes    = 20
	shortFrameMax     = 255
	shortHeaderBytes  = 2
	longHeaderBytes   = 9
	maxCommandBytes   = 8 << 10
	pingTTLBytes      = 2
	strangerPeekBytes = 32
)

// role is a socket type with the peers that fit it.
type role struct {
	name     string
	peers    []string
	identity bool // announces an Identity
	hint     map[string]string
}

var (
	subRole = &role{
		name:  "SUB",
		peers: []string{"PUB", "XPUB"},
		hint: map[string]string{
			"ROUTER": "; this looks like the replay endpoint of the publisher",
			"SUB":    "; both ends subscribe",
		},
	}
	dealerRole = &role{
		name:     "DEALER",
		peers:    []string{"ROUTER", "REP", "DEALER"},
		identity: true,
		hint: map[string]string{
			"PUB":  "; this looks like the endpoint of live events, not of the replay",
			"XPUB": "; this looks like the endpoint of live events, not of the replay",
		},
	}
)

// checkPeer says whether the peer's socket type fits.
func (r *role) checkPeer(socketType string) error {
	if slices.Contains(r.peers, socketType) {
		return nil
	}
	return fmt.Errorf("%w: it is %.32q, a %s needs %s%s", ErrSocketType, socketType, r.name,
		strings.Join(r.peers, " or "), r.hint[socketType])
}

// appendGreeting appends our greeting: version 3.0, so that a 3.1 peer takes
// subscriptions as messages, mechanism NULL, as a client.
func appendGreeting(dst []byte) []byte {
	var g [greetingBytes]byte
	g[0], g[9] = 0xff, 0x7f
	g[10] = 3
	copy(g[mechanismOffset:], "NULL")
	return append(dst, g[:]...)
}

// checkGreeting checks as much of a greeting as there is, so that a stranger
// who says little is found out early.
func checkGreeting(b []byte) error {
	if len(b) > 0 && b[0] != 0xff || len(b) > 9 && b[9]&1 != 1 {
		return fmt.Errorf("%w: %s", ErrNotZMTP, describeStranger(b))
	}
	if len(b) > 10 && b[10] < 3 {
		return fmt.Errorf("%w: revision %d", ErrVersion, b[10])
	}
	if len(b) >= greetingBytes {
		m := b[mechanismOffset : mechanismOffset+mechanismBytes]
		if name := string(bytes.TrimRight(m, "\x00")); name != "NULL" {
			return fmt.Errorf("%w: %q", ErrMechanism, name)
		}
	}
	return nil
}

// describeStranger says what a peer's first bytes look like.
func describeStranger(b []byte) string {
	looks := ""
	switch {
	case bytes.HasPrefix(b, []byte("HTTP/")):
		looks = "it looks like an HTTP server: "
	case bytes.HasPrefix(b, []byte("PRI * HTTP/2")):
		looks = "it looks like an HTTP/2 or gRPC client: "
	case isHTTPRequest(b):
		looks = "it looks like an HTTP client: "
	case len(b) >= 4 && b[0] == 0 && b[1] == 0 && b[3] == 4:
		looks = "it looks like an HTTP/2 or gRPC server: "
	case len(b) >= 2 && (b[0] == 0x15 || b[0] == 0x16) && b[1] == 3:
		looks = "it looks like TLS: "
	case bytes.HasPrefix(b, []byte("SSH-")):
		looks = "it looks like SSH: "
	}
	return fmt.Sprintf("%sit began with %q", looks, b[:min(len(b), strangerPeekBytes)])
}

func isHTTPRequest(b []byte) bool {
	for _, method := range []string{"GET ", "POST ", "PUT ", "HEAD ", "OPTIONS ", "CONNECT ", "DELETE ", "PATCH "} {
		if bytes.HasPrefix(b, []byte(method)) {
			return true
		}
	}
	return false
}

// appendHeader appends a frame header.
func appendHeader(dst []byte, flags byte, bodyBytes int) []byte {
	if bodyBytes <= shortFrameMax {
		return append(dst, flags, byte(bodyBytes))
	}
	dst = append(dst, flags|flagLong)
	return binary.BigEndian.AppendUint64(dst, uint64(bodyBytes))
}

// appendMessage appends a message.
func appendMessage(dst []byte, frames [][]byte) []byte {
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		dst = append(appendHeader(dst, flags, len(f)), f...)
	}
	return dst
}

// appendSubscribe appends a subscription in the form of ZMTP 3.0: a message
// of the byte 1 and the topic.
func appendSubscribe(dst []byte, topic string) []byte {
	dst = append(appendHeader(dst, 0, 1+len(topic)), 1)
	return append(dst, topic...)
}

// appendCommand appends a command frame.
func appendCommand(dst []byte, name string, body []byte) []byte {
	dst = appendHeader(dst, flagCommand, 1+len(name)+len(body))
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	return append(dst, body...)
}

// appendReady appends our READY command.
func appendReady(dst []byte, r *role, identity string) []byte {
	body := appendProperty(nil, "Socket-Type", r.name)
	if r.identity {
		body = appendProperty(body, "Identity", identity)
	}
	return appendCommand(dst, "READY", body)
}

func appendProperty(dst []byte, name, value string) []byte {
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

// splitCommand splits a command frame's body into name and data.
func splitCommand(b []byte) (name, data []byte, err error) {
	if len(b) == 0 || b[0] == 0 || int(b[0]) > len(b)-1 {
		return nil, nil, fmt.Errorf("%w: command of %d bytes without a whole name", ErrProtocol, len(b))
	}
	n := 1 + int(b[0])
	return b[1:n], b[n:], nil
}

// readySocketType returns the Socket-Type of a READY command's data.
func readySocketType(data []byte) (string, error) {
	socketType := ""
	for len(data) > 0 {
		nameBytes := int(data[0])
		data = data[1:]
		if nameBytes == 0 || len(data) < nameBytes+4 {
			return "", fmt.Errorf("%w: READY with a broken property", ErrProtocol)
		}
		name := data[:nameBytes]
		valueBytes := binary.BigEndian.Uint32(data[nameBytes:])
		data = data[nameBytes+4:]
		if uint64(valueBytes) > uint64(len(data)) {
			return "", fmt.Errorf("%w: READY property %.32q of %d bytes has %d", ErrProtocol, name, valueBytes, len(data))
		}
		if strings.EqualFold(string(name), "Socket-Type") {
			socketType = string(data[:valueBytes])
		}
		data = data[valueBytes:]
	}
	if socketType == "" {
		return "", fmt.Errorf("%w: READY without Socket-Type", ErrProtocol)
	}
	return socketType, nil
}

// refusal is the error an ERROR command stands for.
func refusal(data []byte) error {
	if len(data) > 0 && int(data[0]) <= len(data)-1 {
		return fmt.Errorf("%w: %q", ErrRefused, data[1:1+int(data[0])])
	}
	return fmt.Errorf("%w without a reason", ErrRefused)
}
