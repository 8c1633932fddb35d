package oneport

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"

	"waypost/gossip/identity"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench is a port with a server behind each protocol.
type bench struct {
	t        *testing.T
	port     *Port
	reg      *prometheus.Registry
	grpcPeer chan *peer.Peer
}

func (b *bench) addr() string { return b.port.Addr().String() }

func start(t *testing.T, opts Options) *bench {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, reg: prometheus.NewRegistry(), grpcPeer: make(chan *peer.Peer, 16)}
	opts.Listener, opts.Registerer, opts.Name = ln, b.reg, "test"
	if opts.Protocols == nil {
		opts.Protocols = []Protocol{GRPC, HTTP, Raft}
	}
	if b.port, err = New(opts); err != nil {
		t.Fatal(err)
	}
	b.port.Start()
	t.Cleanup(func() { b.port.Close() })
	b.serve()
	return b
}

func (b *bench) serve() {
	gs := grpc.NewServer(grpc.Creds(Credentials()), grpc.UnaryInterceptor(
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			p, _ := peer.FromContext(ctx)
			b.grpcPeer <- p
			return h(ctx, req)
		}))
	grpc_health_v1.RegisterHealthServer(gs, health.NewServer())
	go gs.Serve(b.port.Listener(GRPC))
	b.t.Cleanup(gs.Stop)

	hs := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who := "clear"
		if r.TLS != nil {
			role, name, err := identity.PeerOf(*r.TLS)
			who = fmt.Sprintf("%s/%s %v", role, name, err)
		}
		fmt.Fprintf(w, "%s %s %s", r.Proto, r.URL.Path, who)
	})}
	go hs.Serve(b.port.Listener(HTTP))
	b.t.Cleanup(func() { hs.Close() })

	raft := b.port.Listener(Raft)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := raft.Accept()
			if err != nil {
				return
			}
			line, _ := bufio.NewReader(c).ReadString('\n')
			fmt.Fprintf(c, "raft got %s", line)
			c.Close()
		}
	}()
	b.t.Cleanup(func() { raft.Close(); <-done })
}

func (b *bench) refused(reason string) float64 {
	return testutil.ToFloat64(b.port.metrics.refusals.WithLabelValues("test", reason))
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func (b *bench) callGRPC(creds credentials.TransportCredentials) (*peer.Peer, error) {
	b.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+b.addr(), grpc.WithTransportCredentials(creds))
	if err != nil {
		b.t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{}); err != nil {
		return nil, err
	}
	return <-b.grpcPeer, nil
}

func (b *bench) getHTTP(client *http.Client, scheme string) string {
	b.t.Helper()
	defer client.CloseIdleConnections()
	resp, err := client.Get(scheme + "://" + b.addr() + "/x")
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return string(body)
}

func (b *bench) sayRaft(c net.Conn, preface string) string {
	b.t.Helper()
	defer c.Close()
	fmt.Fprintf(c, "%shello\n", preface)
	answer, err := io.ReadAll(c)
	if err != nil {
		b.t.Fatal(err)
	}
	return string(answer)
}

func (b *bench) dial() net.Conn {
	b.t.Helper()
	c, err := net.Dial("tcp", b.addr())
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

// closedByPort waits until the port closes a connection.
func closedByPort(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(time.Minute))
	_, err := io.Copy(io.Discard, c)
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		t.Fatal("connection stays open")
	}
	c.Close()
}

func TestClearProtocols(t *testing.T) {
	b := start(t, Options{})
	p, err := b.callGRPC(insecure.NewCredentials())
	if err != nil {
		t.Fatal(err)
	}
	if p.AuthInfo.AuthType() != "insecure" {
		t.Errorf("auth type %q in clear", p.AuthInfo.AuthType())
	}
	if got := b.getHTTP(&http.Client{Transport: &http.Transport{}}, "http"); got != "HTTP/1.1 /x clear" {
		t.Errorf("HTTP answered %q", got)
	}
	if got := b.sayRaft(b.dial(), RaftPreface); got != "raft got hello\n" {
		t.Errorf("Raft answered %q", got)
	}
	if n := testutil.ToFloat64(b.port.metrics.connections.WithLabelValues("test", string(GRPC))); n != 1 {
		t.Errorf("%v gRPC connections counted, want 1", n)
	}
}

func sources(t *testing.T) (server, client *identity.Source) {
	t.Helper()
	dir := t.TempDir()
	if _, err := identity.WriteDevCerts(dir, []string{"gpu-01"}, []string{"c-gpu-01"}); err != nil {
		t.Fatal(err)
	}
	open := func(base string) *identity.Source {
		s, err := identity.Open(identity.Options{Files: identity.Files{CA: filepath.Join(dir, "ca.pem"), Cert: filepath.Join(dir, base+".pem"), Key: filepath.Join(dir, base+".key")}})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	return open("coordinator-c-gpu-01"), open("agent-gpu-01")
}

func TestTLSProtocols(t *testing.T) {
	server, client := sources(t)
	b := start(t, Options{TLS: server.Server(identity.ServerOptions{Accept: []identity.Role{identity.RoleAgent}})})
	want := identity.ClientOptions{Accept: []identity.Role{identity.RoleCoordinator}}

	p, err := b.callGRPC(credentials.NewTLS(client.Client(want)))
	if err != nil {
		t.Fatal(err)
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		t.Fatalf("gRPC server sees %T, want the TLS state", p.AuthInfo)
	}
	if role, name, err := identity.PeerOf(info.State); role != identity.RoleAgent || name != "gpu-01" || err != nil {
		t.Errorf("gRPC server sees %s/%s, %v", role, name, err)
	}
	if info.SecurityLevel != credentials.PrivacyAndIntegrity {
		t.Errorf("security level %v", info.SecurityLevel)
	}

	// A browser or curl offers h2 as well and must still reach HTTP.
	for _, protocols := range [][]string{{"h2", "http/1.1"}, {"http/1.1"}, nil} {
		cfg := client.Client(want)
		cfg.NextProtos = protocols
		hc := &http.Client{Transport: &http.Transport{TLSClientConfig: cfg}}
		if got := b.getHTTP(hc, "https"); got != "HTTP/1.1 /x agent/gpu-01 <nil>" {
			t.Errorf("offering %v, HTTP answered %q", protocols, got)
		}
	}

	cfg := client.Client(want)
	cfg.NextProtos = []string{string(Raft)}
	c, err := tls.Dial("tcp", b.addr(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.sayRaft(c, ""); got != "raft got hello\n" {
		t.Errorf("Raft answered %q", got)
	}

	cfg = client.Client(want)
	cfg.NextProtos = []string{"other/1"}
	if c, err := tls.Dial("tcp", b.addr(), cfg); err == nil {
		c.Close()
		t.Error("a protocol that is not served was agreed")
	}
}

func TestUnservedProtocolIsRefused(t *testing.T) {
	b := start(t, Options{})
	p := b.port
	delete(p.subs, Raft)
	c := b.dial()
	fmt.Fprint(c, RaftPreface)
	closedByPort(t, c)
	eventually(t, "refusal counted", func() bool { return b.refused(reasonUnknown) == 1 })
}

func TestStrangersAreClosedAndCounted(t *testing.T) {
	b := start(t, Options{DecideTimeout: time.Minute})
	for _, hello := range []string{"\x16\x03\x01\x02\x00\x01", "SSH-2.0-x\r\n", "\x00", "PRI * HTTP/3", "GETX", "waypost-raft/2\n"} {
		c := b.dial()
		io.WriteString(c, hello)
		closedByPort(t, c)
	}
	eventually(t, "six strangers counted", func() bool { return b.refused(reasonUnknown) == 6 })
	hasty := start(t, Options{DecideTimeout: 200 * time.Millisecond})
	for _, hello := range []string{"", "G", "PRI * HTT", "waypost-raft/1"} { // says too little and waits
		c := hasty.dial()
		io.WriteString(c, hello)
		closedByPort(t, c)
	}
	eventually(t, "four silent ones counted", func() bool { return hasty.refused(reasonTimeout) == 4 })
	if got := b.getHTTP(&http.Client{Transport: &http.Transport{}}, "http"); !strings.HasPrefix(got, "HTTP/1.1") {
		t.Errorf("HTTP answered %q afterwards", got)
	}
}

func TestRandomBytesOnTLSPort(t *testing.T) {
	server, client := sources(t)
	b := start(t, Options{TLS: server.Server(identity.ServerOptions{Accept: []identity.Role{identity.RoleAgent}}), DecideTimeout: 300 * time.Millisecond})
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		c := b.dial()
		junk := make([]byte, 1+rng.IntN(300))
		for i := range junk {
			junk[i] = byte(rng.Uint32())
		}
		c.Write(junk)
		closedByPort(t, c)
	}
	eventually(t, "all strangers counted", func() bool { return b.refused(reasonBroken)+b.refused(reasonTimeout) == 50 })
	eventually(t, "gRPC afterwards", func() bool { // within the same short time, which a busy machine may need twice
		_, err := b.callGRPC(credentials.NewTLS(client.Client(identity.ClientOptions{Accept: []identity.Role{identity.RoleCoordinator}})))
		return err == nil
	})
}

func TestSilentCrowdDoesNotKeepOthersOut(t *testing.T) {
	// The deadline is far away: only the bound makes room.
	b := start(t, Options{DecideTimeout: time.Hour, MaxUndecided: 8})
	var crowd []net.Conn
	for range 40 {
		crowd = append(crowd, b.dial())
	}
	eventually(t, "32 crowded out", func() bool { return b.refused(reasonCrowded) == 32 })
	if _, err := b.callGRPC(insecure.NewCredentials()); err != nil {
		t.Errorf("gRPC beside a silent crowd: %v", err)
	}
	b.port.mu.Lock()
	n := b.port.undecided.Len()
	b.port.mu.Unlock()
	if n > 8 {
		t.Errorf("%d undecided connections, want at most 8", n)
	}
	for _, c := range crowd {
		c.Close()
	}
}

func TestNobodyAcceptsIsBounded(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := New(Options{Listener: ln, Protocols: []Protocol{HTTP}, Name: "idle"})
	if err != nil {
		t.Fatal(err)
	}
	p.Start()
	var conns []net.Conn
	for range backlog + 10 {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "GET / HTTP/1.1\r\n")
		conns = append(conns, c)
	}
	eventually(t, "ten refused", func() bool {
		return testutil.ToFloat64(p.metrics.refusals.WithLabelValues("idle", reasonOverflow)) == 10
	})
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	for _, c := range conns { // waiting ones are closed with the port
		closedByPort(t, c)
	}
	if _, err := p.Listener(HTTP).Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
}

func TestNewRefusesBadOptions(t *testing.T) {
	loopback, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer loopback.Close()
	everywhere, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer everywhere.Close()
	all := []Protocol{GRPC}
	for _, tt := range []struct {
		opts Options
		want string
	}{
		{Options{Protocols: all}, "no listener"},
		{Options{Listener: loopback}, "no protocol"},
		{Options{Listener: loopback, Protocols: []Protocol{"h3"}}, `unknown protocol "h3"`},
		{Options{Listener: loopback, Protocols: all, MaxUndecided: -1}, "negative limit"},
		{Options{Listener: everywhere, Protocols: all}, "is not on loopback and there is no TLS"},
	} {
		if _, err := New(tt.opts); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("New = %v, want %q", err, tt.want)
		}
	}
}

func FuzzMatch(f *testing.F) {
	for _, s := range []string{"", "G", "GET /", "PRI * HTTP/2.0\r\n", RaftPreface, "\x16\x03"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, head []byte) {
		proto, possible := match(head)
		if proto != "" && !possible {
			t.Fatalf("match(%q) = %q, but impossible", head, proto)
		}
		// Deciding early must agree with deciding late, and takes at most a preface.
		if len(head) >= len(grpcPreface) && proto == "" && possible {
			t.Fatalf("match(%q) still undecided", head)
		}
		for i := range head {
			if p, ok := match(head[:i]); p != "" && p != proto || !ok && possible {
				t.Fatalf("match(%q) = %q, %v; match(%q) = %q, %v", head[:i], p, ok, head, proto, possible)
			}
		}
	})
}
