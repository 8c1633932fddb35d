package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"waypost/coordinator/registry"
)

// TestMain also finds what outlives the tests. The log store leaves a goroutine
// when it panics over a damaged file while it is opened; the process would end.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("go.etcd.io/bbolt.(*DB).freepages.func2"))
}

// patience bounds what must happen sooner or later. It decides no pass: what is
// tested is that it happens.
const patience = 60 * time.Second

// cluster is coordinators of one process, over real TCP on loopback or, in
// virtual time, over pipes.
type cluster struct {
	t     testing.TB
	mu    sync.Mutex
	nodes map[string]*node         // by name
	pipes map[string]*pipeListener // by address; nil: TCP
	ports int                      // given out to pipes
	// cut holds the names of nodes that nobody reaches and that reach nobody.
	cut map[string]bool
}

// node is one coordinator; it keeps its directory and address over restarts.
type node struct {
	*Replica
	c       *cluster
	name    string
	dir     string
	address string
	voter   bool
	logs    *recorder
	conns   []net.Conn // dialled, to be broken by a cut
}

func newCluster(t testing.TB) *cluster {
	c := &cluster{t: t, nodes: map[string]*node{}, cut: map[string]bool{}}
	t.Cleanup(func() {
		for _, n := range c.all() {
			n.crash()
		}
	})
	return c
}

// virtual runs a test of several coordinators in virtual time: on a machine that
// is slow no leader is missed that would not be missed on a fast one. The disk is
// real, and time stands still while it works.
func virtual(t *testing.T, test func(t *testing.T, c *cluster)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(time.Minute) }) // Raft lets what nobody answers run out
		c := newCluster(t)
		c.pipes = map[string]*pipeListener{}
		test(t, c)
	})
}

// pipeListener takes the connections to one address in virtual time.
type pipeListener struct {
	c       *cluster
	address string
	conns   chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.c.mu.Lock()
		defer l.c.mu.Unlock()
		delete(l.c.pipes, l.address)
	})
	return nil
}

func (l *pipeListener) Addr() net.Addr { return advertised(l.address) }

func (c *cluster) listen(address string) (net.Listener, error) {
	if c.pipes == nil {
		return net.Listen("tcp", address)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if strings.HasSuffix(address, ":0") {
		c.ports++
		address = fmt.Sprintf("127.0.0.1:%d", c.ports)
	}
	if c.pipes[address] != nil {
		return nil, syscall.EADDRINUSE
	}
	l := &pipeListener{c: c, address: address, conns: make(chan net.Conn), closed: make(chan struct{})}
	c.pipes[address] = l
	return l, nil
}

func (c *cluster) connect(ctx context.Context, address string) (net.Conn, error) {
	if c.pipes == nil {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", address)
	}
	c.mu.Lock()
	l := c.pipes[address]
	c.mu.Unlock()
	if l == nil {
		return nil, syscall.ECONNREFUSED
	}
	here, there := net.Pipe()
	select {
	case l.conns <- there:
		return here, nil
	case <-l.closed:
		return nil, syscall.ECONNREFUSED
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *cluster) all() []*node {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []*node
	for i := range len(c.nodes) {
		if n := c.nodes[fmt.Sprintf("c-%d", i+1)]; n != nil {
			out = append(out, n)
		}
	}
	return out
}

// add makes c-1, c-2, … and starts it; the first one bootstraps.
func (c *cluster) add(voter bool) *node {
	c.t.Helper()
	name := fmt.Sprintf("c-%d", len(c.nodes)+1)
	n := &node{c: c, name: name, dir: c.t.TempDir(), address: "127.0.0.1:0", voter: voter, logs: &recorder{}}
	n.open(len(c.nodes) == 0)
	c.mu.Lock()
	c.nodes[name] = n
	c.mu.Unlock()
	return n
}

// options of a node over a new listener at its address.
func (n *node) options(bootstrap bool) Options {
	n.c.t.Helper()
	var l net.Listener
	n.c.eventually("the address is free again", func() bool {
		var err error
		l, err = n.c.listen(n.address)
		return err == nil
	})
	n.address = l.Addr().String()
	return Options{
		Dir: n.dir, Name: n.name, ClusterAddress: n.address, APIAddress: "127.0.0.1:7712", Voter: n.voter, Bootstrap: bootstrap,
		Listener: &cutListener{l, n}, Dial: n.dial, Forward: n.c.forward,
		Logger: slog.New(slog.NewTextHandler(n.logs, nil)), Registerer: prometheus.NewRegistry(),
		// Half the default, for a test to take half as long.
		Timing: Timing{
			Heartbeat: slowdown * 250 * time.Millisecond, Election: slowdown * 250 * time.Millisecond, Lease: slowdown * 200 * time.Millisecond,
			LeaderWait: slowdown * 1500 * time.Millisecond,
		},
	}
}

func (n *node) open(bootstrap bool) {
	n.c.t.Helper()
	o := n.options(bootstrap)
	r, err := New(o)
	if err != nil {
		o.Listener.Close()
		n.c.t.Fatalf("%s: %v", n.name, err)
	}
	if err := r.Start(); err != nil {
		n.c.t.Fatalf("%s: %v", n.name, err)
	}
	n.Replica = r
}

// crash ends a node without handing anything over.
func (n *node) crash() {
	if n.Replica == nil {
		return
	}
	n.Replica.stop.Do(func() {
		node := n.Replica.running()
		close(n.closing)
		n.cancel()
		ended := node.Shutdown()
		n.net.Close()
		if err := ended.Error(); err != nil {
			n.c.t.Errorf("%s: %v", n.name, err)
		}
		n.loops.Wait()
		if err := n.stores.close(); err != nil {
			n.c.t.Errorf("%s: %v", n.name, err)
		}
		n.metrics.unregister()
	})
}

// cutListener refuses connections while its node is cut off.
type cutListener struct {
	net.Listener
	n *node
}

func (l *cutListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		l.n.c.mu.Lock()
		cut := l.n.c.cut[l.n.name]
		if !cut {
			l.n.conns = append(l.n.conns, c)
		}
		l.n.c.mu.Unlock()
		if !cut {
			return c, nil
		}
		c.Close()
	}
}

func (n *node) dial(ctx context.Context, address string) (net.Conn, error) {
	n.c.mu.Lock()
	cut := n.c.cut[n.name]
	n.c.mu.Unlock()
	if cut {
		return nil, errors.New("cut off")
	}
	c, err := n.c.connect(ctx, address)
	if err == nil {
		n.c.mu.Lock()
		n.conns = append(n.conns, c)
		n.c.mu.Unlock()
	}
	return c, err
}

// isolate cuts a node off, or heals it.
func (n *node) isolate(cut bool) {
	n.c.mu.Lock()
	n.c.cut[n.name] = cut
	conns := n.conns
	n.conns = nil
	n.c.mu.Unlock()
	if cut {
		for _, c := range conns {
			c.Close()
		}
	}
}

// forward is what the peers' RPC does, within the process.
func (c *cluster) forward(ctx context.Context, address string, cmd []byte) (Applied, error) {
	for _, n := range c.all() {
		if n.address == address {
			c.mu.Lock()
			cut := c.cut[n.name]
			c.mu.Unlock()
			if cut {
				return Applied{}, fmt.Errorf("%w: %s is cut off", ErrNotSent, n.name)
			}
			return n.ProposeHere(ctx, cmd)
		}
	}
	return Applied{}, fmt.Errorf("%w: nobody at %s", ErrNotSent, address)
}

// eventually waits for something that must happen.
func (c *cluster) eventually(what string, ok func() bool) {
	c.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			for _, n := range c.all() {
				c.t.Logf("%s:\n%s", n.name, n.logs)
			}
			c.t.Fatalf("after %s: not so: %s", patience, what)
		}
	}
}

// leader waits for a leader among the nodes given that all of them agree on.
func (c *cluster) leader(of ...*node) *node {
	c.t.Helper()
	var found *node
	c.eventually("one leader that all know", func() bool {
		found = nil
		for _, n := range of {
			if n.IsLeader() {
				found = n
			}
		}
		if found == nil {
			return false
		}
		for _, n := range of {
			if l, ok := n.Leader(); !ok || l.ID != found.ID() {
				return false
			}
		}
		return true
	})
	return found
}

// join makes n a member, through the leader among the nodes given.
func (c *cluster) join(n *node, among ...*node) uint32 {
	c.t.Helper()
	var number uint32
	c.eventually(n.name+" is added", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var err error
		number, err = c.leader(among...).JoinCluster(ctx, n.JoinRequest())
		if err != nil {
			c.t.Logf("join of %s: %v", n.name, err)
		}
		return err == nil
	})
	return number
}

// three makes three voters.
func (c *cluster) three() []*node {
	c.t.Helper()
	a := c.add(true)
	b, d := c.add(true), c.add(true)
	c.join(b, a)
	c.join(d, a)
	c.eventually("three voters that know each other", func() bool {
		return a.roles() == "leader voter voter" && b.roles() == a.roles() && d.roles() == a.roles()
	})
	return []*node{a, b, d}
}

// roles are those of the members, sorted by rank.
func (n *node) roles() string {
	count := map[string]int{}
	for _, m := range n.Members() {
		count[m.Role]++
	}
	out := ""
	for _, role := range []string{"leader", "voter", "nonvoter", ""} {
		for range count[role] {
			if out += role + " "; role == "" {
				out += "? "
			}
		}
	}
	return out[:max(len(out)-1, 0)]
}

func command(t testing.TB, id string, body registry.Body) []byte {
	t.Helper()
	cmd, err := registry.Encode(registry.Stamp{RequestID: id, At: time.Now(), By: "anna"}, body)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

// cordon is a change that can be looked for.
func cordon(t testing.TB, i int) []byte {
	t.Helper()
	return command(t, fmt.Sprintf("cordon %d", i), registry.SetCordon{Selector: fmt.Sprintf("host-%06d", i), Reason: "test"})
}

func propose(t testing.TB, n *node, cmd []byte) Applied {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	done, err := n.Propose(ctx, cmd)
	if err != nil {
		t.Fatalf("%s: %v", n.name, err)
	}
	if err := done.Result.Err(); err != nil {
		t.Fatalf("%s: %v", n.name, err)
	}
	return done
}

// same waits until the nodes have equal states.
func (c *cluster) same(nodes ...*node) {
	c.t.Helper()
	c.eventually("equal states", func() bool {
		for _, n := range nodes[1:] {
			if n.State().Hash() != nodes[0].State().Hash() {
				return false
			}
		}
		return true
	})
}

// recorder keeps the last part of what is logged.
type recorder struct {
	mu   sync.Mutex
	text []byte
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.text = append(r.text, p...); len(r.text) > 1<<16 {
		r.text = append([]byte(nil), r.text[len(r.text)-1<<15:]...)
	}
	return len(p), nil
}

func (r *recorder) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return string(r.text)
}

var _ raft.WithPreVote = transport(nil)
