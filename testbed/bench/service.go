package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// service is a production coordinator with a fleet of simulated hosts, all over
// sockets of this machine in clear.
type service struct {
	dir         string
	coordinator *coordinator.Coordinator
	hosts       []*serviceHost
}

// serviceTimeout bounds the start of a fleet, and its end.
const serviceTimeout = 5 * time.Minute

// startService starts a coordinator and waits until it sees all workers ready,
// with a live view of their caches.
func startService(ctx context.Context, o fleetOptions) (*service, error) {
	lives := chainLives(o, nil)
	s := &service{}
	var err error
	if s.dir, err = os.MkdirTemp("", "waypost-bench"); err != nil {
		return nil, err
	}
	if err := s.start(ctx, lives); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

func (s *service) start(ctx context.Context, lives []life) error {
	key := filepath.Join(s.dir, "prefix.key")
	if err := os.WriteFile(key, fmt.Appendf(nil, "%x\n", benchKey[:]), 0o600); err != nil {
		return err
	}
	cfg := coordinator.DefaultConfig()
	cfg.Name, cfg.StateDir, cfg.RunDir, cfg.Prefix.KeyFile = coordinatorID, filepath.Join(s.dir, "state"), "", key
	cfg.Mesh.Listen, cfg.Cluster.Listen, cfg.API.Listen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	c, err := coordinator.New(coordinator.Options{Config: cfg, Bootstrap: true, Version: "bench", Process: 1})
	if err != nil {
		return err
	}
	s.coordinator = c
	if err := c.Start(); err != nil {
		return err
	}
	for first := 0; first < len(lives); first += workersPerHost {
		h, err := newServiceHost(first, lives[first:min(first+workersPerHost, len(lives))], c.ClusterAddress())
		if err != nil {
			return err
		}
		s.hosts = append(s.hosts, h)
	}
	return s.waitReady(ctx, len(lives))
}

func (s *service) address() string { return s.coordinator.APIAddress() }

func (s *service) waitReady(ctx context.Context, workers int) error {
	conn, err := grpc.NewClient("passthrough:///"+s.address(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // it was only asked
	ctx, cancel := context.WithTimeout(ctx, serviceTimeout)
	defer cancel()
	for {
		resp, err := waypostv1.NewOperatorServiceClient(conn).ListWorkers(ctx, &waypostv1.ListWorkersRequest{})
		ready := 0
		for _, w := range resp.GetWorkers() {
			if w.GetState() == "ready" && w.GetView() == "live" {
				ready++
			}
		}
		if err == nil && ready == workers && s.coordinator.Joined() {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d workers ready: %w", ready, workers, errors.Join(ctx.Err(), err))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (s *service) stop() error {
	var wg sync.WaitGroup
	for _, h := range s.hosts {
		wg.Go(h.dialer.Close)
	}
	wg.Wait()
	var err error
	if s.coordinator != nil {
		ctx, cancel := context.WithTimeout(context.Background(), serviceTimeout)
		defer cancel()
		err = s.coordinator.Stop(ctx)
	}
	return errors.Join(err, os.RemoveAll(s.dir))
}

// serviceHost is one host's side: the production lane dialer over a fixed
// report and the snapshots that its agent would encode.
type serviceHost struct {
	name    string
	process uint64
	lives   []life
	dialer  *lane.Dialer
	replies sync.WaitGroup

	mu  sync.Mutex
	seq uint64
}

func newServiceHost(first int, lives []life, coordinator string) (*serviceHost, error) {
	h := &serviceHost{name: hostName(first / workersPerHost), process: uint64(first + 1), lives: lives}
	var err error
	if h.dialer, err = lane.NewDialer(lane.DialerOptions{Hello: h.hello, Load: h.load, Handler: h}); err != nil {
		return nil, err
	}
	if err := h.dialer.SetAddresses(lane.FromConfig, []string{coordinator}); err != nil {
		return nil, err
	}
	h.dialer.Start()
	return h, nil
}

func (h *serviceHost) hello() *waypostv1.AgentHello {
	out := &waypostv1.AgentHello{Host: &h.name, AgentProcess: &h.process, Version: proto.String("bench"), PrefixKeyIds: []string{benchKey.ID()}, PrefixFormat: proto.Uint32(summary.Version)}
	prior := ledger.PriorFor(ledger.Class{Engine: "vllm", Model: benchModel})
	for i := range h.lives {
		out.Workers = append(out.Workers, &waypostv1.WorkerFacts{
			Index: proto.Uint32(uint32(i)), Engine: proto.String(fmt.Sprintf("vllm-%d", 8000+i)), Rank: proto.Uint32(0), Ranks: proto.Uint32(1), Kind: proto.String("vllm"),
			EngineProcess: proto.Uint64(uint64(100 + i)), Model: proto.String(benchModel), Url: proto.String(fmt.Sprintf("http://127.0.0.1:%d", 8000+i)),
			BlockTokens: proto.Uint32(blockTokens), PoolBlocks: proto.Uint32(poolBlocks), MaxModelTokens: proto.Uint32(131_072), MaxRunning: proto.Uint32(256),
			StepTokens: proto.Uint32(uint32(prior.StepTokens)), Coverage: proto.String("full"), StepModel: lane.StepModelOf(&prior.Model),
		})
	}
	return out
}

func (h *serviceHost) load(*lane.Lane) *waypostv1.Load {
	h.mu.Lock()
	h.seq++
	out := &waypostv1.Load{AgentProcess: &h.process, LoadSeq: proto.Uint64(h.seq)}
	h.mu.Unlock()
	for i := range h.lives {
		// A different batch at each, which stays what it is.
		live := uint32(1 + (int(h.process)+i*7)%30)
		out.Workers = append(out.Workers, lane.WorkerLoadOf(uint32(i), &ledger.Load{
			EngineProcess: uint64(100 + i), State: ledger.StateReady, Coverage: "full", AgeMs: new(0.), CountersAgeMs: new(0.), QueueMs: new(float64(live)), OpenTokens: new(live * 20),
			Decoding: &live, Live: &live, ContextTokens: new(float64(live) * 2000), HeldBlocks: new(float64(live) * 125), MeanOutputTokens: new(300.),
		}))
	}
	return out
}

// LaneUp implements lane.AgentHandler.
func (h *serviceHost) LaneUp(*lane.Lane) {}

// LaneDown implements lane.AgentHandler.
func (h *serviceHost) LaneDown(*lane.Lane, error) { h.replies.Wait() }

// Frame implements lane.AgentHandler: it answers pulls beside the lane. Claims
// are not echoed: their marks end them.
func (h *serviceHost) Frame(l *lane.Lane, f *waypostv1.ConnectResponse) {
	p := f.GetPull()
	if p == nil || int(p.GetIndex()) >= len(h.lives) {
		return
	}
	h.replies.Go(func() {
		frames := h.lives[p.GetIndex()].snapshot
		for i, frame := range frames {
			msg := &waypostv1.PrefixFrames{
				Index: p.Index, EngineProcess: proto.Uint64(uint64(100 + p.GetIndex())), PullId: p.PullId, Frames: [][]byte{frame}, Last: proto.Bool(i == len(frames)-1),
			}
			// A lane that ends is dialled again and asked again.
			if l.SendWait(context.Background(), &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: msg}}) != nil {
				return
			}
		}
	})
}
