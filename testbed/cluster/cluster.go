package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
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

// stopTimeout bounds the end of one part: long, for machines that are busy.
const stopTimeout = time.Minute

// startTimeout bounds the time in which an address must become free.
const startTimeout = 30 * time.Second

// Options says what to run.
type Options struct {
	// Dir holds certificates and state; the caller removes it.
	Dir string
	// Engines are the emulated engines, one agent each.
	Engines []emulator.Options
	// External are engines that run already, one agent each, on the hosts after
	// those of the emulated ones.
	External []agent.EngineConfig
	// LateAgents leaves the agents to the caller to start, and does not wait for
	// their workers.
	LateAgents bool
	// ChangeAgent changes the configuration of the agent of an engine; nil:
	// nothing.
	ChangeAgent func(i int, cfg *agent.Config)
	// Proc is the process table that the agent of an engine finds engines in; nil:
	// the system's.
	Proc func(i int) fs.FS
	// SelfTest has agents test their engines when these come up.
	SelfTest bool
	// Coordinators is the number of coordinators; 1, 3 or 5 of them vote.
	Coordinators int
	// Loopback is the IP address that coordinators, agents and emulated engines
	// listen at; empty: 127.0.0.1. On one of its own nobody else is given a port
	// between two lives of a part.
	Loopback string
	// APIAddress is where the first coordinator's API is, if the port is
	// free; empty: any port.
	APIAddress string
	// Version is Waypost's version.
	Version string
	// Logger takes what the parts say; nil: nobody.
	Logger *slog.Logger
	// DeltaEvery is how often agents tell what changed in the caches; 0: the
	// default.
	DeltaEvery time.Duration
	// PageTimeout bounds how long agents wait for an engine's counters; 0: the
	// default.
	PageTimeout time.Duration
	// Reservation is how long a reservation lives; 0: the default.
	Reservation time.Duration
	// SettleAfter is how long evidence on a wrong prediction is waited for; 0:
	// the default.
	SettleAfter time.Duration
}

// Cluster is the running system.
type Cluster struct {
	opt Options
	// Engines, Agents and Coordinators are in the order they were asked for;
	// nil: stopped.
	Engines      []*emulator.Engine
	Agents       []*agent.Agent
	Coordinators []*coordinator.Coordinator
	// AgentSeries and CoordinatorSeries are the metrics of the present lives.
	AgentSeries, CoordinatorSeries []prometheus.Gatherer

	conns       []*grpc.ClientConn
	clusterAddr []string
	meshAddr    []string
	apiAddr     []string
}

// Start runs everything and waits until every coordinator sees every worker
// with a live cache view.
func Start(ctx context.Context, opt Options) (*Cluster, error) {
	if opt.Logger == nil {
		opt.Logger = slog.New(slog.DiscardHandler)
	}
	if opt.Loopback == "" {
		opt.Loopback = "127.0.0.1"
	}
	c := &Cluster{opt: opt}
	steps := []func(context.Context) error{c.writeCerts, c.startEngines, c.startCoordinators, c.startAgents, c.WaitReady}
	if opt.LateAgents {
		steps = steps[:3]
		c.Agents, c.AgentSeries = make([]*agent.Agent, c.hosts()), make([]prometheus.Gatherer, c.hosts())
	}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return nil, errors.Join(err, c.Stop())
		}
	}
	return c, nil
}

// HostName is the name of the host of an engine, CoordinatorName that of a
// coordinator.
func HostName(i int) string        { return fmt.Sprintf("gpu-%02d", i+1) }
func CoordinatorName(i int) string { return fmt.Sprintf("c-%02d", i+1) }

// EngineName is the engine's name on its host; its first worker is
// HostName/EngineName/0.
const EngineName = "vllm-1"

// WorkerName is the name of a rank's worker.
func WorkerName(engine, rank int) string {
	return fmt.Sprintf("%s/%s/%d", HostName(engine), EngineName, rank)
}

// hosts is the number of hosts with an agent.
func (c *Cluster) hosts() int { return len(c.opt.Engines) + len(c.opt.External) }

// Cert is the path of a file among the certificates.
func (c *Cluster) Cert(name string) string { return filepath.Join(c.opt.Dir, "certs", name) }

func (c *Cluster) writeCerts(context.Context) error {
	var hosts, names []string
	for i := range c.hosts() {
		hosts = append(hosts, HostName(i))
	}
	for i := range c.opt.Coordinators {
		names = append(names, CoordinatorName(i))
	}
	_, err := identity.WriteDevCerts(filepath.Join(c.opt.Dir, "certs"), hosts, names)
	return err
}

func (c *Cluster) startEngines(context.Context) error {
	for _, o := range c.opt.Engines {
		for _, address := range []*string{&o.Address, &o.EventsAddress, &o.ReplayAddress} {
			if *address == "" {
				*address = c.anyPort()
			}
		}
		e, err := emulator.Start(o)
		if err != nil {
			return fmt.Errorf("emulated engine: %w", err)
		}
		c.Engines = append(c.Engines, e)
	}
	return nil
}

// startCoordinators makes a cluster of one and lets the others join it.
func (c *Cluster) startCoordinators(ctx context.Context) error {
	n := c.opt.Coordinators
	c.Coordinators, c.conns = make([]*coordinator.Coordinator, n), make([]*grpc.ClientConn, n)
	c.CoordinatorSeries = make([]prometheus.Gatherer, n)
	c.clusterAddr, c.meshAddr, c.apiAddr = make([]string, n), make([]string, n), make([]string, n)
	for i := range n {
		if err := c.StartCoordinator(i); err != nil {
			return err
		}
	}
	return c.WaitCluster(ctx)
}

// CoordinatorConfig is the configuration of a coordinator. Once it ran, it has
// the addresses it had.
func (c *Cluster) CoordinatorConfig(i int) coordinator.Config {
	cfg := coordinator.DefaultConfig()
	cfg.Name = CoordinatorName(i)
	cfg.StateDir = filepath.Join(c.opt.Dir, cfg.Name)
	cfg.RunDir = ""
	cfg.TLS = coordinator.TLSConfig{CAFile: c.Cert("ca.pem"), CertFile: c.Cert("coordinator-" + cfg.Name + ".pem"), KeyFile: c.Cert("coordinator-" + cfg.Name + ".key")}
	cfg.Mesh.Listen, cfg.Mesh.KeyFile, cfg.Mesh.Fleet = c.listenOr(c.meshAddr[i]), c.Cert("mesh.key"), "dev"
	cfg.Prefix.KeyFile = c.Cert("prefix.key")
	cfg.Cluster.Listen, cfg.API.Listen, cfg.API.TLS = c.listenOr(c.clusterAddr[i]), c.listenOr(c.apiAddr[i]), "off"
	if i == 0 && c.apiAddr[0] == "" && c.opt.APIAddress != "" && free(c.opt.APIAddress) {
		cfg.API.Listen = daemon.Listen(c.opt.APIAddress)
	}
	for j := range c.clusterAddr {
		if j != i && c.clusterAddr[j] != "" {
			cfg.Cluster.Join = append(cfg.Cluster.Join, daemon.HostPort(c.clusterAddr[j]))
			cfg.Mesh.Join = append(cfg.Mesh.Join, daemon.HostPort(c.meshAddr[j]))
		}
	}
	return cfg
}

// anyPort is any port at the cluster's own address.
func (c *Cluster) anyPort() string { return net.JoinHostPort(c.opt.Loopback, "0") }

func (c *Cluster) listenOr(address string) daemon.Listen {
	if address == "" {
		address = c.anyPort()
	}
	return daemon.Listen(address)
}

func free(address string) bool {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return false
	}
	// It was only a try.
	_ = l.Close()
	return true
}

// StartCoordinator starts a coordinator, for the first time or again with the
// state and addresses it had. The first one makes the cluster.
func (c *Cluster) StartCoordinator(i int) error {
	first := c.clusterAddr[i] == ""
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		// A connection that somebody dialled may hold the port for a moment.
		err := c.startCoordinator(i, first)
		if err == nil || first || !strings.Contains(err.Error(), syscall.EADDRINUSE.Error()) || time.Since(began) > startTimeout {
			return err
		}
	}
}

func (c *Cluster) startCoordinator(i int, first bool) error {
	series := prometheus.NewRegistry()
	log, err := daemon.CountEvents(c.opt.Logger, series)
	if err != nil {
		return err
	}
	co, err := coordinator.New(coordinator.Options{
		Config: c.CoordinatorConfig(i), Bootstrap: i == 0 && first, Version: c.opt.Version, Process: rand.Uint64() | 1, Logger: log,
		Timing:         replica.Timing{Heartbeat: slowdown * 300 * time.Millisecond, Election: slowdown * 300 * time.Millisecond, Lease: slowdown * 250 * time.Millisecond},
		ReservationTTL: c.opt.Reservation, SettleAfter: c.opt.SettleAfter, Registerer: series, Gatherer: series,
	})
	if err != nil {
		return fmt.Errorf("coordinator %s: %w", CoordinatorName(i), err)
	}
	if err := co.Start(); err != nil {
		return fmt.Errorf("coordinator %s: %w", CoordinatorName(i), err)
	}
	c.Coordinators[i], c.CoordinatorSeries[i] = co, series
	c.clusterAddr[i], c.meshAddr[i], c.apiAddr[i] = co.ClusterAddress(), co.MeshAddress(), co.APIAddress()
	if c.conns[i] == nil {
		c.conns[i], err = grpc.NewClient("passthrough:///"+c.apiAddr[i], grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableServiceConfig(),
			grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	}
	return err
}

// StopCoordinator stops a coordinator; its state stays.
func (c *Cluster) StopCoordinator(i int) error {
	if c.Coordinators[i] == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	err := c.Coordinators[i].Stop(ctx)
	c.Coordinators[i] = nil
	return err
}

func (c *Cluster) startAgents(context.Context) error {
	c.Agents, c.AgentSeries = make([]*agent.Agent, c.hosts()), make([]prometheus.Gatherer, c.hosts())
	for i := range c.hosts() {
		if err := c.StartAgent(i); err != nil {
			return err
		}
	}
	return nil
}

// AgentConfig is the configuration of the agent of an engine.
func (c *Cluster) AgentConfig(i int) agent.Config {
	cfg := agent.DefaultConfig()
	cfg.Name = HostName(i)
	cfg.StateDir = filepath.Join(c.opt.Dir, cfg.Name)
	cfg.RunDir = filepath.Join(c.opt.Dir, cfg.Name, "run")
	cfg.TLS = agent.TLSConfig{CAFile: c.Cert("ca.pem"), CertFile: c.Cert("agent-" + cfg.Name + ".pem"), KeyFile: c.Cert("agent-" + cfg.Name + ".key")}
	cfg.Mesh.Listen, cfg.Mesh.KeyFile, cfg.Mesh.Fleet = daemon.Listen(c.anyPort()), c.Cert("mesh.key"), "dev"
	for j := range c.clusterAddr {
		cfg.Mesh.Join = append(cfg.Mesh.Join, daemon.HostPort(c.meshAddr[j]))
		cfg.Cluster.Coordinators = append(cfg.Cluster.Coordinators, daemon.HostPort(c.clusterAddr[j]))
	}
	cfg.Prefix.KeyFile = c.Cert("prefix.key")
	cfg.GPU.Enabled = "off"
	cfg.Discover.Enabled = false
	cfg.Metrics.Listen = ""
	if i >= len(c.Engines) {
		cfg.Engines = []agent.EngineConfig{c.opt.External[i-len(c.Engines)]}
		return cfg
	}
	e := c.Engines[i]
	cfg.Engines = []agent.EngineConfig{{Name: EngineName, Kind: "vllm", URL: e.URL(), KVEvents: e.EventsEndpoint(), KVReplay: e.ReplayEndpoint(), SelfTest: c.opt.SelfTest}}
	if e.Options().Transfer != nil {
		// Its cache is all the memory that an emulated engine has.
		cfg.Engines[0].KVExported = "gpu"
	}
	return cfg
}

// StartAgent starts the agent of an engine.
func (c *Cluster) StartAgent(i int) error {
	series := prometheus.NewRegistry()
	log, err := daemon.CountEvents(c.opt.Logger, series)
	if err != nil {
		return err
	}
	cfg := c.AgentConfig(i)
	if c.opt.ChangeAgent != nil {
		c.opt.ChangeAgent(i, &cfg)
	}
	var proc fs.FS
	if c.opt.Proc != nil {
		proc = c.opt.Proc(i)
	}
	a, err := agent.New(agent.Options{
		Config: cfg, Proc: proc, Version: c.opt.Version, Process: rand.Uint64() | 1, DeltaEvery: c.opt.DeltaEvery, PageTimeout: c.opt.PageTimeout, Logger: log,
		Registerer: series, Gatherer: series,
	})
	if err != nil {
		return fmt.Errorf("agent %s: %w", HostName(i), err)
	}
	if err := a.Start(); err != nil {
		return fmt.Errorf("agent %s: %w", HostName(i), err)
	}
	c.Agents[i], c.AgentSeries[i] = a, series
	return nil
}

// StopAgent stops the agent of an engine.
func (c *Cluster) StopAgent(i int) error {
	if i >= len(c.Agents) || c.Agents[i] == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	err := c.Agents[i].Stop(ctx)
	c.Agents[i] = nil
	return err
}

// Placement is the placement API of a coordinator, Operator its operator API.
func (c *Cluster) Placement(i int) waypostv1.PlacementServiceClient {
	return waypostv1.NewPlacementServiceClient(c.conns[i])
}

// Operator is the operator API of a coordinator.
func (c *Cluster) Operator(i int) waypostv1.OperatorServiceClient {
	return waypostv1.NewOperatorServiceClient(c.conns[i])
}

// API is the address of a coordinator's API.
func (c *Cluster) API(i int) string { return c.apiAddr[i] }

// ClusterAddress is the cluster address of a coordinator.
func (c *Cluster) ClusterAddress(i int) string { return c.clusterAddr[i] }

// poll calls fn until it is done, for at most two minutes.
func poll(ctx context.Context, what string, fn func(context.Context) (done bool, state string)) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
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

// votersOf is how many of some coordinators vote: 1, 3 or 5, since an even
// number stops as soon as an odd one less.
func votersOf(coordinators int) int { return min(5, coordinators-1|1) }

// WaitCluster waits until all running coordinators agree on one leader, and as
// many vote as should.
func (c *Cluster) WaitCluster(ctx context.Context) error {
	return poll(ctx, "coordinators did not form a cluster", func(ctx context.Context) (bool, string) {
		for i, co := range c.Coordinators {
			if co == nil {
				continue
			}
			resp, err := c.Operator(i).ListCoordinators(ctx, &waypostv1.ListCoordinatorsRequest{})
			if err != nil {
				return false, err.Error()
			}
			leaders, voters := 0, 0
			for _, m := range resp.GetCoordinators() {
				if m.Number == nil {
					return false, m.GetName() + " has no number yet"
				}
				switch m.GetRole() {
				case "leader":
					leaders++
					voters++
				case "voter":
					voters++
				}
			}
			if !co.Joined() {
				return false, CoordinatorName(i) + " does not know its number yet"
			}
			if want := votersOf(len(c.Coordinators)); leaders != 1 || voters != want {
				return false, fmt.Sprintf("%d leaders, %d of %d voters at %s", leaders, voters, want, CoordinatorName(i))
			}
		}
		return true, ""
	})
}

// WaitReady waits until every running coordinator sees every worker ready,
// with a live view of its cache, or one that follows from the requests.
func (c *Cluster) WaitReady(ctx context.Context) error {
	want := len(c.opt.External)
	for _, e := range c.Engines {
		want += e.Ranks()
	}
	return poll(ctx, "workers did not become ready", func(ctx context.Context) (bool, string) {
		for i, co := range c.Coordinators {
			if co == nil {
				continue
			}
			resp, err := c.Operator(i).ListWorkers(ctx, &waypostv1.ListWorkersRequest{})
			if err != nil {
				return false, err.Error()
			}
			ready := 0
			for _, w := range resp.GetWorkers() {
				if w.GetState() == "ready" && (w.GetView() == "live" || w.GetView() == "inferred") {
					ready++
				}
			}
			if ready < want {
				return false, fmt.Sprintf("%d of %d workers ready at %s", ready, want, CoordinatorName(i))
			}
		}
		return true, ""
	})
}

// Stop ends everything, what was started last first.
func (c *Cluster) Stop() error {
	var errs []error
	for i := range c.Agents {
		errs = append(errs, c.StopAgent(i))
	}
	for _, conn := range c.conns {
		if conn != nil {
			errs = append(errs, conn.Close())
		}
	}
	for i := len(c.Coordinators) - 1; i >= 0; i-- {
		errs = append(errs, c.StopCoordinator(i))
	}
	for _, e := range c.Engines {
		e.Close()
	}
	return errors.Join(errs...)
}
