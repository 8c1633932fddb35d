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
		{"/v1/watch?kinds=placements&tenants=a", "tenants", 400},
		{"/v1/watch", "kinds", 400},
		{"/v1/watch?kinds=workers,placements", "kinds=placements alone", 400},
		{"/v1/watch?kinds=workers&tenant=a", "tenant", 400},
	} {
		code, body, _ := s.do(t, http.MethodGet, test.path, "")
		if code != test.code || !strings.Contains(compact(t, body), test.want) {
			t.Errorf("%s: %d %s", test.path, code, body)
		}
	}
}

func TestWatchOverHTTP(t *testing.T) {
	for _, test := range []struct{ accept, media, begin, next string }{
		{"", "application/x-ndjson", `{"`, ""},
		{"text/event-stream", "text/event-stream", `data: {"`, "\n"},
	} {
		left := make(chan struct{})
		s := serveWith(t, RoleViewer, recordsPlacement{left: left})
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+"/v1/watch?kinds=placements&tenant=team-a", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", test.accept)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(resp.Body)
		line, err := in.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, test.begin) || !strings.Contains(line, `"team-a"`) || resp.Header.Get("Content-Type") != test.media {
			t.Errorf("%q of %q, %v", line, resp.Header.Get("Content-Type"), err)
		}
		if test.next != "" {
			if next, err := in.ReadString('\n'); err != nil || next != test.next {
				t.Errorf("then %q, %v", next, err)
			}
		}
		// A client that leaves ends the stream.
		if err := resp.Body.Close(); err != nil {
			t.Fatal(err)
		}
		<-left
	}
}

func TestWatchNeedsARole(t *testing.T) {
	s := serveWith(t, RoleNone, recordsPlacement{left: make(chan struct{})})
	if code, body, _ := s.do(t, http.MethodGet, "/v1/watch?kinds=placements", ""); code != http.StatusUnauthorized {
		t.Errorf("%d %s", code, body)
	}
}
