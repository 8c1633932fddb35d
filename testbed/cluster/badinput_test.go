package cluster

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/identity"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// memory is the live heap after a collection and the most that the heap ever
// took from the system.
type memory struct{ live, most uint64 }

func heap() memory {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return memory{m.HeapAlloc, m.HeapSys}
}

// boundedHeap wants the heap not to have grown by more than bounds that are far
// below what was sent: an agent may hold a message of 64 MiB for each of an
// engine's sockets, and other tests run in this process as well.
func boundedHeap(t *testing.T, before memory) {
	t.Helper()
	const live, most = 512 << 20, 1 << 30
	if after := heap(); after.live > before.live+live || after.most > before.most+most {
		t.Errorf("the live heap grew from %d to %d bytes, its most from %d to %d", before.live, after.live, before.most, after.most)
	}
}

// undisturbed wants every placement of a background load to have been given.
func (b *background) undisturbed(t *testing.T) {
	t.Helper()
	b.stop()
	if _, placed := b.count(); len(b.failed) > 0 || placed == 0 {
		t.Errorf("%d of %d placements failed: %v", len(b.failed), placed, b.failed)
	}
}

// TestBadRequests: each names the field, and the next good request is served.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: 16})
	for _, c := range []struct {
		name   string
		body   string
		status int
		field  string
		texts  []string
	}{
		{"unknown pool", `{"pool":"nowhere","input":{"tokenIds":[1,2]}}`, 404, "pool", []string{"nowhere", "Llama-3.1-8B"}},
		{"no input", `{}`, 400, "input", []string{"missing or empty", "tokenIds"}},
		{"empty token ids", `{"input":{"tokenIds":[]}}`, 400, "input", []string{"empty"}},
		{"empty text", `{"input":{"prompt":""}}`, 400, "input.prompt", []string{"empty"}},
		{"token id of 2^32", `{"input":{"tokenIds":[1,4294967296]}}`, 400, "input.token_ids[1]", []string{"4294967296", "4294967295"}},
		{"negative token id", `{"input":{"tokenIds":[-1]}}`, 400, "input.token_ids[0]", []string{"-1"}},
		{"token id with a fraction", `{"input":{"tokenIds":[1.5]}}`, 400, "input.token_ids[0]", []string{"1.5"}},
		{"two forms", `{"input":{"tokenIds":[1],"prompt":"x"}}`, 400, "input", []string{"more than one form"}},
		{"unknown field", `{"input":{"tokenIds":[1]},"tennant":"a"}`, 400, "", []string{"tennant"}},
		{"not JSON", `{"input":`, 400, "", nil},
		{"deep nesting", `{"input":` + strings.Repeat("[", 100_000), 400, "", nil},
		{"budget below 0", `{"input":{"tokenIds":[1]},"firstTokenBudgetMs":-5}`, 400, "first_token_budget_ms", []string{"-5"}},
		{"unknown explain", `{"input":{"tokenIds":[1]},"explain":"all"}`, 400, "explain", []string{"none, terms or full"}},
		{"attempt 0", `{"input":{"tokenIds":[1]},"attempt":0}`, 400, "attempt", nil},
		{"too big", `{"input":{"prompt":"` + strings.Repeat("x", 5<<20) + `"}}`, 413, "body", []string{"4194304"}},
		{"key of another cluster", `{"input":{"prefixKeys":{"keyId":"00000000","promptTokens":1000,"checkpoints":["0011223344556677"]}}}`, 400, "input.prefix_keys.key_id", []string{"00000000"}},
	} {
		resp, err := r.client.Post("http://"+r.API(0)+"/v1/place", "application/json", strings.NewReader(c.body))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		raw, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		var problem struct{ Field, Detail, Title string }
		if err := json.Unmarshal(raw, &problem); err != nil || resp.StatusCode != c.status || (c.field != "" && problem.Field != c.field) {
			t.Errorf("%s: %d, field %q, want %d, %q (%v): %.300s", c.name, resp.StatusCode, problem.Field, c.status, c.field, err, raw)
		}
		for _, text := range c.texts {
			if !strings.Contains(problem.Detail, text) {
				t.Errorf("%s: %q is not in %q", c.name, text, problem.Detail)
			}
		}
	}
	for _, c := range []struct {
		name string
		req  *waypostv1.PlaceRequest
		code codes.Code
	}{
		{"unknown pool", &waypostv1.PlaceRequest{Pool: proto.String("nowhere"), Input: &waypostv1.Input{TokenIds: []uint32{1}}}, codes.NotFound},
		{"empty", &waypostv1.PlaceRequest{}, codes.InvalidArgument},
		{"odd bytes", &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIdsLe: []byte{1, 2, 3}}}, codes.InvalidArgument},
		{"long name", &waypostv1.PlaceRequest{Tenant: proto.String(strings.Repeat("t", 1000)), Input: &waypostv1.Input{TokenIds: []uint32{1}}}, codes.InvalidArgument},
		{"too big", &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIdsLe: make([]byte, 8<<20)}}, codes.ResourceExhausted},
	} {
		if _, err := r.Placement(0).Place(t.Context(), c.req); status.Code(err) != c.code {
			t.Errorf("gRPC, %s: %v, want %s", c.name, err, c.code)
		}
	}
	if _, err := r.place(0, ask{tokens: tokens(1, 100)}); err != nil {
		t.Error(err)
	}
}

// stranger is a way to knock on a port.
type stranger struct {
	name  string
	knock func(network, address string)
}

// strangers are the ways that anybody can try; those with certificates use
// ones of the fleet that are for something else.
func (c *Cluster) strangers(t *testing.T) []stranger {
	dial := func(network, address string) net.Conn {
		conn, err := net.DialTimeout(network, address, patience)
		if err != nil {
			t.Errorf("%s %s: %v", network, address, err)
			return nil
		}
		// What is not answered is given up.
		_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
		return conn
	}
	bytesOf := func(b []byte) func(network, address string) {
		return func(network, address string) {
			conn := dial(network, address)
			if conn == nil {
				return
			}
			defer conn.Close()
			if _, err := conn.Write(b); err == nil {
				_, _ = io.Copy(io.Discard, io.LimitReader(conn, 1<<20))
			}
		}
	}
	secured := func(cfg *tls.Config) func(network, address string) {
		return func(network, address string) {
			conn := dial(network, address)
			if conn == nil {
				return
			}
			defer conn.Close()
			s := tls.Client(conn, cfg)
			if s.Handshake() == nil {
				_, _ = s.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
				_, _ = io.Copy(io.Discard, io.LimitReader(s, 1<<20))
			}
		}
	}
	withCert := func(role string, protocol string) func(network, address string) {
		cfg, err := identity.APIClient(c.Cert("ca.pem"), c.Cert(role+".pem"), c.Cert(role+".key"))
		if err != nil {
			t.Fatal(err)
		}
		cfg.NextProtos = []string{protocol}
		return secured(cfg)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 4<<20)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	return []stranger{
		{"nothing", bytesOf(nil)},
		{"a few random bytes", bytesOf(noise[:100])},
		{"many random bytes", bytesOf(noise)},
		{"zeros", bytesOf(make([]byte, 1<<20))},
		{"HTTP", bytesOf([]byte("GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"))},
		{"HTTP with an endless header", bytesOf(append([]byte("GET / HTTP/1.1\r\nX: "), bytes.Repeat([]byte("a"), 1<<20)...))},
		{"a Raft preface in clear", bytesOf([]byte("waypost-raft\n\x00\x00\x00\x00"))},
		{"TLS without a certificate", secured(&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})},
		{"TLS of nobody's CA", secured(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{selfSigned(t)}})},
		{"a viewer's certificate", withCert("viewer", "h2")},
		{"an agent's certificate for Raft", withCert("agent-"+HostName(0), "raft")},
		{"an unknown protocol", withCert("agent-"+HostName(0), "smtp")},
	}
}

// selfSigned is a certificate of a CA of its own.
func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	dir := t.TempDir()
	if _, err := identity.WriteDevCerts(dir, []string{HostName(0)}, []string{CoordinatorName(0)}); err != nil {
		t.Fatal(err)
	}
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "agent-"+HostName(0)+".pem"), filepath.Join(dir, "agent-"+HostName(0)+".key"))
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// knockAll lets every stranger try every door at once, several times.
func knockAll(list []stranger, doors map[string]string) {
	done := make(chan struct{})
	n := 0
	for address, network := range doors {
		for _, s := range list {
			n++
			go func() {
				for range 3 {
					s.knock(network, address)
				}
				done <- struct{}{}
			}()
		}
	}
	for range n {
		<-done
	}
}

// TestStrangersOnEveryPort: nobody who does not belong disturbs placements,
// lanes or the cluster, or costs memory.
func TestStrangersOnEveryPort(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for connections that nobody answers; left out with -short")
	}
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: 16})
	a, w := ask{tokens: tokens(3, 1000)}, WorkerName(0, 0)
	r.serve(0, a)
	r.settled(w, a, 1000, 16)
	before := heap()
	b := r.background(1, 0, 1, 2)
	doors := map[string]string{r.Agents[0].MeshAddress(): "tcp", r.Agents[0].SocketPath(): "unix"}
	for i, co := range r.Coordinators {
		doors[r.ClusterAddress(i)], doors[r.API(i)], doors[co.MeshAddress()] = "tcp", "tcp", "tcp"
	}
	list := r.strangers(t)
	knockAll(list, doors)
	for _, co := range r.Coordinators { // UDP of the gossip
		conn, err := net.Dial("udp", co.MeshAddress())
		if err != nil {
			t.Fatal(err)
		}
		for i := range 300 {
			// Full buffers lose what nobody wants anyway.
			_, _ = conn.Write(bytes.Repeat([]byte{byte(i)}, 1+i*4))
		}
		conn.Close()
	}
	b.undisturbed(t)
	boundedHeap(t, before)
	if err := r.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
	if err := r.WaitCluster(t.Context()); err != nil {
		t.Error(err)
	}
	for i := range 3 {
		if got := r.expects(i, w, a); got != 992 {
			t.Errorf("%s: %d tokens expected afterwards", CoordinatorName(i), got)
		}
		// A machine that is busy may suspect a living one for a moment.
		r.eventually(CoordinatorName(i)+" does not see four living members and nobody else", func() string {
			resp, err := r.Operator(i).ListMembers(t.Context(), &waypostv1.ListMembersRequest{})
			if err != nil {
				return err.Error()
			}
			alive, others := 0, 0
			for _, m := range resp.GetMembers() {
				if m.GetStatus() == "alive" && m.GetRole() != "" {
					alive++
				} else if !strings.HasPrefix(m.GetStatus(), "refused") {
					others++
				}
			}
			if alive != 4 || others != 0 {
				return fmt.Sprint(resp.GetMembers())
			}
			return ""
		})
		http, err := r.client.Get(fmt.Sprintf("http://%s/healthz", r.API(i)))
		if err != nil || http.StatusCode != 200 {
			t.Errorf("health of %s: %v", CoordinatorName(i), err)
			continue
		}
		http.Body.Close()
	}
}
