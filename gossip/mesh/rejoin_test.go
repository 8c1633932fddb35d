package mesh

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-msgpack/v2/codec"
	"github.com/hashicorp/memberlist"
)

func TestRejoinByPeersFileWithDeadSeeds(t *testing.T) {
	t.Parallel()
	dead := deadAddress(t)
	a := newNode(t, nodeOptions{name: "a", tune: quick}) // the name is free again when it is lost
	peers := filepath.Join(t.TempDir(), "peers.json")
	edit := func(o *Options) { o.PeersFile = peers }
	b := newNode(t, nodeOptions{name: "bb", join: []string{dead, a.addr()}, edit: edit})
	b.waitFor("a", StatusAlive)
	b.Stop()
	again := newNode(t, nodeOptions{name: "bb", join: []string{dead}, edit: edit})
	again.waitFor("a", StatusAlive)
	a.waitFor("bb", StatusAlive)
	eventually(t, "the new process at a", func() bool { return a.member("bb").Meta.Life == again.life })

	// A file that is damaged is forgotten, not fatal.
	if err := os.WriteFile(peers, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	third := newNode(t, nodeOptions{name: "ccc", join: []string{a.addr()}, edit: edit})
	third.waitFor("a", StatusAlive)
	if !strings.Contains(third.logged(), "remembered peers cannot be read") {
		t.Error("damage is not logged")
	}
}

// deadAddress returns an address where nobody listens.
func deadAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", ownAddress())
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func TestJoinsASeedThatComesLater(t *testing.T) {
	t.Parallel()
	seed := deadAddress(t)
	b := newNode(t, nodeOptions{name: "bb", join: []string{seed}})
	eventually(t, "a failed try", func() bool { return strings.Contains(b.JoinStatus().Error, "connection refused") })
	if s := b.JoinStatus().String(); s != "alone, 0 of 1 seeds reachable" {
		t.Errorf("status %q", s)
	}
	newNode(t, nodeOptions{name: "a", edit: func(o *Options) { o.Listen = seed }})
	b.waitFor("a", StatusAlive)
}

func TestTwoHalvesMeetAgain(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a", tune: quick})
	b := newNode(t, nodeOptions{name: "bb", tune: quick, join: []string{a.addr()}})
	a.waitFor("bb", StatusAlive)
	b.waitFor("a", StatusAlive)
	// Cut: each believes that the other is dead. Datagrams and TCP pings vanish.
	cut := func(n *testNode, on bool) {
		fault := func(bool, string) bool { return on }
		n.transport.fault.Store(&fault)
	}
	cut(a, true)
	cut(b, true)
	a.waitFor("bb", StatusLost)
	b.waitFor("a", StatusLost)
	cut(a, false)
	cut(b, false)
	a.waitFor("bb", StatusAlive)
	b.waitFor("a", StatusAlive)
}

func TestLeaveAndJoinAgain(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a"})
	for i := range 3 {
		b := newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}, edit: func(o *Options) { o.Process = 77 }})
		eventually(t, fmt.Sprintf("member in round %d", i), func() bool { m := a.member("bb"); return m.Status == StatusAlive && m.Meta.Life == b.life })
		if err := b.Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
		a.waitFor("bb", StatusLeft) // it answers until it stops: a goodbye that was dropped is asked for
		b.Stop()
	}
}

func TestConflictOfTwoLivingMembers(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a", tune: quick})
	first := newNode(t, nodeOptions{name: "gpu-07", join: []string{a.addr()}})
	a.waitFor("gpu-07", StatusAlive)
	second := newNode(t, nodeOptions{name: "gpu-07", join: []string{a.addr()}})
	m := a.waitFor("gpu-07", StatusConflict)
	if m.Address != first.addr() || m.Other != second.addr() {
		t.Errorf("conflict shows %s and %s, want %s (kept) and %s", m.Address, m.Other, first.addr(), second.addr())
	}
	if m.Meta.Life != first.life {
		t.Error("the second one is described")
	}
	eventually(t, "conflict logged", func() bool { return strings.Contains(a.logged(), "event=host_conflict") })
	// The first stops; the name goes to the one that lives.
	second.Stop()
	first.Stop()
	a.waitFor("gpu-07", StatusLost)
	third := newNode(t, nodeOptions{name: "gpu-07", join: []string{a.addr()}})
	eventually(t, "same name under another address", func() bool { m := a.member("gpu-07"); return m.Address == third.addr() && m.Meta.Life == third.life })
}

func TestRenamedHostReplacesItsOldName(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a"})
	b := newNode(t, nodeOptions{name: "gpu-03", join: []string{a.addr()}, edit: func(o *Options) { o.Listen = ownAddress() }})
	a.waitFor("gpu-03", StatusAlive)
	addr := b.addr()
	b.Stop()
	newNode(t, nodeOptions{name: "gpu-33", join: []string{a.addr()}, edit: func(o *Options) { o.Listen = addr }})
	a.waitFor("gpu-33", StatusAlive)
	if m := a.waitFor("gpu-03", StatusLeft); m.Note != "replaced by gpu-33" {
		t.Errorf("note %q", m.Note)
	}
	// The library still believes in the old name; reading it changes nothing.
	eventually(t, "its state is read", a.readState)
	if m := a.member("gpu-03"); m.Status != StatusLeft {
		t.Errorf("old name came back as %s", m.Status)
	}
}

func TestEventFloodIsBounded(t *testing.T) { // not beside others: it computes
	a := newNode(t, nodeOptions{name: "a"})
	newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}})
	a.waitFor("bb", StatusAlive)
	d := &delegate{a.Mesh}
	real := a.member("bb")
	host, port, _ := net.SplitHostPort(real.Address)
	var portNumber uint16
	fmt.Sscan(port, &portNumber)
	a.mu.Lock() // the list takes nothing in meanwhile
	for i := range 100_000 {
		d.NotifyUpdate(&memberlist.Node{Name: fmt.Sprintf("x%d", i%3), Addr: net.ParseIP(host), Port: portNumber, Meta: []byte{byte(i)}})
	}
	queued := len(a.events)
	a.mu.Unlock()
	if queued > eventQueue {
		t.Errorf("%d events queued, the bound is %d", queued, eventQueue)
	}
	if a.counts.droppedFor("event_overflow") == 0 {
		t.Error("overflow is not counted")
	}
	eventually(t, "the right list after the flood", func() bool {
		m := a.member("bb")
		return len(a.events) == 0 && m.Status == StatusAlive && m.Meta == real.Meta && len(a.Members()) == 2
	})
}

func TestSketchesNewestWins(t *testing.T) {
	t.Parallel()
	a, b, c := three(t)
	for i := range 50 { // faster than gossip carries them
		if err := b.SetSketch([]byte(fmt.Sprintf("sketch %d", i))); err != nil {
			t.Fatal(err)
		}
	}
	sketchAt := func(n *testNode, name string) string {
		for _, s := range n.Sketches() {
			if s.Name == name {
				return string(s.Payload)
			}
		}
		return ""
	}
	// Gossip sends a sketch a few times and may lose all; the exchanges of state
	// make up for it.
	arrives := func(what string, at *testNode, name, payload string) {
		t.Helper()
		eventually(t, what, func() bool { return sketchAt(at, name) == payload })
	}
	for _, n := range []*testNode{a, c} {
		arrives("newest sketch at "+n.opts.Name, n, "bb", "sketch 49")
	}
	if got := sketchAt(b, "bb"); got != "sketch 49" {
		t.Errorf("its own is %q", got)
	}
	if q := b.queue.NumQueued(); q > 1 {
		t.Errorf("%d sketches of one member are queued", q)
	}
	// The largest one goes through, a larger one is an error.
	big := make([]byte, a.MaxSketchBytes())
	if err := a.SetSketch(big); err != nil {
		t.Fatal(err)
	}
	arrives("largest sketch", c, "a", string(big))
	if err := a.SetSketch(append(big, 0)); !errors.Is(err, ErrSketchTooBig) {
		t.Errorf("SetSketch of too much: %v", err)
	}
	// A member that joins is given them at once; gossip of old ones has ended.
	eventually(t, "gossip has ended", func() bool { return a.queue.NumQueued()+b.queue.NumQueued()+c.queue.NumQueued() == 0 })
	late := newNode(t, nodeOptions{name: "dddd", join: []string{a.addr()}})
	eventually(t, "sketches at a late member", func() bool { return sketchAt(late, "bb") == "sketch 49" })
	// A new life begins anew, whatever its numbers.
	b.Leave(t.Context())
	b.Stop()
	again := newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}})
	eventually(t, "new life at a", func() bool { return a.member("bb").Meta.Life == again.life })
	if got := sketchAt(a, "bb"); got != "" {
		t.Errorf("sketch of a former life is shown: %q", got)
	}
	again.SetSketch([]byte("new"))
	for _, n := range []*testNode{a, c} {
		arrives("sketch of the new life at "+n.opts.Name, n, "bb", "new")
	}
}

// A sketch of which every packet is lost arrives all the same.
func TestSketchWhosePacketsAreLost(t *testing.T) {
	t.Parallel()
	a, b, c := threeTuned(t, still)
	lost := func(packet bool, _ string) bool { return packet }
	for _, n := range []*testNode{a, b, c} {
		n.transport.fault.Store(&lost)
	}
	before := time.Now()
	if err := b.SetSketch([]byte("draining")); err != nil {
		t.Fatal(err)
	}
	for _, n := range []*testNode{a, c} {
		eventually(t, "the sketch at "+n.opts.Name, func() bool {
			return slices.ContainsFunc(n.Sketches(), func(s Sketch) bool {
				return s.Name == "bb" && string(s.Payload) == "draining" && !s.Received.Before(before)
			})
		})
	}
}

func TestStrangersDisturbNobody(t *testing.T) {
	t.Parallel()
	a, b, _ := three(t)
	udp, err := net.Dial("udp", a.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	for i := range 500 {
		junk := make([]byte, 1+i%1400)
		rand.Read(junk)
		if i%3 == 0 { // with the right label
			junk = append([]byte{244, 4, 't', 'e', 's', 't'}, junk...)
		}
		udp.Write(junk)
	}
	// Streams that announce much, and streams that say nothing.
	var open []net.Conn
	for i := range maxInboundPerHost + 30 {
		c, err := net.Dial("tcp", a.addr())
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
		if i%2 == 0 {
			c.Write([]byte{244, 4, 't', 'e', 's', 't', 10, 1, 0x30, 0, 0, 1, 2, 3}) // 19 MiB of encrypted state to come
		}
	}
	eventually(t, "streams beyond the bound are closed", func() bool { return a.counts.droppedFor("stream_limit") >= 20 })
	eventually(t, "junk is counted", func() bool { return a.counts.droppedFor("key")+a.counts.droppedFor("label") >= 100 })
	a.transport.mu.Lock()
	if n := len(a.transport.inbound); n > maxInboundPerHost {
		t.Errorf("%d streams of one host are open", n)
	}
	a.transport.mu.Unlock()
	for _, c := range open {
		c.Close()
	}
	for _, name := range []string{"a", "bb", "ccc"} {
		b.waitFor(name, StatusAlive) // it may be suspected for a moment where the machine is busy
		if got := b.seen(name); slices.Contains(got, StatusLost) {
			t.Errorf("%s was %v at bb", name, got)
		}
	}
	b.describe(func(m *Meta) { m.Version = "0.1.1" })
	eventually(t, "gossip goes on", func() bool { return a.member("bb").Meta.Version == "0.1.1" })
}

// endless is a peer that never stops sending.
type endless struct{ net.Conn }

func (endless) Read(b []byte) (int, error)  { return len(b), nil }
func (endless) Write(b []byte) (int, error) { return len(b), nil }
func (endless) Close() error                { return nil }
func (endless) RemoteAddr() net.Addr        { return &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1} }

func TestInboundStreamBytesAreBounded(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a"})
	tr := a.transport
	chunk := make([]byte, 64<<10)
	drain := func(c net.Conn) (total int) {
		for {
			n, err := c.Read(chunk)
			if err != nil {
				if !errors.Is(err, errStreamBytes) {
					t.Errorf("read ended with %v", err)
				}
				return total
			}
			total += n
		}
	}
	var open []*inboundConn
	sum := 0
	for i := range maxInboundPerHost {
		c := tr.admit(endless{})
		if c == nil {
			t.Fatalf("stream %d was not admitted", i)
		}
		open = append(open, c)
		n := drain(c)
		if n > maxStreamBytes {
			t.Errorf("stream %d could send %d bytes, the bound is %d", i, n, maxStreamBytes)
		}
		sum += n
	}
	if sum > maxInboundBytes {
		t.Errorf("all streams could send %d bytes, the bound is %d", sum, maxInboundBytes)
	}
	if c := tr.admit(endless{}); c != nil {
		t.Error("a stream beyond the bound of its host was admitted")
	}
	for _, c := range open {
		c.Close()
		c.Close()
	}
	tr.mu.Lock()
	if tr.held != 0 || len(tr.inbound) != 0 || len(tr.hosts) != 0 {
		t.Errorf("after closing: %d bytes, %d streams, %d hosts", tr.held, len(tr.inbound), len(tr.hosts))
	}
	tr.mu.Unlock()
	out := &countedConn{Conn: endless{}, t: tr}
	if n := drain(out); n > maxStreamBytes {
		t.Errorf("a member we dialled could send %d bytes", n)
	}
}

func TestSketchesArePassedOn(t *testing.T) {
	t.Parallel()
	// Between a and c no packet passes; b must carry the sketch.
	a, _, c := three(t)
	between := func(x, y *testNode) {
		fault := func(packet bool, to string) bool { return packet && to == y.addr() }
		x.transport.fault.Store(&fault)
	}
	between(a, c)
	between(c, a)
	if err := a.SetSketch([]byte("over there")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "sketch at c", func() bool {
		return slices.ContainsFunc(c.Sketches(), func(s Sketch) bool { return s.Name == "a" && string(s.Payload) == "over there" })
	})
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	good := Options{Name: "a", Fleet: "f", Role: RoleAgent, Listen: "127.0.0.1:0"}
	for _, tt := range []struct {
		edit func(*Options)
		want string
	}{
		{func(o *Options) { o.Name = "" }, "name is empty"},
		{func(o *Options) { o.Name = strings.Repeat("x", 200) }, "200 bytes"},
		{func(o *Options) { o.Fleet = "" }, "fleet name has 0 bytes"},
		{func(o *Options) { o.Fleet = strings.Repeat("x", 300) }, "fleet name has 300 bytes"},
		{func(o *Options) { o.Role = "viewer" }, `role "viewer"`},
		{func(o *Options) { o.Version = strings.Repeat("9", 64) }, "version has 64 bytes"},
		{func(o *Options) { o.Listen = "7710" }, `mesh.listen "7710"`},
		{func(o *Options) { o.Listen = ":7710" }, "mesh.key_file is not set"},
		{func(o *Options) { o.Join = []string{"gpu-01"} }, `mesh.join: address "gpu-01": want host:port`},
		{func(o *Options) { o.KeyFile = "/nonexistent" }, "mesh.key_file"},
	} {
		o := good
		tt.edit(&o)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("New = %v, want %q", err, tt.want)
		}
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	o := good
	o.Listen = taken.Addr().String()
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(); err == nil || !strings.Contains(err.Error(), "address already in use") || !strings.Contains(err.Error(), o.Listen) {
		t.Errorf("Start on a taken port: %v", err)
	}
}

// inject makes a member of a plain mesh believe in n others.
func inject(t testing.TB, m *Mesh, from, n int) {
	t.Helper()
	meta := Meta{Role: RoleAgent, Protocol: 1, Version: "0.1.0", Process: 1, Life: 1}.encode()
	for i := from; i < from+n; i++ {
		gossip(t, m, 4, struct {
			Incarnation uint32
			Node        string
			Addr        []byte
			Port        uint16
			Meta        []byte
			Vsn         []uint8
		}{1, fmt.Sprintf("gpu-%04d", i), []byte{10, 1, byte(i >> 8), byte(i)}, 7710, meta, []uint8{1, 5, 2, 1, 1, 1}})
	}
}

// gossip hands a member of a plain mesh a message of the library's: 4 says that
// a node is alive, 5 that it is dead.
func gossip(t testing.TB, m *Mesh, kind byte, msg any) {
	t.Helper()
	buf := bytes.NewBuffer([]byte{244, 4, 't', 'e', 's', 't', kind})
	if err := codec.NewEncoder(buf, &codec.MsgpackHandle{}).Encode(msg); err != nil {
		t.Fatal(err)
	}
	m.transport.packets <- &memberlist.Packet{Buf: buf.Bytes(), From: &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}, Timestamp: time.Now()}
}

// lose tells a member of a plain mesh that another one is dead, as one does whose
// suspicion has run out.
func lose(t *testing.T, m *Mesh, name, from string) {
	t.Helper()
	gossip(t, m, 5, struct {
		Incarnation uint32
		Node, From  string
	}{1 << 20, name, from})
}

func calm(c *memberlist.Config) { // neither probes nor gossips
	c.ProbeInterval, c.GossipInterval, c.PushPullInterval = 0, 0, 0
}

func TestMembersAreBounded(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a", tune: calm, edit: func(o *Options) { o.KeyFile, o.MaxMembers = "", 20 }})
	for i := range 30 { // in small steps: the bound follows the list
		inject(t, a.Mesh, i, 1)
		eventually(t, "member taken in or refused", func() bool {
			return a.member(fmt.Sprintf("gpu-%04d", i)).Status == StatusAlive || a.counts.droppedFor("vetoed") > uint64(max(0, i-19))
		})
	}
	if n := len(a.Members()); n != 20 {
		t.Errorf("%d members, the bound is 20", n)
	}
	if a.list.NumMembers() != 20 {
		t.Errorf("the library has %d members", a.list.NumMembers())
	}
}

// BenchmarkSelfRead1000 reads the state of 1,000 members as the list does every few seconds.
func BenchmarkSelfRead1000(b *testing.B) {
	a := newNode(b, nodeOptions{name: "a", tune: calm, edit: func(o *Options) { o.KeyFile = "" }})
	inject(b, a.Mesh, 0, 999)
	eventually(b, "999 members", func() bool { return a.list.NumMembers() == 1000 })
	b.ReportAllocs()
	for b.Loop() {
		if nodes, ok := a.selfRead(); !ok || len(nodes) != 1000 {
			b.Fatalf("%d nodes, %v", len(nodes), ok)
		}
	}
}

// BenchmarkMembers1000 copies the list of 1,000 members.
func BenchmarkMembers1000(b *testing.B) {
	t := newTable("a", 2000)
	now := time.Now()
	meta := Meta{Role: RoleAgent, Protocol: 1, Version: "0.1.0", Process: 1, Life: 1}.encode()
	for i := range 1000 {
		t.joined(node{name: fmt.Sprintf("gpu-%04d", i), addr: fmt.Sprintf("10.1.%d.%d:7710", i>>8, i&255), meta: meta}, now)
	}
	b.ReportAllocs()
	for b.Loop() {
		t.members()
	}
}

func TestLeaveHasABound(t *testing.T) {
	t.Parallel()
	// Nobody can be told: the goodbye gives up with its context.
	packets := func(packet bool, _ string) bool { return packet }
	a := newNode(t, nodeOptions{name: "a", fault: packets, tune: func(c *memberlist.Config) { quick(c); c.GossipInterval = time.Hour; c.ProbeInterval = time.Hour }})
	newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}, fault: packets})
	a.waitFor("bb", StatusAlive)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := a.Leave(ctx); err == nil || !strings.Contains(err.Error(), "leave") {
		t.Errorf("Leave = %v, want a timeout", err)
	}
}
