package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// maxConns bounds the connections of one replica, in and out.
const maxConns = 512

// streams is the network of one replica: the listener it was given and the dial
// function. It knows its connections, so that none outlives it.
type streams struct {
	listener  net.Listener
	dial      func(ctx context.Context, address string) (net.Conn, error)
	advertise string

	mu     sync.Mutex
	conns  map[*trackedConn]struct{}
	closed bool
}

type trackedConn struct {
	net.Conn
	s *streams
}

func (c *trackedConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.conns, c)
	c.s.mu.Unlock()
	return c.Conn.Close()
}

var errTooManyConns = errors.New("too many connections")

func (s *streams) track(c net.Conn) (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= maxConns {
		c.Close()
		if s.closed {
			return nil, net.ErrClosed
		}
		return nil, errTooManyConns
	}
	t := &trackedConn{c, s}
	s.conns[t] = struct{}{}
	return t, nil
}

// Accept waits for a connection; beyond the bound they are closed.
func (s *streams) Accept() (net.Conn, error) {
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return nil, err
		}
		if t, err := s.track(c); !errors.Is(err, errTooManyConns) {
			return t, err
		}
	}
}

// Dial connects to another replica.
func (s *streams) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, err := s.dial(ctx, string(address))
	if err != nil {
		return nil, err
	}
	return s.track(c)
}

// Close closes the listener and all connections.
func (s *streams) Close() error {
	s.mu.Lock()
	s.closed = true
	conns := make([]*trackedConn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	err := s.listener.Close()
	for _, c := range conns {
		c.Close()
	}
	return err
}

// Addr is the address others reach this replica at.
func (s *streams) Addr() net.Addr { return advertised(s.advertise) }

type advertised string

func (advertised) Network() string  { return "tcp" }
func (a advertised) String() string { return string(a) }

// transport is what Raft speaks through, with the pre-vote.
type transport interface {
	raft.Transport
	raft.WithPreVote
	raft.WithClose
}

// observed is a transport that notes how far each follower is, and is silent as
// a leader while the disk hangs: a leader that cannot write must not keep the
// others from choosing one that can.
type observed struct {
	transport
	peers     *progress
	disk      *diskWatch
	diskStall time.Duration
}

var _ raft.WithPreVote = (*observed)(nil)

// AppendEntriesPipeline is not offered: every append goes through AppendEntries
// and is noted. Changes of intent are few; nothing is gained by overlapping them.
func (*observed) AppendEntriesPipeline(raft.ServerID, raft.ServerAddress) (raft.AppendPipeline, error) {
	return nil, raft.ErrPipelineReplicationNotSupported
}

// AppendEntries sends entries or a heartbeat.
func (o *observed) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if stalled, _ := o.disk.stalledFor(); stalled > o.diskStall {
		return fmt.Errorf("own disk has not answered for %s", stalled.Round(time.Second))
	}
	if err := o.transport.AppendEntries(id, target, args, resp); err != nil {
		return err
	}
	// A heartbeat carries no position in the log, so it says nothing of one.
	heartbeat := args.PrevLogEntry == 0 && len(args.Entries) == 0
	match := uint64(0)
	if resp.Success && !heartbeat {
		match = args.PrevLogEntry + uint64(len(args.Entries))
	}
	o.peers.heard(string(id), match, time.Now())
	return nil
}

// progress is what a leader knows of its followers.
type progress struct {
	mu    sync.Mutex
	peers map[string]peer
}

type peer struct {
	// match is the highest log index known to be equal there.
	match uint64
	at    time.Time
}

func newProgress() *progress { return &progress{peers: map[string]peer{}} }

func (p *progress) heard(id string, match uint64, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.peers[id]
	p.peers[id] = peer{max(e.match, match), now}
}

// reset forgets everything; what an earlier term knew may not hold.
func (p *progress) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.peers)
}

func (p *progress) get(id string) (peer, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, ok := p.peers[id]
	return e, ok
}
