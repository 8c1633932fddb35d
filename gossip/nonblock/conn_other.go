//go:build !linux

package nonblock

import "net"

// Conn returns c: sockets of this system are left to the runtime.
func Conn(c net.Conn) net.Conn { return c }
