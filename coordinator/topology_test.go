package coordinator

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/registry"
	waypostv1 "waypost/proto/waypost/v1"
)

// Without a fleet file everything is assumed, and says so; ends that are not
// there are named.
func TestTopology(t *testing.T) {
	o := startOne(t)
	a := &fakeAgent{workers: 2}
	a.start(t, o)
	client := waypostv1.NewOperatorServiceClient(o.conn)
	var got *waypostv1.GetTopologyResponse
	eventually(t, "the host is known", func() bool {
		var err error
		got, err = client.GetTopology(t.Context(), &waypostv1.GetTopologyRequest{})
		return err == nil && len(got.GetHosts()) == 1 && len(o.fleet.Snapshots()) == 2
	})
	if h := got.GetHosts()[0]; h.GetZone() != registry.DefaultZone || h.GetSource() != "assumed" || len(h.GetPulls()) != 0 {
		t.Errorf("host %v", h)
	}
	got, err := client.GetTopology(t.Context(), &waypostv1.GetTopologyRequest{From: proto.String("gpu-01"), To: proto.String("gpu-01")})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.GetLinks()) != 1 || got.GetLinks()[0].GetName() != "same host" || got.GetLinks()[0].GetBandwidthSource() != "assumed" {
		t.Errorf("links %v", got.GetLinks())
	}
	if l := got.GetLinks(); len(l) == 1 && l[0].MeasuredBytesPerSec != nil {
		t.Errorf("nobody pulled, but %v was measured", l[0].GetMeasuredBytesPerSec())
	}
	if p := got.GetPrices(); len(p) != 2 || p[0].GetReason() != "no connector" || p[0].KvBytesPerToken != nil || p[0].GetCosts()[0].TransferMs != nil || !(p[0].GetCosts()[0].GetComputeMs() > 0) {
		t.Errorf("prices %v", p)
	}
	for want, req := range map[string]*waypostv1.GetTopologyRequest{
		"from": {To: proto.String("gpu-01")},
		"to":   {From: proto.String("gpu-01"), To: proto.String("gpu-0")},
	} {
		if _, err := client.GetTopology(t.Context(), req); api.FieldOf(err) != want {
			t.Errorf("%v: %v names %q", req, err, api.FieldOf(err))
		}
	}
	_, err = client.GetTopology(t.Context(), &waypostv1.GetTopologyRequest{From: proto.String(firstWorker), To: proto.String(firstWorker)})
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "is the worker it would come from") {
		t.Errorf("a worker to itself: %v", err)
	}
	resp, err := http.Get("http://" + o.APIAddress() + "/v1/topology?from=gpu-01&to=gpu-01")
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	over := &waypostv1.GetTopologyResponse{}
	if err != nil || protojson.Unmarshal(b, over) != nil || len(over.GetPrices()) != 2 {
		t.Errorf("over HTTP: %s", b)
	}
}

// Nodes that are not known are said to be so, and placing goes on.
func TestTOP04NUMANote(t *testing.T) {
	gpu := func(i uint32, node *uint32) *waypostv1.Gpu { return &waypostv1.Gpu{Index: &i, NumaNode: node} }
	eth := func(node *uint32) *waypostv1.HostFacts {
		return &waypostv1.HostFacts{Interfaces: []*waypostv1.NetworkInterface{{Name: proto.String("eth0"), NumaNode: node}}}
	}
	for want, r := range map[string]*waypostv1.HostReport{
		"":                                     {Facts: eth(proto.Uint32(0))},
		"NUMA nodes unknown":                   {Facts: eth(nil), Gpus: []*waypostv1.Gpu{gpu(0, nil), gpu(1, nil)}},
		"NUMA nodes: GPU 0 0, GPU 1 1, eth0 1": {Facts: eth(proto.Uint32(1)), Gpus: []*waypostv1.Gpu{gpu(0, proto.Uint32(0)), gpu(1, proto.Uint32(1))}},
		"NUMA nodes: GPU 0 0; unknown: eth0":   {Facts: eth(nil), Gpus: []*waypostv1.Gpu{gpu(0, proto.Uint32(0))}},
	} {
		if got := numaNote(r); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := numaNote(nil); got != "" {
		t.Errorf("of a host that reported nothing: %q", got)
	}
}

// How GPUs reach each other is told as far as it is known; unknown is left out.
func TestWaysNote(t *testing.T) {
	report := func(n uint32, way func(a, b uint32) string) *waypostv1.HostReport {
		r := &waypostv1.HostReport{}
		for a := range n {
			g := &waypostv1.Gpu{Index: &a}
			for b := range n {
				if a != b {
					g.Ways = append(g.Ways, &waypostv1.GpuWay{To: &b, Way: proto.String(way(a, b))})
				}
			}
			r.Gpus = append(r.Gpus, g)
		}
		return r
	}
	pairs := func(a, b uint32) string {
		if a/2 == b/2 {
			return "nvlink"
		}
		return "pcie (system)"
	}
	for want, r := range map[string]*waypostv1.HostReport{
		"":                         report(1, pairs),
		"GPUs: nvlink between all": report(8, func(uint32, uint32) string { return "nvlink" }),
		"GPUs: nvlink between 0-1 2-3, pcie (system) between 0-2 0-3 1-2 1-3":        report(4, pairs),
		"GPUs: nvlink between 0-1 2-3 4-5 6-7, pcie (system) between 24 of 28 pairs": report(8, pairs),
		"GPUs: nvlink between 0-1": report(3, func(a, b uint32) string { return map[bool]string{true: "nvlink", false: "unknown"}[a+b == 1] }),
	} {
		if got := waysNote(r); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := waysNote(report(2, func(uint32, uint32) string { return "unknown" })) + waysNote(nil); got != "" {
		t.Errorf("where nothing is known: %q", got)
	}
}
