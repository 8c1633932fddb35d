package oneport

import (
	"bytes"
	"fmt"
	"net"
)

// RaftPreface is what a Raft client writes first on a connection in clear.
const RaftPreface = "waypost-raft/1\n"

// grpcPreface is enough of the HTTP/2 connection preface (RFC 9113, section
// 3.4) to tell it from an HTTP/1.1 request.
const grpcPreface = "PRI * HTTP/2.0\r\n"

var httpMethods = []string{"GET ", "POST ", "PUT ", "HEAD ", "DELETE ", "OPTIONS ", "PATCH "}

// sniff reads just as much as tells the protocol. It returns the bytes that the
// protocol's server must still see.
func sniff(conn net.Conn) (head []byte, proto Protocol, err error) {
	buf := make([]byte, 0, len(grpcPreface))
	for {
		n, err := conn.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if proto, possible := match(buf); proto == Raft {
			// The preface belongs to the port, not to Raft.
			return buf[len(RaftPreface):], Raft, nil
		} else if proto != "" {
			return buf, proto, nil
		} else if !possible {
			return nil, "", &refusal{reasonUnknown, fmt.Errorf("unknown protocol, begins with %q", buf)}
		}
		if err != nil {
			return nil, "", err
		}
	}
}

// match says which protocol a beginning belongs to, or whether one is still possible.
func match(head []byte) (proto Protocol, possible bool) {
	check := func(want string) (whole, part bool) {
		n := min(len(head), len(want))
		part = bytes.Equal(head[:n], []byte(want[:n]))
		return part && n == len(want), part
	}
	whole, grpcPossible := check(grpcPreface)
	if whole {
		return GRPC, true
	}
	whole, raftPossible := check(RaftPreface)
	if whole {
		return Raft, true
	}
	possible = grpcPossible || raftPossible
	for _, m := range httpMethods {
		whole, part := check(m)
		if whole {
			return HTTP, true
		}
		possible = possible || part
	}
	return "", possible
}

// peekedConn gives back the bytes that were read to find the protocol.
type peekedConn struct {
	net.Conn
	head []byte
}

func (c *peekedConn) Read(b []byte) (int, error) {
	if len(c.head) > 0 {
		n := copy(b, c.head)
		c.head = c.head[n:]
		return n, nil
	}
	return c.Conn.Read(b)
}
