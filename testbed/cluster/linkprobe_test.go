package cluster

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// TestProbeLink has two agents measure the way between them over real sockets,
// both ways, through their mesh ports. Placements go on, and no price changes.
func TestProbeLink(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 1, emulator.Options{BlockTokens: 16})
	probe := func(from, to int) (*waypostv1.ProbeLinkResponse, error) {
		return r.Operator(0).ProbeLink(t.Context(), &waypostv1.ProbeLinkRequest{
			From: proto.String(HostName(from)), To: proto.String(WorkerName(to, 0)), MaxBytes: proto.Float64(8 << 20), MaxMs: proto.Float64(5000),
		})
	}
	for _, way := range [][2]int{{0, 1}, {1, 0}} {
		var p *waypostv1.ProbeLinkResponse
		// An agent may not have heard of the other one yet.
		r.eventually("the way is not measured", func() string {
			var err error
			if p, err = probe(way[0], way[1]); err != nil {
				return err.Error()
			}
			return ""
		})
		if p.GetBytes() < 1 || p.GetBytes() > 8<<20 || !(p.GetTookMs() > 0) || !(p.GetAnswerMs() > 0) || p.GetFrom() != HostName(way[0]) || p.GetTo() != HostName(way[1]) || p.GetLink().GetBandwidthSource() != "assumed" {
			t.Errorf("measured %v", p)
		}
	}
	topo := r.topology(&waypostv1.GetTopologyRequest{})
	if len(topo.GetPairs()) != 0 || topo.GetLinks()[0].MeasuredPulls != nil {
		t.Errorf("a probe became a measured pull: %v", topo)
	}
	if _, err := r.place(0, ask{tokens: tokens(1, 100)}); err != nil {
		t.Error(err)
	}
	if err := r.StopAgent(1); err != nil {
		t.Fatal(err)
	}
	r.eventually("the stopped host is still asked", func() string {
		if _, err := probe(0, 1); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "has no lane") {
			return "answered " + status.Code(err).String()
		}
		return ""
	})
}
