package coordinator

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// readiness asks a coordinator by HTTP and by gRPC.
func (o *one) readiness(t *testing.T) (ready bool, said string, serving bool) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+o.APIAddress()+"/readyz?verbose", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	h, err := healthpb.NewHealthClient(o.conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode == http.StatusOK, string(b), h.GetStatus() == healthpb.HealthCheckResponse_SERVING
}

// A coordinator without lanes is not ready while another one has them, and says
// so; when nobody has any, or both do, nothing is held against it.
func TestSilentLanesAreNotReady(t *testing.T) {
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	first := startOne(t)
	eventually(t, "the first is a cluster", first.Joined)
	second := startOneOf(t, "c-2", first)
	eventually(t, "the second joined it", second.Joined)
	eventually(t, "they tell each other", func() bool { return first.exchange.Connected() == 1 && second.exchange.Connected() == 1 })
	if ready, said, _ := second.readiness(t); !ready {
		t.Errorf("without any host: %s", said)
	}

	agent := &fakeAgent{workers: 1}
	agent.connect(t, first)
	eventually(t, "the second says that it hears nobody", func() bool {
		ready, said, serving := second.readiness(t)
		return !ready && !serving && strings.Contains(said, "own lanes are silent: 0 hosts are heard here, 1 by another coordinator")
	})
	if ready, said, _ := first.readiness(t); !ready {
		t.Errorf("the one with the lane: %s", said)
	}
	resp, err := waypostv1.NewOperatorServiceClient(second.conn).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, p := range resp.GetProblems() {
		found = found || p.GetSubject() == "c-2" && strings.HasPrefix(p.GetWhat(), "own lanes are silent")
	}
	if !found {
		t.Errorf("status says nothing of it: %v", resp.GetProblems())
	}

	if err := agent.dialer.SetAddresses(lane.FromConfig, []string{first.ClusterAddress(), second.ClusterAddress()}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second has a lane and is ready", func() bool {
		ready, said, serving := second.readiness(t)
		return ready && serving && strings.Contains(said, "lanes: ok")
	})
}

// What counts is the best of the peers, as long as its word is fresh.
func TestHearing(t *testing.T) {
	h, now := newHearing(), time.Unix(1000, 0)
	a, b := h.of("c-2"), h.of("c-3")
	if got := h.silent(now, 0); got != "" {
		t.Errorf("before any word: %s", got)
	}
	h.told(a, 10, now)
	h.told(b, 3, now)
	for _, c := range []struct {
		heard  int
		silent bool
	}{{0, true}, {4, true}, {5, false}, {10, false}} {
		if got := h.silent(now, c.heard); got != "" != c.silent {
			t.Errorf("%d heard: %q", c.heard, got)
		}
	}
	if got := h.silent(now, 1); !strings.Contains(got, "10 by c-2") {
		t.Errorf("says %q", got)
	}
	h.end(a)
	if got := h.silent(now, 1); !strings.Contains(got, "3 by c-3") {
		t.Errorf("after the first is gone: %q", got)
	}
	if got := h.silent(now.Add(toldWithin+1), 1); got != "" {
		t.Errorf("an old word: %q", got)
	}
	if got := peerName(context.Background()); got != "another coordinator" {
		t.Errorf("a caller without a certificate: %q", got)
	}
}

// A host is heard as long as its lane brought a frame lately, however long it is
// up: one that is silent does not make a coordinator ready.
func TestHeardHosts(t *testing.T) {
	began := time.Unix(1000, 0)
	h := &lanes{c: &Coordinator{began: began}, hosts: map[string]*hostLane{"never": {}}}
	for host, at := range map[string]time.Duration{"lately": 100 * time.Second, "silent": 90 * time.Second, "just so": 96 * time.Second} {
		h.hosts[host] = &hostLane{}
		h.hosts[host].heardNs.Store(int64(at))
	}
	if n := h.heardHosts(began.Add(96*time.Second + heardWithin)); n != 2 {
		t.Errorf("%d hosts are heard, want 2", n)
	}
}
