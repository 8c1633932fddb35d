package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"waypost/agent"
	"waypost/coordinator"
	"waypost/coordinator/replica"
	"waypost/gossip/identity"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
	"waypost/testbed/emulator"
)

// model is the served name of the emulated engines; their step times are those
// of this model on one H100.
const model = "Llama-3.1-8B"

// apiAddress is where the API is if the port is free.
const apiAddress = "127.0.0.1:7712"

// system is the whole system on loopback.
type system struct {
	dir          string
	log          *slog.Logger
	version      string
	engines      []*emulator.Engine
	baseline     []*emulator.Engine
	coordinators []*coordinator.Coordinator
	agents       []*agent.Agent
	conns        []*grpc.ClientConn
}

// newSystem starts everything; dir holds certificates and state.
func newSystem(ctx context.Context, dir, version string, engines, coordinators int, log *slog.Logger) (*system, error) {
	s := &system{dir: dir, log: log, version: version}
	steps := []func() error{
		func() error { return s.writeCerts(engines, coordinators) },
		func() error { return s.startEngines(engines) },
		func() error { return s.startCoordinators(ctx, coordinators) },
		func() error { return s.startAgents(engines) },
		func() error { return s.waitReady(ctx, engines) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return nil, errors.Join(err, s.stop())
		}
	}
	return s, nil
}

func hostName(i int) string        { return fmt.Sprintf("gpu-%02d", i+1) }
func coordinatorName(i int) string { return fmt.Sprintf("c-%02d", i+1) }

func (s *system) certs(name string) string { return filepath.Join(s.dir, "certs", name) }

func (s *system) writeCerts(engines, coordinators int) error {
	var hosts, names []string
	for i := range engines {
		hosts = append(hosts, hostName(i))
	}
	for i := range coordinators {
		names = append(names, coordinatorName(i))
	}
	_, err := identity.WriteDevCerts(filepath.Join(s.dir, "certs"), hosts, names)
	return err
}

// startEngines runs two equal sets of engines.
func (s *system) startEngines(n int) error {
	for _, set := range []*[]*emulator.Engine{&s.engines, &s.baseline} {
		for range n {
			e, err := emulator.Start(emulator.Options{Model: model, StreamInterval: 25})
			if err != nil {
				return fmt.Errorf("emulated engine: %w", err)
			}
			*set = append(*set, e)
		}
	}
	return nil
}

// startCoordinators makes a cluster of one and lets the others join it.
func (s *system) startCoordinators(ctx context.Context, n int) error {
	for i := range n {
		cfg := coordinator.DefaultConfig()
		cfg.Name = coordinatorName(i)
		cfg.StateDir = filepath.Join(s.dir, cfg.Name)
		cfg.RunDir = ""
		cfg.TLS = coordinator.TLSConfig{CAFile: s.certs("ca.pem"), CertFile: s.certs("coordinator-" + cfg.Name + ".pem"), KeyFile: s.certs("coordinator-" + cfg.Name + ".key")}
		cfg.Mesh.Listen, cfg.Mesh.KeyFile, cfg.Mesh.Fleet = "127.0.0.1:0", s.certs("mesh.key"), "dev"
		cfg.Prefix.KeyFile = s.certs("prefix.key")
		cfg.Cluster.Listen, cfg.API.Listen, cfg.API.TLS = "127.0.0.1:0", "127.0.0.1:0", "off"
		if i == 0 {
			cfg.API.Listen = daemon.Listen(freeOr(apiAddress, "127.0.0.1:0"))
		} else {
			cfg.Cluster.Join = []daemon.HostPort{daemon.HostPort(s.coordinators[0].ClusterAddress())}
			cfg.Mesh.Join = []daemon.HostPort{daemon.HostPort(s.coordinators[0].MeshAddress())}
		}
		c, err := coordinator.New(coordinator.Options{
			Config: cfg, Bootstrap: i == 0, Version: s.version, Process: rand.Uint64() | 1, Logger: s.log,
			Timing: replica.Timing{Heartbeat: 300 * time.Millisecond, Election: 300 * time.Millisecond, Lease: 250 * time.Millisecond},
		})
		if err != nil {
			return fmt.Errorf("coordinator %s: %w", cfg.Name, err)
		}
		if err := c.Start(); err != nil {
			return fmt.Errorf("coordinator %s: %w", cfg.Name, err)
		}
		s.coordinators = append(s.coordinators, c)
		conn, err := grpc.NewClient("passthrough:///"+c.APIAddress(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableServiceConfig())
		if err != nil {
			return err
		}
		s.conns = append(s.conns, conn)
	}
	return s.waitCluster(ctx, n)
}

// freeOr returns the address if nobody listens there, else another.
func freeOr(address, other string) string {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return other
	}
	// It was only a try.
	_ = l.Close()
	return address
}

// poll calls fn until it is done, for at most a minute.
func poll(ctx context.Context, what string, fn func(context.Context) (done bool, state string)) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		done, state := fn(ctx)
		if done {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w (%s)", what, ctx.Err(), state)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (s *system) waitCluster(ctx context.Context, n int) error {
	return poll(ctx, "coordinators did not form a cluster", func(ctx context.Context) (bool, string) {
		for _, conn := range s.conns {
			resp, err := waypostv1.NewOperatorServiceClient(conn).ListCoordinators(ctx, &waypostv1.ListCoordinatorsRequest{})
			if err != nil {
				return false, err.Error()
			}
			leaders, voters := 0, 0
			for _, m := range resp.GetCoordinators() {
				switch m.GetRole() {
				case "leader":
					leaders++
					voters++
				case "voter":
					voters++
				}
			}
			if leaders != 1 || voters != n {
				return false, fmt.Sprintf("%d leaders, %d of %d voters", leaders, voters, n)
			}
		}
		return true, ""
	})
}

// startAgents runs one agent for each engine of Waypost's set.
func (s *system) startAgents(n int) error {
	for i := range n {
		e := s.engines[i]
		cfg := agent.DefaultConfig()
		cfg.Name = hostName(i)
		cfg.StateDir = filepath.Join(s.dir, cfg.Name)
		cfg.RunDir = filepath.Join(s.dir, cfg.Name, "run")
		cfg.TLS = agent.TLSConfig{CAFile: s.certs("ca.pem"), CertFile: s.certs("agent-" + cfg.Name + ".pem"), KeyFile: s.certs("agent-" + cfg.Name + ".key")}
		cfg.Mesh.Listen, cfg.Mesh.KeyFile, cfg.Mesh.Fleet = "127.0.0.1:0", s.certs("mesh.key"), "dev"
		cfg.Mesh.Join = []daemon.HostPort{daemon.HostPort(s.coordinators[0].MeshAddress())}
		for _, c := range s.coordinators {
			cfg.Cluster.Coordinators = append(cfg.Cluster.Coordinators, daemon.HostPort(c.ClusterAddress()))
		}
		cfg.Prefix.KeyFile = s.certs("prefix.key")
		cfg.GPU.Enabled = "off"
		cfg.Metrics.Listen = ""
		cfg.Engines = []agent.EngineConfig{{Name: "vllm-1", Kind: "vllm", URL: e.URL(), KVEvents: e.EventsEndpoint(), KVReplay: e.ReplayEndpoint()}}
		a, err := agent.New(agent.Options{Config: cfg, Version: s.version, Process: rand.Uint64() | 1, Logger: s.log})
		if err != nil {
			return fmt.Errorf("agent %s: %w", cfg.Name, err)
		}
		if err := a.Start(); err != nil {
			return fmt.Errorf("agent %s: %w", cfg.Name, err)
		}
		s.agents = append(s.agents, a)
	}
	return nil
}

// waitReady waits until every coordinator sees every worker with a live view.
func (s *system) waitReady(ctx context.Context, n int) error {
	return poll(ctx, "workers did not become ready", func(ctx context.Context) (bool, string) {
		for _, conn := range s.conns {
			resp, err := waypostv1.NewOperatorServiceClient(conn).ListWorkers(ctx, &waypostv1.ListWorkersRequest{})
			if err != nil {
				return false, err.Error()
			}
			ready := 0
			for _, w := range resp.GetWorkers() {
				if w.GetState() == "ready" && w.GetView() == "live" {
					ready++
				}
			}
			if ready < n {
				return false, fmt.Sprintf("%d of %d workers ready", ready, n)
			}
		}
		return true, ""
	})
}

// stop ends everything that was started, the last first.
func (s *system) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var errs []error
	for _, a := range s.agents {
		errs = append(errs, a.Stop(ctx))
	}
	for _, conn := range s.conns {
		errs = append(errs, conn.Close())
	}
	for i := len(s.coordinators) - 1; i >= 0; i-- {
		errs = append(errs, s.coordinators[i].Stop(ctx))
	}
	for _, e := range append(s.engines, s.baseline...) {
		e.Close()
	}
	return errors.Join(errs...)
}
