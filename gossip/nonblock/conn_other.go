//go:build !linux

package nonblock

import "net"

// Conn returns c: sockets of other systems are left to the runtime.
func Conn(c net.Conn) net.Conn { return c }
