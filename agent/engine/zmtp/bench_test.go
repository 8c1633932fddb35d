package zmtp

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

// vllmMessage is a message as vLLM publishes them, with the given payload.
func vllmMessage(payloadBytes int) []byte {
	return peerMessage("kv@127.0.0.1:8000@model", "\x00\x00\x00\x00\x00\x00\x00\x01", strings.Repeat("p", payloadBytes))
}

// flood is a peer that sends message as fast as it is taken.
func flood(message []byte, topics ...string) func(*rawPeer) {
	return func(p *rawPeer) {
		p.hello("PUB", topics...)
		block := []byte(strings.Repeat(string(message), 1+256<<10/len(message)))
		for {
			p.send(block)
		}
	}
}

// A Recv allocates nothing once its buffers have grown, whether the message
// is buffered or has to be waited for.
func TestRecvAllocatesNothing(t *testing.T) {
	onDemand := func(demand <-chan struct{}, message []byte) func(*rawPeer) {
		return func(p *rawPeer) {
			p.hello("PUB", "")
			for range demand {
				p.send(message)
			}
		}
	}
	const runs = 500
	for _, payload := range []int{200, 6 << 10, 300 << 10} {
		for _, waits := range []bool{false, true} {
			for _, heartbeats := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d bytes, waits %v, heartbeats %v", payload, waits, heartbeats), func(t *testing.T) {
					demand := make(chan struct{}, 2*runs)
					defer close(demand)
					o := Options{Topics: everything}
					if o.Endpoint = startPeer(t, flood(vllmMessage(payload), "")); waits {
						o.Endpoint = startPeer(t, onDemand(demand, vllmMessage(payload)))
					}
					if heartbeats {
						o.HeartbeatInterval = testTimeout
					}
					s := mustDialSub(t, o)
					ctx, cancel := context.WithCancel(testContext(t))
					defer cancel()
					wantNotice[*Connected](t, ctx, s)
					allocs := testing.AllocsPerRun(runs, func() {
						if waits {
							demand <- struct{}{}
						}
						if _, err := s.Recv(ctx); err != nil {
							t.Fatal(err)
						}
					})
					if allocs != 0 {
						t.Errorf("%v allocations per message", allocs)
					}
				})
			}
		}
	}
}

func benchmarkRecv(b *testing.B, s *Sub, message []byte) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	recv := func() {
		for {
			_, err := s.Recv(ctx)
			if err == nil {
				return
			}
			if !IsNotice(err) {
				b.Fatal(err)
			}
		}
	}
	for range 1000 {
		recv()
	}
	b.SetBytes(int64(len(message)))
	b.ReportAllocs()
	for b.Loop() {
		recv()
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
}

var benchSizes = []struct {
	name  string
	bytes int
}{{"200B", 200}, {"6kB", 6000}, {"1MiB", 1 << 20}}

// BenchmarkRecv receives 3-part messages over loopback TCP from a writer in
// the same process.
func BenchmarkRecv(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(size.name, func(b *testing.B) {
			message := vllmMessage(size.bytes)
			s := mustDialSub(b, Options{Endpoint: startPeer(b, flood(message, "")), Topics: everything})
			benchmarkRecv(b, s, message)
		})
	}
}

// BenchmarkRecvListen does so on a listening socket with two publishers.
func BenchmarkRecvListen(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(size.name, func(b *testing.B) {
			message := vllmMessage(size.bytes)
			s := mustListenSub(b, listenOptions)
			for range 2 {
				publisher(b, s, flood(message, "kv@"))
			}
			benchmarkRecv(b, s, message)
		})
	}
}

// BenchmarkDecode is the decoder's share, without the network.
func BenchmarkDecode(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(size.name, func(b *testing.B) {
			message := vllmMessage(size.bytes)
			d := testDecoder(defaultMaxBytes, defaultMaxBytes, defaultMaxParts)
			b.SetBytes(int64(len(message)))
			b.ReportAllocs()
			rest := message
			for b.Loop() {
				for {
					ev, err := d.next()
					if err != nil {
						b.Fatal(err)
					}
					if ev == gotMessage {
						break
					}
					space := d.space()
					filled := 0
					for filled < len(space) && (filled == 0 || len(rest) < len(message) || len(space)-filled > len(message)) {
						n := copy(space[filled:], rest)
						filled += n
						if rest = rest[n:]; len(rest) == 0 {
							rest = message
						}
					}
					d.filled(filled)
				}
			}
		})
	}
}
