package coordinator

import (
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"waypost/coordinator/prefixindex"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// startBench runs a coordinator with a number of workers that hold parts of
// the prompts' common prefix.
func startBench(b *testing.B, workers int) *one {
	b.Helper()
	o := startOne(b)
	a := &fakeAgent{workers: workers, every: 200 * time.Millisecond}
	a.start(b, o)
	ready := 0
	eventually(b, "workers ready and a member of the cluster", func() bool {
		ready = 0
		for _, w := range o.fleet.Workers(time.Now()) {
			if w.State == "ready" {
				ready++
			}
		}
		return ready == workers && o.number.Load() != 0
	})
	prompt := benchPrompt(0)
	var probe prefix.Probe
	probe.ResetTokens(prompt, o.keyers.of(prefix.Domain{Model: testModel}))
	for i, w := range o.fleet.Workers(time.Now()) {
		sink := o.index.WorkerSink(prefixindex.WorkerID(w.ID))
		if i%3 > 0 {
			continue
		}
		depth := 16 * (33 + i%24)
		first, _ := probe.Checkpoint(1)
		end, _ := probe.At(depth)
		checkpoint := summary.CheckpointKey(0, prefix.ChunkTokens, first)
		sink.AddCheckpoint(checkpoint, 0, prefix.ChunkTokens)
		sink.AddPoint(summary.PointKey(checkpoint, uint32(depth), end), checkpoint, uint32(depth), false)
	}
	return o
}

// benchPrompt is 1,000 tokens, the first 900 of them equal for all n.
func benchPrompt(n int) []uint32 {
	out := make([]uint32, 1000)
	for i := range out {
		out[i] = uint32(i*7 + 11)
	}
	for i := 900; i < 1000; i++ {
		out[i] = uint32(n + i)
	}
	return out
}

// BenchmarkPlaceGRPC places prompts of 1,000 token ids over loopback: 100
// workers, 32 callers.
func BenchmarkPlaceGRPC(b *testing.B) {
	for _, reserve := range []bool{false, true} {
		b.Run(fmt.Sprintf("reserve=%v", reserve), func(b *testing.B) {
			o := startBench(b, 100)
			conn, err := grpc.NewClient("passthrough:///"+o.APIAddress(), grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			client := waypostv1.NewPlacementServiceClient(conn)
			b.ReportAllocs()
			b.SetParallelism(max(1, 32/runtime.GOMAXPROCS(0)))
			used := cpuTime(b)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				req := &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: benchPrompt(1)}, Reserve: &reserve}
				for pb.Next() {
					resp, err := client.Place(b.Context(), req)
					if err != nil || resp.GetPlacement() == nil {
						b.Errorf("%v %v", resp, err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "places/s")
			// With the callers' share, for machines that do something else too.
			b.ReportMetric(float64((cpuTime(b)-used).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
}

// BenchmarkPlace100Workers is a placement among 100 workers without the RPC:
// reading the prompt, the index, the rule and the answer.
func BenchmarkPlace100Workers(b *testing.B) {
	o := startBench(b, 100)
	req := &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: benchPrompt(1)}, Reserve: new(false)}
	w := &work{}
	b.ReportAllocs()
	used := cpuTime(b)
	for b.Loop() {
		resp, _, err := o.placements.place(w, req)
		if err != nil || resp.GetPlacement() == nil {
			b.Fatal(resp, err)
		}
	}
	b.ReportMetric(float64((cpuTime(b)-used).Nanoseconds())/float64(b.N), "cpu-ns/op")
}

// cpuTime is the processor time of this process.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
