package api

import (
	"bufio"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// recordsPlacement is a fake that can be watched.
type recordsPlacement struct {
	fakePlacement
	left chan struct{}
}

// WatchPlacements tells one event and stays until the client leaves.
func (f recordsPlacement) WatchPlacements(r *waypostv1.WatchPlacementsRequest, s waypostv1.PlacementService_WatchPlacementsServer) error {
	defer close(f.left)
	if err := s.Send(&waypostv1.WatchPlacementsResponse{Kind: proto.String("placed"), Record: &waypostv1.PlacementRecord{Tenant: r.Tenant}}); err != nil {
		return err
	}
	<-s.Context().Done()
	return nil
}

func TestRecordsOverHTTP(t *testing.T) {
	s := serve(t, RoleViewer, nil)
	for _, test := range []struct {
		path, want string
		code       int
	}{
		{"/v1/placements:summary?since=10m&pool=p", `"placed":600000`, 200},
		{"/v1/reuse?since=1h&pool=p", `"requests":3600000`, 200},
		{"/v1/workers/gpu-01/vllm-8000/0:why?since=1s", `"considered":1000`, 200},
		{"/v1/workers/gpu-01/vllm-8000/0:why", `"name":"gpu-01/vllm-8000/0"`, 200},
		{"/v1/workers/gpu-01/vllm-8000/0:explode", ":why", 404},
		{"/v1/workers/gpu-01", ":why", 404},
		{"/v1/reuse?since=yesterday", "since", 400},
		{"/v1/placements:summary?sinc=1h", "sinc", 400},
		{"/v1/placements?local=true&pool=p&limit=3", `"records"`, 200},
		{"/v1/placements:watch?tenants=a", "tenants", 400},
	} {
		code, body, _ := s.do(t, http.MethodGet, test.path, "")
		if code != test.code || !strings.Contains(compact(t, body), test.want) {
			t.Errorf("%s: %d %s", test.path, code, body)
		}
	}
}

func TestWatchOverHTTP(t *testing.T) {
	left := make(chan struct{})
	s := serveWith(t, RoleViewer, recordsPlacement{left: left})
	resp, err := http.Get(s.url + "/v1/placements:watch?tenant=team-a")
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil || !strings.Contains(line, `"team-a"`) || !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/x-ndjson") {
		t.Errorf("%q, %v", line, err)
	}
	// A client that leaves ends the stream.
	if err := resp.Body.Close(); err != nil {
		t.Fatal(err)
	}
	<-left
}

func TestWatchNeedsARole(t *testing.T) {
	s := serveWith(t, RoleNone, recordsPlacement{left: make(chan struct{})})
	if code, body, _ := s.do(t, http.MethodGet, "/v1/placements:watch", ""); code != http.StatusUnauthorized {
		t.Errorf("%d %s", code, body)
	}
}
