package mesh

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"flag"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// These tests wait for gossip and hardly compute: more of them run at once
	// than there are processors, unless the command line says otherwise.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	code := m.Run()
	if code == 0 {
		// A probe under way ends by its own time-out: the library's shutdown does
		// not wait for it.
		err := goleak.Find()
		for end := time.Now().Add(patience); err != nil && time.Now().Before(end); err = goleak.Find() {
			time.Sleep(10 * time.Millisecond)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// patience bounds what must happen sooner or later. It decides no pass: what is
// tested is that it happens.
const patience = 2 * time.Minute

// eventually waits for a condition that gossip brings about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// quick makes gossip and suspicion fast: for tests in which members get lost. A
// living one is lost too, and comes back, where the machine is busy.
func quick(c *memberlist.Config) {
	c.ProbeInterval, c.ProbeTimeout = 200*time.Millisecond, 100*time.Millisecond
	c.GossipInterval, c.PushPullInterval = 20*time.Millisecond, 500*time.Millisecond
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 4, 2
	c.AwarenessMaxMultiplier = 2
}

// lenient gossips as fast, but a probe is seldom too late, and a member that is
// suspected has hours to object: none is taken for lost.
func lenient(c *memberlist.Config) {
	quick(c)
	c.ProbeInterval, c.ProbeTimeout, c.SuspicionMult = time.Second, 900*time.Millisecond, 10_000
}

// patient waits longer for the answer to a probe.
func patient(c *memberlist.Config) {
	lenient(c)
	c.ProbeInterval, c.ProbeTimeout = 3*time.Second, 2900*time.Millisecond
}

// still neither probes nor suspects; it gossips.
func still(c *memberlist.Config) { quick(c); c.ProbeInterval = 100 * time.Hour }

type testNode struct {
	*Mesh
	t   testing.TB
	reg *prometheus.Registry

	mu      sync.Mutex
	history map[string][]Status // of each member as OnChange showed it
	log     bytes.Buffer
}

func (n *testNode) Write(b []byte) (int, error) { // the log
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.log.Write(b)
}

func (n *testNode) logged() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.log.String()
}

type nodeOptions struct {
	name  string
	join  []string
	edit  func(*Options)
	tune  func(*memberlist.Config)
	fault func(packet bool, to string) bool
}

func newNode(t testing.TB, o nodeOptions) *testNode {
	t.Helper()
	n := &testNode{t: t, reg: prometheus.NewRegistry(), history: map[string][]Status{}}
	opts := Options{
		Name: o.name, Fleet: "test", Role: RoleAgent, Version: "0.1.0", Process: uint64(len(o.name)), Listen: "127.0.0.1:0",
		KeyFile: keyFile(t, testKey), Join: o.join, Local: true, Registerer: n.reg,
		Logger:   slog.New(slog.NewTextHandler(n, nil)),
		OnChange: n.changed,
	}
	if o.edit != nil {
		o.edit(&opts)
	}
	var err error
	if n.Mesh, err = New(opts); err != nil {
		t.Fatal(err)
	}
	n.tune, n.leaveTimeout = lenient, patience
	if o.tune != nil {
		n.tune = o.tune
	}
	if err := n.Start(); err != nil {
		t.Fatal(err)
	}
	if o.fault != nil {
		n.transport.fault.Store(&o.fault)
	}
	t.Cleanup(func() { n.Stop() })
	return n
}

func (n *testNode) changed(members []Member) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, m := range members {
		if h := n.history[m.Name]; len(h) == 0 || h[len(h)-1] != m.Status {
			n.history[m.Name] = append(h, m.Status)
		}
	}
}

func (n *testNode) seen(name string) []Status {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.history[name])
}

func (n *testNode) addr() string { a, _ := n.Address(); return a }

func (n *testNode) member(name string) Member {
	for _, m := range n.Members() {
		if m.Name == name {
			return m
		}
	}
	return Member{}
}

func (n *testNode) waitFor(name string, s Status) Member {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("%s sees %s %s (it sees %+v)", n.opts.Name, name, s, n.Members()), func() bool { return n.member(name).Status == s })
	return n.member(name)
}

func testKeyBytes(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return base64.StdEncoding.EncodeToString(b)
}

var testKey = testKeyBytes(32)

func keyFile(t testing.TB, keys ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "mesh.key")
	if err := os.WriteFile(file, []byte(strings.Join(keys, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// ownAddress is a loopback address with no port that no other test listens on: a
// port there is not taken by others while nobody listens on it.
func ownAddress() string {
	return fmt.Sprintf("127.%d.%d.%d:0", 1+mathrand.IntN(254), mathrand.IntN(256), 1+mathrand.IntN(254))
}

// three members on addresses of their own: a packet that a port's former owner is
// still sent, by a test of another package or process, would be listed as refused.
func three(t *testing.T) (a, b, c *testNode) {
	t.Helper()
	return threeTuned(t, lenient)
}

func threeTuned(t *testing.T, tune func(*memberlist.Config)) (a, b, c *testNode) {
	t.Helper()
	own := func(o *Options) { o.Listen = ownAddress() }
	a = newNode(t, nodeOptions{name: "a", tune: tune, edit: func(o *Options) { own(o); o.Role, o.ClusterAddress = RoleCoordinator, "10.0.0.1:7711" }})
	b = newNode(t, nodeOptions{name: "bb", tune: tune, join: []string{a.addr()}, edit: own})
	c = newNode(t, nodeOptions{name: "ccc", tune: tune, join: []string{a.addr()}, edit: own})
	for _, n := range []*testNode{a, b, c} {
		for _, name := range []string{"a", "bb", "ccc"} {
			n.waitFor(name, StatusAlive)
		}
	}
	return a, b, c
}

func TestThreeMembers(t *testing.T) {
	t.Parallel()
	a, b, c := threeTuned(t, patient) // a round trip is measured only where a probe is answered in time
	key := fingerprint(must(base64.StdEncoding.DecodeString(testKey)))
	for _, n := range []*testNode{a, b, c} {
		members := n.Members()
		if len(members) != 3 {
			t.Fatalf("%d members at %s", len(members), n.opts.Name)
		}
		for i, other := range []*testNode{a, b, c} {
			m := members[i]
			if m.Name != other.opts.Name || m.Address != other.addr() || m.Meta != other.currentMeta() || m.Self != (other == n) {
				t.Errorf("%s sees %+v", n.opts.Name, m)
			}
			if m.Meta.KeyID != key || m.Meta.Protocol != Protocol || m.Since.IsZero() {
				t.Errorf("%s sees %+v", n.opts.Name, m)
			}
		}
		eventually(t, "round trips", func() bool {
			for _, m := range n.Members() {
				if !m.Self && m.RTT <= 0 {
					return false
				}
			}
			return true
		})
		if s := n.JoinStatus(); s.Alone {
			eventually(t, "no longer alone", func() bool { return !n.JoinStatus().Alone })
		}
	}
	if m := b.member("a"); m.Meta.Role != RoleCoordinator || m.Meta.ClusterAddress != "10.0.0.1:7711" {
		t.Errorf("coordinator seen as %+v", m.Meta)
	}
	want := `
# HELP waypost_mesh_members Gossip members as this process sees them, by status.
# TYPE waypost_mesh_members gauge
waypost_mesh_members{status="alive"} 3
waypost_mesh_members{status="conflict"} 0
waypost_mesh_members{status="left"} 0
waypost_mesh_members{status="lost"} 0
waypost_mesh_members{status="refused"} 0
waypost_mesh_members{status="suspect"} 0
`
	eventually(t, "all members alive in the metrics, as\n"+want, func() bool {
		return testutil.GatherAndCompare(a.reg, strings.NewReader(want), "waypost_mesh_members") == nil
	})
	for _, name := range []string{"waypost_mesh_health_score", "waypost_mesh_queue_depth", "waypost_mesh_key_info"} {
		if n, err := testutil.GatherAndCount(a.reg, name); err != nil || n != 1 {
			t.Errorf("%s: %d series, %v", name, n, err)
		}
	}
	if a.counts.bytesIn.Load() == 0 || a.counts.bytesOut.Load() == 0 {
		t.Error("no bytes counted")
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// describe changes what a member says of itself, as a changed key does.
func (n *testNode) describe(change func(*Meta)) {
	n.metaMu.Lock()
	defer n.metaMu.Unlock()
	next := n.meta
	change(&next)
	n.changeMeta(next)
}

func TestMetaUpdateReachesAll(t *testing.T) {
	t.Parallel()
	a, b, c := three(t)
	b.describe(func(m *Meta) { m.APIAddress = "10.0.0.2:7712" })
	for _, n := range []*testNode{a, b, c} {
		eventually(t, "new API address at "+n.opts.Name, func() bool { return n.member("bb").Meta.APIAddress == "10.0.0.2:7712" })
		if m := n.member("bb").Meta; m.Role != RoleAgent || m.Life != b.life {
			t.Errorf("more than that changed: %+v", m)
		}
	}
}

func TestLeaveIsTold(t *testing.T) {
	t.Parallel()
	a, b, c := threeTuned(t, still) // so that whatever else is seen is of the leave
	if err := b.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.waitFor("bb", StatusLeft)
	c.waitFor("bb", StatusLeft)
	// The list changes before those who watch it are told.
	eventually(t, "left told", func() bool { return slices.Contains(a.seen("bb"), StatusLeft) })
	if got := a.seen("bb"); !slices.Equal(got, []Status{StatusAlive, StatusLeft}) {
		t.Errorf("the leave was seen as %v", got)
	}
	eventually(t, "leave logged", func() bool { return strings.Contains(a.logged(), "event=host_left") })
}

func TestCrashIsTold(t *testing.T) {
	t.Parallel()
	plain := func(o *Options) { o.KeyFile = "" }
	a := newNode(t, nodeOptions{name: "a", tune: lenient, edit: plain})
	newNode(t, nodeOptions{name: "bb", tune: lenient, edit: plain, join: []string{a.addr()}})
	c := newNode(t, nodeOptions{name: "ccc", tune: lenient, edit: plain, join: []string{a.addr()}})
	a.waitFor("bb", StatusAlive)
	a.waitFor("ccc", StatusAlive)
	if err := c.Stop(); err != nil { // without a goodbye
		t.Fatal(err)
	}
	a.waitFor("ccc", StatusSuspect)
	eventually(t, "suspicion told", func() bool { seen := a.seen("ccc"); return seen[len(seen)-1] == StatusSuspect })
	lose(t, a.Mesh, "ccc", "bb")
	a.waitFor("ccc", StatusLost)
	eventually(t, "lost told", func() bool { return slices.Contains(a.seen("ccc"), StatusLost) })
	// A machine that is busy may have suspected it before as well.
	got := a.seen("ccc")
	if end := got[max(0, len(got)-2):]; got[0] != StatusAlive || !slices.Equal(end, []Status{StatusSuspect, StatusLost}) {
		t.Errorf("the crash was seen as %v", got)
	}
	eventually(t, "loss logged", func() bool { return strings.Contains(a.logged(), "event=host_lost") })
	if log := a.logged(); !strings.Contains(log, "event=host_suspect") {
		t.Errorf("log:\n%s", log)
	}
	if n := strings.Count(a.logged(), selfReadMark); n != 0 {
		t.Errorf("self-reads are in the log %d times", n)
	}
}

func TestSuspicionIsSeenByOthersThanTheProber(t *testing.T) {
	t.Parallel()
	// c never probes, so it can only have heard of the suspicion.
	a := newNode(t, nodeOptions{name: "a", tune: lenient})
	b := newNode(t, nodeOptions{name: "bb", tune: lenient, join: []string{a.addr()}})
	c := newNode(t, nodeOptions{name: "ccc", tune: still, join: []string{a.addr()}})
	for _, n := range []*testNode{a, b, c} {
		n.waitFor("bb", StatusAlive)
		n.waitFor("ccc", StatusAlive)
	}
	b.Stop()
	c.waitFor("bb", StatusSuspect)
}

func TestUDPLostTCPAnswers(t *testing.T) {
	t.Parallel()
	packets := func(packet bool, _ string) bool { return packet }
	// TCP has what is left of a probe's time to answer: most of it.
	tune := func(c *memberlist.Config) { patient(c); c.ProbeTimeout = 300 * time.Millisecond }
	a := newNode(t, nodeOptions{name: "a", fault: packets, tune: tune})
	b := newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}, fault: packets, tune: tune})
	a.waitFor("bb", StatusAlive)
	eventually(t, "the note on a member that is alive", func() bool {
		m := a.member("bb")
		return m.Note == "UDP lost, TCP answers" && m.Status == StatusAlive && b.member("a").Note != ""
	})
}

func TestWrongKeyIsRefusedOnBothSides(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a"})
	peers := filepath.Join(t.TempDir(), "peers.json")
	stranger := newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}, edit: func(o *Options) {
		o.KeyFile, o.PeersFile = keyFile(t, testKeyBytes(32)), peers
	}})
	m := a.waitFor("127.0.0.1", StatusRefused)
	if m.Other != "key" {
		t.Errorf("refused for %q", m.Other)
	}
	eventually(t, "the reason at the stranger", func() bool {
		s := stranger.JoinStatus()
		return s.String() == "alone, 0 of 1 seeds reachable" && strings.Contains(s.Error, "another gossip key")
	})
	if len(a.Members()) != 2 || len(stranger.Members()) > 2 || stranger.member("a").Name != "" {
		t.Errorf("members %+v and %+v", a.Members(), stranger.Members())
	}
	if a.counts.droppedFor("key") == 0 {
		t.Error("refusals are not counted")
	}
	eventually(t, "several tries", func() bool { return a.counts.droppedFor("key") >= 3 })
	if n := strings.Count(a.logged(), "failed to receive"); n > 1 {
		t.Errorf("%d log lines of one kind within a minute", n)
	}
	stranger.Stop()
	// The key is corrected; nothing of the wrong one was kept.
	again := newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}, edit: func(o *Options) { o.PeersFile = peers }})
	again.waitFor("a", StatusAlive)
	a.waitFor("bb", StatusAlive)
}

func TestOtherFleetIsRefused(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a"})
	other := newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}, edit: func(o *Options) { o.Fleet = "other" }})
	if m := a.waitFor("127.0.0.1", StatusRefused); m.Other != "label" {
		t.Errorf("refused for %q", m.Other)
	}
	eventually(t, "the reason at the other", func() bool { return strings.Contains(other.JoinStatus().Error, `another fleet than "other"`) })
}

func TestKeyErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		keys []string
		want string
	}{
		{[]string{testKeyBytes(15)}, "line 1: key of 15 bytes, want 16, 24 or 32"},
		{[]string{"", "# nothing"}, "holds no key"},
		{[]string{testKey, "not base64!"}, "line 2 is not base64"},
		{[]string{testKey, testKey}, "line 2 repeats an earlier key"},
		{[]string{strings.Repeat("A", 5000)}, "at most 4096"},
	} {
		_, err := New(Options{Name: "a", Fleet: "f", Role: RoleAgent, Listen: "127.0.0.1:0", KeyFile: keyFile(t, tt.keys...)})
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "mesh.key_file") {
			t.Errorf("New = %v, want %q", err, tt.want)
		}
		if err != nil && strings.Contains(err.Error(), testKey) {
			t.Error("the error shows a key")
		}
	}
}

func TestKeyRotation(t *testing.T) {
	t.Parallel()
	oldKey, newKey := testKeyBytes(32), testKeyBytes(32)
	files := []string{keyFile(t, oldKey), keyFile(t, oldKey)}
	a := newNode(t, nodeOptions{name: "a", edit: func(o *Options) { o.KeyFile = files[0] }})
	b := newNode(t, nodeOptions{name: "bb", join: []string{a.addr()}, edit: func(o *Options) { o.KeyFile = files[1] }})
	a.waitFor("bb", StatusAlive)
	for step, keys := range [][]string{{oldKey, newKey}, {newKey, oldKey}, {newKey}} {
		for i, n := range []*testNode{a, b} {
			if err := os.WriteFile(files[i], []byte(strings.Join(keys, "\n")), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := n.ReloadKeys(); err != nil {
				t.Fatalf("step %d: %v", step+1, err)
			}
		}
		want := fingerprint(must(base64.StdEncoding.DecodeString(keys[0])))
		for _, n := range []*testNode{a, b} {
			eventually(t, fmt.Sprintf("step %d: key %s seen by %s", step+1, want, n.opts.Name), func() bool {
				return n.member("a").Meta.KeyID == want && n.member("bb").Meta.KeyID == want && n.member("a").Status == StatusAlive && n.member("bb").Status == StatusAlive
			})
		}
	}
	if n := len(a.keyring.GetKeys()); n != 1 {
		t.Errorf("%d keys in use after the rotation", n)
	}
	if err := os.WriteFile(files[0], []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := a.ReloadKeys(); err == nil || len(a.keyring.GetKeys()) != 1 {
		t.Errorf("a bad file: %v, %d keys", err, len(a.keyring.GetKeys()))
	}
}
