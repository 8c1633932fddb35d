package cluster

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/identity"
	"waypost/gossip/mesh"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// scraped sums the series of a coordinator's /metrics that begin with a name and
// contain some text.
func (r *rig) scraped(coordinator int, name, label string) float64 {
	r.t.Helper()
	resp, err := r.client.Get("http://" + r.Coordinators[coordinator].APIAddress() + "/metrics")
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	sum := 0.0
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		line := lines.Text()
		if at := strings.LastIndexByte(line, ' '); strings.HasPrefix(line, name) && strings.Contains(line, label) && at > 0 {
			v, err := strconv.ParseFloat(line[at+1:], 64)
			if err != nil {
				r.t.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}

// TestRestartedCoordinatorCopiesFromItsPeer: what it knew is taken over from
// the other one, and what happened while it was down comes from the agents.
func TestRestartedCoordinatorCopiesFromItsPeer(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 3, emulator.Options{BlockTokens: faultBlock})
	before, after := ask{tokens: tokens(41, 1200)}, ask{tokens: tokens(42, 900)}
	knows := func(i, engine int, a ask, want int) {
		t.Helper()
		r.eventually(CoordinatorName(i)+" does not know", func() string {
			if got := r.expects(i, WorkerName(engine, 0), a); got != want {
				return fmt.Sprint(got)
			}
			return ""
		})
	}
	r.direct(0, before)
	r.direct(1, before)
	for _, i := range []int{0, 1} {
		knows(i, 0, before, 1184)
		knows(i, 1, before, 1184)
	}
	if err := r.StopCoordinator(1); err != nil {
		t.Fatal(err)
	}
	r.direct(0, after)
	if err := r.StartCoordinator(1); err != nil {
		t.Fatal(err)
	}
	r.eventually("its pool is not known", func() string {
		if r.worker(1, WorkerName(0, 0)) == nil || r.worker(1, WorkerName(1, 0)) == nil {
			return "no worker"
		}
		return ""
	})
	knows(1, 0, before, 1184)
	knows(1, 1, before, 1184)
	knows(1, 0, after, 896)
	if n := r.scraped(1, "waypost_prefix_bytes_total", `source="peer"`); n < 50 {
		t.Errorf("%v bytes from the peer", n)
	}
	if n := r.scraped(1, "waypost_prefix_pulls_total", `source="peer"`); n < 2 {
		t.Errorf("%v copies asked for", n)
	}
}

// TestOnlyCoordinatorsCopyPrefixes: the peer service is for the coordinator role.
func TestOnlyCoordinatorsCopyPrefixes(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: faultBlock})
	for who, want := range map[string]codes.Code{"agent-" + HostName(0): codes.PermissionDenied, "coordinator-" + CoordinatorName(0): codes.OK} {
		src, err := identity.Open(identity.Options{Files: identity.Files{CA: r.Cert("ca.pem"), Cert: r.Cert(who + ".pem"), Key: r.Cert(who + ".key")}})
		if err != nil {
			t.Fatal(err)
		}
		creds := credentials.NewTLS(src.Client(identity.ClientOptions{Accept: []identity.Role{identity.RoleCoordinator}, Protocols: []string{"h2"}}))
		conn, err := grpc.NewClient("passthrough:///"+r.Coordinators[0].ClusterAddress(), grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		stream, err := waypostv1.NewPeerServiceClient(conn).CopyPrefixes(t.Context(), &waypostv1.CopyPrefixesRequest{Worker: proto.String(WorkerName(0, 0))})
		if err == nil {
			_, err = stream.Recv()
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		if status.Code(err) != want {
			t.Errorf("%s: %v, want %v", who, err, want)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestSketchesReachTheMesh: any member hears what a host holds, without a lane.
func TestSketchesReachTheMesh(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: faultBlock})
	a := ask{tokens: tokens(43, 1200)}
	r.direct(0, a)
	m := r.listener()
	r.eventually("no sketch of the host with its hottest prefix", func() string {
		for _, s := range m.Sketches() {
			if s.Name != HostName(0) {
				continue
			}
			sk, err := summary.ParseSketch(s.Payload)
			if err != nil {
				t.Fatal(err)
			}
			key := r.prefixKey(t, a.tokens, 1024)
			for _, w := range sk.Workers {
				if w.Name == EngineName+"/0" && w.State == summary.SketchReady && len(w.Roots) > 0 && w.Roots[0] == (summary.Root{Key: key, DepthTokens: 1024}) {
					return ""
				}
			}
			return fmt.Sprintf("%+v", sk)
		}
		return "none"
	})
}

// listener is a member of the mesh that hears what hosts say of themselves.
func (r *rig) listener() *mesh.Mesh {
	r.t.Helper()
	m, err := mesh.New(mesh.Options{
		Name: "listener", Fleet: "dev", Role: mesh.RoleAgent, Process: 9, Listen: "127.0.0.1:0", KeyFile: r.Cert("mesh.key"),
		Join: []string{r.Coordinators[0].MeshAddress()}, Local: true,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := m.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := m.Stop(); err != nil {
			r.t.Error(err)
		}
	})
	return m
}

// prefixKey names a prefix of a prompt as this fleet does.
func (r *rig) prefixKey(t *testing.T, tokens []uint32, depth int) prefix.Key {
	t.Helper()
	var p prefix.Probe
	b, err := os.ReadFile(r.Cert("prefix.key"))
	if err != nil {
		t.Fatal(err)
	}
	secret, err := prefix.ParseClusterKey(b)
	if err != nil {
		t.Fatal(err)
	}
	p.ResetTokens(tokens, prefix.NewKeyer(secret, prefix.Domain{Model: "Llama-3.1-8B"}))
	k, ok := p.At(depth)
	if !ok {
		t.Fatal("no key")
	}
	return k
}
