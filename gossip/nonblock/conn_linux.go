package nonblock

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
)

// Conn returns a connection that reads and writes c without telling the
// scheduler. What is no TCP connection is returned as it is.
func Conn(c net.Conn) net.Conn {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return c
	}
	return &conn{
		TCPConn: t, raw: raw,
		in:  newDirection(receive),
		out: newDirection(send),
	}
}

// conn hides those methods of a TCP connection that move bytes.
type conn struct {
	*net.TCPConn
	raw     syscall.RawConn
	in, out *direction
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	err := c.raw.Read(c.in.attempt(p))
	n, errno := c.in.done()
	switch {
	case err != nil:
		return 0, err
	case errno != 0:
		return 0, c.fault("read", "recvfrom", errno)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// try reads what there is. It reports whether that was anything, the end or an
// error; with false there is nothing yet.
func (c *conn) try(p []byte) (n int, ok bool, err error) {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	c.in.once = true
	err = c.raw.Read(c.in.attempt(p))
	c.in.once = false
	n, errno := c.in.done()
	switch {
	case err != nil:
		return 0, true, err
	case errno == syscall.EAGAIN:
		return 0, false, nil
	case errno != 0:
		return 0, true, c.fault("read", "recvfrom", errno)
	case n == 0:
		return 0, true, io.EOF
	}
	return n, true, nil
}

// Write implements net.Conn.
func (c *conn) Write(p []byte) (int, error) {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	written := 0
	for written < len(p) {
		err := c.raw.Write(c.out.attempt(p[written:]))
		n, errno := c.out.done()
		switch {
		case err != nil:
			return written, err
		case errno != 0:
			return written, c.fault("write", "sendto", errno)
		}
		written += n
	}
	return written, nil
}

// ReadFrom and WriteTo hide those of the connection, which make calls of their own.
func (c *conn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(struct{ io.Writer }{c}, r) }

// WriteTo implements io.WriterTo.
func (c *conn) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, struct{ io.Reader }{c}) }

func (c *conn) fault(op, call string, errno syscall.Errno) error {
	return &net.OpError{Op: op, Net: c.LocalAddr().Network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(call, errno)}
}

// direction is one way of a connection. Its fields hold what a call needs, so
// that none makes a closure.
type direction struct {
	call func(fd uintptr, p []byte) (n int, errno syscall.Errno)
	try  func(fd uintptr) bool
	once bool // do not wait until the socket is ready

	mu    sync.Mutex // held from attempt to done
	p     []byte
	n     int
	errno syscall.Errno
}

func newDirection(call func(fd uintptr, p []byte) (int, syscall.Errno)) *direction {
	d := &direction{call: call}
	d.try = d.move
	return d
}

// attempt is the function that moves bytes of p, once some can be.
func (d *direction) attempt(p []byte) func(fd uintptr) bool {
	d.p, d.n, d.errno = p, 0, 0
	return d.try
}

// done tells how many were moved, or why none.
func (d *direction) done() (n int, errno syscall.Errno) {
	d.p = nil
	return d.n, d.errno
}

// move makes the call. It reports whether that was all: else the socket is to be
// ready first.
func (d *direction) move(fd uintptr) bool {
	for {
		n, errno := d.call(fd, d.p)
		switch errno {
		case 0:
			d.n = n
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			if !d.once {
				return false
			}
			d.errno = errno
		default:
			d.errno = errno
		}
		return true
	}
}
