package doctor

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/mesh"
	waypostv1 "waypost/proto/waypost/v1"
)

// lines are the checks in short, problems first.
func lines(l *List) (out []string) {
	for _, c := range l.Sorted() {
		out = append(out, fmt.Sprintf("%s %s %s", c.GetState(), c.GetCheck(), c.GetSubject()))
	}
	return out
}

func TestMeshChecks(t *testing.T) {
	alive := func(name, version, note string) mesh.Member {
		return mesh.Member{Name: name, Address: "10.0.0.2:7710", Status: mesh.StatusAlive, Note: note, Meta: mesh.Meta{Version: version}}
	}
	for _, c := range []struct {
		name    string
		members []mesh.Member
		want    []string
	}{
		{"all well", []mesh.Member{alive("gpu-02", "1", "")}, []string{"ok mesh-udp gpu-01", "ok mesh-key gpu-01", "ok version-skew gpu-01"}},
		{"a port is blocked one way", []mesh.Member{alive("gpu-02", "1", "UDP lost, TCP answers")}, []string{"problem mesh-udp gpu-02", "ok mesh-key gpu-01", "ok version-skew gpu-01"}},
		{"a wrong key", []mesh.Member{{Name: "10.0.0.9", Status: mesh.StatusRefused, Other: "key"}}, []string{"problem mesh-key 10.0.0.9", "ok mesh-udp gpu-01", "ok version-skew gpu-01"}},
		{"two versions", []mesh.Member{alive("gpu-02", "2", ""), alive("gpu-03", "1", "")}, []string{"problem version-skew gpu-02", "ok mesh-udp gpu-01", "ok mesh-key gpu-01"}},
		{"one that is gone has no say", []mesh.Member{{Name: "gpu-02", Status: mesh.StatusLost, Meta: mesh.Meta{Version: "0"}}}, []string{"ok mesh-udp gpu-01", "ok mesh-key gpu-01", "ok version-skew gpu-01"}},
	} {
		l := &List{}
		l.Mesh("gpu-01", "1", c.members)
		if diff := cmp.Diff(c.want, lines(l)); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
	}
}

func TestClockCertificateAndDisk(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	dir, few, many := t.TempDir(), 1e6, 1e12
	for _, c := range []struct {
		do   func(*List)
		want string
		say  string
	}{
		{func(l *List) { l.Clock("gpu-01", "c-1", 9*time.Second) }, "ok clock-skew gpu-01", "agrees"},
		{func(l *List) { l.Clock("gpu-01", "c-1", 10*time.Minute) }, "problem clock-skew gpu-01", "10m0s ahead of c-1's"},
		{func(l *List) { l.Clock("gpu-01", "c-1", -10*time.Minute) }, "problem clock-skew gpu-01", "10m0s behind c-1's"},
		{func(l *List) { l.Certificate("gpu-01", now.Add(30*24*time.Hour), now) }, "ok cert-expiry gpu-01", "30 days"},
		{func(l *List) { l.Certificate("gpu-01", now.Add(24*time.Hour), now) }, "problem cert-expiry gpu-01", "ends at"},
		{func(l *List) { l.Certificate("gpu-01", now.Add(-time.Hour), now) }, "problem cert-expiry gpu-01", "ended at"},
		{func(l *List) { l.Disk("gpu-01", dir, &many) }, "ok disk gpu-01", "can be written"},
		{func(l *List) { l.Disk("gpu-01", dir, nil) }, "ok disk gpu-01", "can be written"},
		{func(l *List) { l.Disk("gpu-01", dir, &few) }, "problem disk gpu-01", "1 MB free"},
		{func(l *List) { l.Disk("gpu-01", filepath.Join(dir, "none"), &many) }, "problem disk gpu-01", "cannot be written"},
	} {
		l := &List{}
		c.do(l)
		if got := lines(l); len(got) != 1 || got[0] != c.want || !strings.Contains(l.Sorted()[0].GetWhat(), c.say) {
			t.Errorf("%v, want %s with %q", l.Sorted(), c.want, c.say)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 0 {
		t.Errorf("%v is left in the state directory", left)
	}
}

func TestPortsAreTried(t *testing.T) {
	open, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := closed.Addr().String()
	closed.Close()
	l := &List{}
	l.Ports(t.Context(), "gpu-01", []Target{{"gpu-02", "mesh", open.Addr().String()}, {"c-1", "lanes", address}})
	if diff := cmp.Diff([]string{"problem ports c-1"}, lines(l)); diff != "" || !strings.Contains(l.Sorted()[0].GetWhat(), address+"/tcp (lanes) does not answer gpu-01") {
		t.Errorf("%s%v", diff, l.Sorted())
	}
	l = &List{}
	l.Ports(t.Context(), "gpu-01", []Target{{"gpu-02", "mesh", open.Addr().String()}})
	if diff := cmp.Diff([]string{"ok ports gpu-01"}, lines(l)); diff != "" {
		t.Error(diff)
	}
}

func TestTargets(t *testing.T) {
	got := Targets([]mesh.Member{
		{Name: "gpu-01", Self: true, Address: "a", Status: mesh.StatusAlive},
		{Name: "gpu-02", Address: "b", Status: mesh.StatusLost},
		{Name: "gpu-03", Address: "c", Status: mesh.StatusLeft},
		{Name: "c-1", Address: "d", Status: mesh.StatusAlive, Meta: mesh.Meta{ClusterAddress: "e"}},
	})
	if diff := cmp.Diff([]Target{{"gpu-02", "mesh", "b"}, {"c-1", "mesh", "d"}, {"c-1", "lanes", "e"}}, got); diff != "" {
		t.Error(diff)
	}
}

// What another process says is bounded, and words that are none are left out.
func TestTakeIsBounded(t *testing.T) {
	c := func(check, state string) *waypostv1.Check {
		return &waypostv1.Check{Check: &check, State: &state, What: proto.String(strings.Repeat("x", 2*maxText))}
	}
	l := &List{}
	l.Take([]*waypostv1.Check{c("disk", OK), c("nonsense", OK), c("disk", "fine"), c("lane", Problem)}, 7)
	if diff := cmp.Diff([]string{"problem lane ", "ok disk "}, lines(l)); diff != "" {
		t.Error(diff)
	}
	if k := l.Sorted()[0]; len(k.GetWhat()) != maxText || k.GetAgeMs() != 7 {
		t.Errorf("%d bytes, %v ms old", len(k.GetWhat()), k.GetAgeMs())
	}
	many := make([]*waypostv1.Check, MaxChecks+10)
	for i := range many {
		many[i] = c("disk", OK)
	}
	l = &List{}
	l.Take(many, 0)
	if n := len(l.Sorted()); n != MaxChecks {
		t.Errorf("%d checks taken", n)
	}
	l.Bad("lane", "x", "down", "", "")
	if b := l.Bounded(); len(b) != MaxChecks || b[0].GetCheck() != "lane" {
		t.Error("problems must be kept when there are too many checks")
	}
	if diff := cmp.Diff(map[string]int{"disk": 0, "lane": 1}, Problems(l.Sorted())); diff != "" {
		t.Error(diff)
	}
}

// What other programs wrote may be cut within a character, or be no text at all:
// a message that holds it can be sent all the same.
func TestTextsCanBeSent(t *testing.T) {
	l := &List{}
	l.Bad("lane", "gpu-\xff", "x"+strings.Repeat("ü", maxText), "caf\xe9", "")
	if _, err := proto.Marshal(&waypostv1.DoctorResponse{Checks: l.Sorted()}); err != nil {
		t.Fatal(err)
	}
	if c := l.Sorted()[0]; c.GetSubject() != "gpu-?" || c.GetCause() != "caf?" || len(c.GetWhat()) > maxText || !strings.HasPrefix(c.GetWhat(), "xüü") {
		t.Errorf("%q, %q, %d bytes", c.GetSubject(), c.GetCause(), len(c.GetWhat()))
	}
}
