package nonblock

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is a wrapped connection and its bare peer.
func pair(t testing.TB) (wrapped net.Conn, peer *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
		}
		accepted <- c
	}()
	wrapped, err = Dial(&net.Dialer{})(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	peer = (<-accepted).(*net.TCPConn)
	t.Cleanup(func() {
		wrapped.Close()
		peer.Close()
	})
	return wrapped, peer
}

// More than the socket's buffers hold comes whole and in order, both ways at
// once, whichever of the interfaces of io moves it.
func TestMovesEverything(t *testing.T) {
	for name, move := range map[string]func(w io.Writer, r io.Reader) error{
		"write": func(w io.Writer, r io.Reader) error {
			b, err := io.ReadAll(r)
			if err != nil {
				return err
			}
			n, err := w.Write(b)
			if n != len(b) {
				t.Errorf("wrote %d of %d", n, len(b))
			}
			return err
		},
		"copy": func(w io.Writer, r io.Reader) error {
			_, err := io.Copy(w, r)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, peer := pair(t)
			rng := rand.NewChaCha8([32]byte{1})
			up, down := make([]byte, 8<<20), make([]byte, 8<<20)
			_, _ = rng.Read(up)
			_, _ = rng.Read(down)
			results := make(chan error, 3)
			go func() {
				results <- move(c, bytes.NewReader(up))
			}()
			var gotUp, gotDown bytes.Buffer
			go func() {
				_, err := io.CopyN(&gotUp, peer, int64(len(up)))
				results <- err
			}()
			go func() {
				_, err := peer.Write(down)
				results <- errors.Join(err, peer.CloseWrite())
			}()
			if _, err := io.Copy(&gotDown, c); err != nil {
				t.Error(err)
			}
			for range cap(results) {
				if err := <-results; err != nil {
					t.Error(err)
				}
			}
			if !bytes.Equal(gotUp.Bytes(), up) || !bytes.Equal(gotDown.Bytes(), down) {
				t.Errorf("%d of %d bytes up, %d of %d down, or others", gotUp.Len(), len(up), gotDown.Len(), len(down))
			}
			if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
				t.Errorf("after the end: %d, %v", n, err)
			}
		})
	}
}

// A deadline and a close end a call that waits, as they do for any connection.
func TestInterrupts(t *testing.T) {
	fill := func(c net.Conn) error { // until it waits
		for {
			if _, err := c.Write(make([]byte, 1<<20)); err != nil {
				return err
			}
		}
	}
	read := func(c net.Conn) error {
		_, err := c.Read(make([]byte, 1))
		return err
	}
	for name, call := range map[string]func(net.Conn) error{"read": read, "write": fill} {
		t.Run(name+" deadline", func(t *testing.T) {
			c, _ := pair(t)
			if err := c.SetDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			err := call(c)
			var timeout net.Error
			if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
				t.Errorf("%v", err)
			}
			if err := c.SetDeadline(time.Now().Add(-time.Second)); err != nil {
				t.Fatal(err)
			}
			if err := call(c); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("a deadline that is past: %v", err)
			}
		})
		t.Run(name+" close", func(t *testing.T) {
			c, _ := pair(t)
			result := make(chan error, 1)
			go func() { result <- call(c) }()
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-result; !errors.Is(err, net.ErrClosed) {
				t.Errorf("%v", err)
			}
		})
	}
}

// A connection that the peer breaks says why, and ends no process by a signal.
func TestBroken(t *testing.T) {
	c, peer := pair(t)
	if err := peer.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	peer.Close()
	var op *net.OpError
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) || !errors.As(err, &op) || op.Op != "read" {
		t.Errorf("read: %v", err)
	}
	if _, err := c.Write([]byte{1}); !errors.Is(err, syscall.EPIPE) || !errors.As(err, &op) || op.Op != "write" {
		t.Errorf("write: %v", err)
	}
}

// Nothing to move is no end, and moving allocates nothing.
func TestEmptyAndAllocations(t *testing.T) {
	c, peer := pair(t)
	if n, err := c.Read(nil); n != 0 || err != nil {
		t.Errorf("read of nothing: %d, %v", n, err)
	}
	if n, err := c.Write(nil); n != 0 || err != nil {
		t.Errorf("write of nothing: %d, %v", n, err)
	}
	there, back := []byte("ping"), make([]byte, 16)
	allocs := testing.AllocsPerRun(100, func() {
		if _, err := c.Write(there); err != nil {
			t.Fatal(err)
		}
		n, err := io.ReadAtLeast(peer, back, len(there))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := peer.Write(back[:n]); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAtLeast(c, back, len(there)); err != nil {
			t.Fatal(err)
		}
	})
	if allocs > 0 {
		t.Errorf("%.1f allocations", allocs)
	}
}

// What is no TCP connection is left as it is.
func TestOthersStay(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if Conn(a) != a {
		t.Error("a pipe was wrapped")
	}
	if _, err := Dial(&net.Dialer{Timeout: 10 * time.Second})(t.Context(), "tcp", "127.0.0.1:1"); err == nil {
		t.Error("dialled a port that nobody listens on")
	}
}
