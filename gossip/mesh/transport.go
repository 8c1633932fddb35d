package mesh

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	// Inbound streams are bounded before they have shown a key: a stranger can
	// open them and announce up to 20 MB, which memberlist would hold in memory.
	maxInbound        = 64
	maxInboundPerHost = 16
	maxStreamBytes    = 8 << 20  // 5,000 members with sketches
	maxInboundBytes   = 64 << 20 // of all streams together
)

var (
	errStreamBytes = errors.New("mesh stream carries too much")
	errCut         = errors.New("network is cut")
)

// transport is memberlist's own transport with bounds, byte counts, connections
// dialled beforehand and the self-read.
type transport struct {
	*memberlist.NetTransport
	labelBytes int // that memberlist writes first on a stream it dials
	bytesIn    *atomic.Uint64
	bytesOut   *atomic.Uint64
	limited    func() // an inbound stream was refused
	// gate is held for writing by the self-read, and for reading by whoever may
	// call the merge callback, so that the callback knows whom it is called for.
	gate   sync.RWMutex
	probes probes
	// fault loses outgoing packets or dials in tests; nil: none.
	fault atomic.Pointer[func(packet bool, to string) bool]

	packets chan *memberlist.Packet
	streams chan net.Conn
	stop    chan struct{} // nothing is handed on any more
	done    chan struct{} // the listeners below have ended
	once    sync.Once
	wg      sync.WaitGroup

	mu      sync.Mutex
	dialled map[string]net.Conn // by the name given to Join
	inbound map[*inboundConn]struct{}
	hosts   map[string]int
	held    int64 // bytes read by open inbound streams
	closed  bool  // no stream is admitted any more
}

var _ memberlist.NodeAwareTransport = (*transport)(nil)

func newTransport(nt *memberlist.NetTransport, label string, in, out *atomic.Uint64, limited func()) *transport {
	t := &transport{
		NetTransport: nt, bytesIn: in, bytesOut: out, limited: limited,
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), stop: make(chan struct{}), done: make(chan struct{}),
		dialled: map[string]net.Conn{}, inbound: map[*inboundConn]struct{}{}, hosts: map[string]int{},
	}
	if label != "" {
		t.labelBytes = 2 + len(label)
	}
	t.wg.Go(t.forwardPackets)
	t.wg.Go(t.forwardStreams)
	return t
}

// PacketCh implements memberlist.Transport.
func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh implements memberlist.Transport.
func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// forwardPackets hands packets on; once stop is closed it throws them away, so
// that the listeners below can end.
func (t *transport) forwardPackets() {
	for {
		select {
		case p := <-t.NetTransport.PacketCh():
			t.bytesIn.Add(uint64(len(p.Buf)))
			select {
			case t.packets <- p:
			case <-t.stop:
			}
		case <-t.done:
			return
		}
	}
}

func (t *transport) forwardStreams() {
	for {
		select {
		case c := <-t.NetTransport.StreamCh():
			in := t.admit(c)
			if in == nil {
				c.Close()
				t.limited()
				continue
			}
			t.wg.Go(func() { t.sort(in) })
		case <-t.done:
			return
		}
	}
}

// sort hands a stream of gossip on and serves one that measures the way here. Its
// first byte tells: streams of gossip begin with their label.
func (t *transport) sort(in *inboundConn) {
	var first [1]byte
	err := in.SetReadDeadline(time.Now().Add(streamTimeout))
	if err == nil {
		_, err = io.ReadFull(in.Conn, first[:])
	}
	t.bytesIn.Add(1)
	switch {
	case err != nil:
		in.Close()
		return
	case first[0] == probePreface:
		t.serveProbe(in.Conn)
		in.Close()
		return
	}
	in.first, in.begun = first[0], true
	select {
	case t.streams <- in:
	case <-t.stop:
		in.Close()
	}
}

func (t *transport) admit(c net.Conn) *inboundConn {
	host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(t.inbound) >= maxInbound || t.hosts[host] >= maxInboundPerHost {
		return nil
	}
	in := &inboundConn{Conn: c, t: t, host: host}
	t.inbound[in] = struct{}{}
	t.hosts[host]++
	return in
}

// Shutdown implements memberlist.Transport. It may be called twice.
func (t *transport) Shutdown() error {
	var err error
	t.once.Do(func() {
		close(t.stop)
		err = t.NetTransport.Shutdown() // waits for its listeners
		close(t.done)
		t.mu.Lock()
		t.closed = true
		open := make([]net.Conn, 0, len(t.inbound)+len(t.dialled))
		for c := range t.inbound {
			open = append(open, c)
		}
		for _, c := range t.dialled {
			open = append(open, c)
		}
		t.mu.Unlock()
		for _, c := range open {
			c.Close()
		}
		t.wg.Wait()
	})
	return err
}

// WriteTo implements memberlist.Transport.
func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: addr})
}

// WriteToAddress implements memberlist.NodeAwareTransport.
func (t *transport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	if t.loses(true, a.Addr) {
		return time.Now(), nil
	}
	t.bytesOut.Add(uint64(len(b)))
	return t.NetTransport.WriteToAddress(b, a)
}

func (t *transport) loses(packet bool, to string) bool {
	f := t.fault.Load()
	return f != nil && (*f)(packet, to)
}

// DialTimeout implements memberlist.Transport.
func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

// DialAddressTimeout implements memberlist.NodeAwareTransport.
func (t *transport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if a.Name == selfReadName {
		return newEchoConn(t.labelBytes), nil
	}
	t.mu.Lock()
	c := t.dialled[a.Name]
	delete(t.dialled, a.Name)
	t.mu.Unlock()
	if t.loses(false, a.Addr) {
		if c != nil {
			c.Close()
		}
		return nil, errCut
	}
	if c == nil {
		var err error
		if c, err = t.NetTransport.DialAddressTimeout(a, timeout); err != nil {
			return nil, err
		}
	}
	return &countedConn{Conn: c, t: t}, nil
}

// offer keeps a dialled connection for the Join of that name.
func (t *transport) offer(name string, c net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dialled[name] = c
}

// withdraw closes a connection that its Join did not take.
func (t *transport) withdraw(name string) {
	t.mu.Lock()
	c := t.dialled[name]
	delete(t.dialled, name)
	t.mu.Unlock()
	if c != nil {
		c.Close()
	}
}

// countedConn counts the bytes of an outbound stream.
type countedConn struct {
	net.Conn
	t    *transport
	read int64
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.t.bytesIn.Add(uint64(n))
	if c.read += int64(n); c.read > maxStreamBytes {
		return n, errStreamBytes
	}
	return n, err
}

func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.t.bytesOut.Add(uint64(n))
	return n, err
}

// inboundConn is a stream that someone opened to us.
type inboundConn struct {
	net.Conn
	t    *transport
	host string
	read int64
	// first is the stream's first byte, which was read to tell its kind; begun says
	// that it is still to be handed out.
	first byte
	begun bool

	mu      sync.Mutex
	closed  bool
	replied bool // holds the gate: the merge callback may follow
}

func (c *inboundConn) Read(b []byte) (int, error) {
	if c.begun && len(b) > 0 {
		b[0], c.begun = c.first, false
		return 1, nil
	}
	n, err := c.Conn.Read(b)
	c.t.bytesIn.Add(uint64(n))
	c.t.mu.Lock()
	c.read += int64(n)
	c.t.held += int64(n)
	over := c.read > maxStreamBytes || c.t.held > maxInboundBytes
	c.t.mu.Unlock()
	if over {
		return 0, errStreamBytes
	}
	return n, err
}

// Write sends a reply. memberlist replies to a join before it merges what it
// was sent, and closes afterwards.
func (c *inboundConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	if !c.replied && !c.closed {
		c.t.gate.RLock()
		c.replied = true
	}
	c.mu.Unlock()
	n, err := c.Conn.Write(b)
	c.t.bytesOut.Add(uint64(n))
	return n, err
}

// Close may be called by memberlist and by Shutdown.
func (c *inboundConn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	if c.replied {
		c.t.gate.RUnlock()
	}
	c.mu.Unlock()
	c.t.mu.Lock()
	delete(c.t.inbound, c)
	if c.t.hosts[c.host]--; c.t.hosts[c.host] == 0 {
		delete(c.t.hosts, c.host)
	}
	c.t.held -= c.read
	c.t.mu.Unlock()
	return c.Conn.Close()
}

// echoConn gives back what is written to it, without the label in front.
type echoConn struct {
	skip int
	buf  []byte
}

func newEchoConn(labelBytes int) *echoConn { return &echoConn{skip: labelBytes} }

func (c *echoConn) Write(b []byte) (int, error) {
	n := min(c.skip, len(b))
	c.skip -= n
	c.buf = append(c.buf, b[n:]...)
	return len(b), nil
}

func (c *echoConn) Read(b []byte) (int, error) {
	if len(c.buf) == 0 {
		return 0, io.EOF
	}
	n := copy(b, c.buf)
	c.buf = c.buf[n:]
	return n, nil
}

func (*echoConn) Close() error                     { return nil }
func (*echoConn) LocalAddr() net.Addr              { return echoAddr{} }
func (*echoConn) RemoteAddr() net.Addr             { return echoAddr{} }
func (*echoConn) SetDeadline(time.Time) error      { return nil }
func (*echoConn) SetReadDeadline(time.Time) error  { return nil }
func (*echoConn) SetWriteDeadline(time.Time) error { return nil }

type echoAddr struct{}

func (echoAddr) Network() string { return "memory" }
func (echoAddr) String() string  { return selfReadMark }
