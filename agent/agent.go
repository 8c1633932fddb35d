package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waypost/agent/engine"
	"waypost/agent/host"
	"waypost/agent/queue"
	"waypost/gossip/accuracy"
	"waypost/gossip/boundary"
	"waypost/gossip/identity"
	"waypost/gossip/lane"
	"waypost/gossip/mesh"
	"waypost/gossip/nonblock"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
)

// Rhythms of the agent.
const (
	// defaultDeltaEvery is how often a prefix stream tells what changed: once a
	// second costs least, and a view a second old costs nothing measurable.
	defaultDeltaEvery = time.Second
	hostEvery         = 10 * time.Second
	// hostAtMost is how often host and GPU facts are told at most.
	hostAtMost = 100 * time.Millisecond
)

// eventTicks is how many ticks there are between two reads of an engine's events
// where they come by the hundred; lanes are read on each, as callers wait for what
// coordinators ask of tokenizers.
const eventTicks = 3

// mirrorBlockBytes is what a block of the mirror takes at most, of 16 tokens of a
// vocabulary below 2^18. The bound of the mirrors is shared.
const mirrorBlockBytes = 116

// Options wires an Agent.
type Options struct {
	// Config is the agent's configuration, validated.
	Config Config
	// Version is Waypost's version.
	Version string
	// Process is this agent's mark; 0: the process's own. Several agents in
	// one process need one each.
	Process uint64
	// DeltaEvery is how often prefix streams tell what changed; 0: 1 s.
	DeltaEvery time.Duration
	// PageTimeout bounds one reading of an engine's counters; 0: 1 s.
	PageTimeout time.Duration
	// Proc is the process table that engines are found in; nil: the system's.
	Proc fs.FS
	// Logger takes what an operator cares about.
	Logger *slog.Logger
	// Registerer takes the metrics; Gatherer serves them.
	Registerer prometheus.Registerer
	Gatherer   prometheus.Gatherer
}

// Agent is the host daemon. New wires it, Start runs it, Stop ends it.
type Agent struct {
	opt     Options
	cfg     Config
	name    string
	process uint64
	log     *slog.Logger

	// prefixKeys are the cluster keys of prefix keys: two during a rotation, the
	// primary first.
	prefixKeys []prefix.ClusterKey
	discovery  *discovery
	// identity is this host's certificate; nil: none is configured.
	identity *identity.Source
	lanes    *lanes
	dialer   *lane.Dialer
	mesh     *mesh.Mesh
	gpus     gpuReading
	truth    *gpuTruth
	host     *host.Collector
	local    *localServer
	metrics  *metricsServer
	learnt   *learnt
	wish     *drainWish
	// ticks are those on which event sockets and lanes are read, and LOADs written,
	// while there is much to read.
	ticks *nonblock.Coalescer
	// framesRefused counts frames of coordinators that were refused.
	framesRefused *prometheus.CounterVec

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	// started says that engines that are found are read at once.
	started atomic.Bool

	mu sync.Mutex
	// engines are those that are watched, index their ranks by number; nil: the
	// rank of one that is watched no more.
	engines []*watched
	index   []*rank
	// checked are the checks of the last ten seconds.
	checked []*waypostv1.Check
}

// New wires an agent; it opens nothing yet but the files it is configured by.
func New(opt Options) (*Agent, error) {
	if err := opt.Config.Validate(); err != nil {
		return nil, err
	}
	if opt.Logger == nil {
		opt.Logger = slog.New(slog.DiscardHandler)
	}
	if opt.Registerer == nil {
		reg := prometheus.NewRegistry()
		opt.Registerer, opt.Gatherer = reg, reg
	}
	name := opt.Config.Name
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
			return nil, fmt.Errorf("agent: no name configured and none known to the system: %w", err)
		}
	}
	a := &Agent{opt: opt, cfg: opt.Config, name: name, log: opt.Logger.With("host", name)}
	if a.process = opt.Process; a.process == 0 {
		var err error
		if a.process, err = daemon.ProcessMark(); err != nil {
			return nil, err
		}
	}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.lanes, a.learnt, a.truth = newLanes(a), newLearnt(opt.Config.StateDir), newGPUTruth("")
	var err error
	if a.ticks, err = nonblock.NewCoalescer(nonblock.CoalescerOptions{Every: eventTicks}); err != nil {
		return nil, err
	}
	a.wish = newDrainWish(opt.Config.StateDir, a.log, func() { a.dialer.Kick() })
	a.framesRefused = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "waypost_lane_frames_refused_total", Help: "Frames from coordinators that were refused."}, []string{"kind"})
	if err := a.readKeys(); err != nil {
		return nil, err
	}
	for _, e := range a.cfg.Engines {
		w, err := a.watch(e)
		if err != nil {
			return nil, err
		}
		w.configured = true
		a.engines = append(a.engines, w)
	}
	a.discovery = newDiscovery(a)
	if err := a.opt.Registerer.Register(newStreamCollector(a)); err != nil {
		return nil, err
	}
	if err := a.wireGossip(); err != nil {
		return nil, err
	}
	for _, c := range []prometheus.Collector{newCollector(a), a.framesRefused} {
		if err := a.opt.Registerer.Register(c); err != nil {
			return nil, err
		}
	}
	return a, a.wireFacts()
}

// readKeys reads the cluster keys of prefix keys.
func (a *Agent) readKeys() error {
	b, err := os.ReadFile(a.cfg.Prefix.KeyFile)
	if err != nil {
		return bad("prefix.key_file", "%w", err)
	}
	if a.prefixKeys, err = prefix.ParseClusterKeys(b); err != nil {
		return bad("prefix.key_file", "%s: %w", a.cfg.Prefix.KeyFile, err)
	}
	return nil
}

// watch prepares the adapter of one engine.
func (a *Agent) watch(e EngineConfig) (*watched, error) {
	target := engine.Target{Name: e.Name, Kind: string(e.Kind), URL: e.URL, Events: e.KVEvents, Replay: e.KVReplay, KVBytesPerToken: e.KVBytes, KVConnector: e.KVConnector}
	if e.HostCacheMiB.Set {
		target.HostCacheMiB = &e.HostCacheMiB.Value
	}
	if e.APIKeyFile != "" {
		b, err := os.ReadFile(e.APIKeyFile)
		if err != nil {
			return nil, bad("engine.api_key_file", "%w", err)
		}
		target.APIKey = strings.TrimSpace(string(b))
	}
	adapter, err := newAdapter(e.Kind, engine.Options{Target: target, Logger: a.log, PageTimeout: a.opt.PageTimeout, WrapEvents: a.ticks.Conn})
	if err != nil {
		return nil, fmt.Errorf("engine %s: %w", e.Name, err)
	}
	w := &watched{
		target: target, adapter: adapter, advertise: advertisedURL(e.Advertise, e.URL, a.hostAddress()), log: a.log,
		config: &e, hostAddress: a.hostAddress(),
		newRank: func(engineName string, number int) *rank { return a.newRank(e, engineName, number) },
		changed: a.helloChanged,
		dirty:   a.lanes.tellNews,
	}
	tokenizer, _ := adapter.(engine.Tokenizer)
	w.prober = newProber(proberOptions{
		tokenizer: tokenizer, declared: e.Boundary, hasher: boundary.NewHasher(a.prefixKeys[0]), state: w.state, changed: w.changed, log: a.log.With("engine", e.Name),
	})
	completer, able := adapter.(engine.Completer)
	if e.SelfTest && able && tokenizer != nil {
		w.selfTester = &selfTester{
			tokenizer: tokenizer, completer: completer, ranks: w.all, done: a.learnt.selfTestOf, save: a.saveLearnt, changed: w.changed, log: a.log.With("engine", e.Name),
		}
	} else if e.SelfTest {
		a.log.Info("self-test not run: an engine of this kind tells no token ids", "engine", e.Name, "kind", e.Kind)
	}
	return w, nil
}

// hostAddress is the address of this host that others reach; empty: none but
// loopback.
func (a *Agent) hostAddress() string {
	if a.cfg.Mesh.Listen.Loopback() {
		return ""
	}
	host, _ := a.cfg.Mesh.Listen.Split()
	chosen, err := mesh.ChooseAddress(a.cfg.Mesh.Advertise, host)
	if err != nil {
		return ""
	}
	return chosen.Addr.String()
}

func (a *Agent) newRank(e EngineConfig, engineName string, number int) *rank {
	r := a.lanes.enlist(func() *rank {
		a.mu.Lock()
		defer a.mu.Unlock()
		r := newRank(uint32(len(a.index)), string(e.Kind), engineName, a.name+" "+e.URL, number, a.prefixKeys, 1) // shareMemory follows
		r.agentProcess = a.process
		r.restore = func(f engine.Facts, process uint64) (queue.State, bool) { return a.learnt.of(r.local(), f, process) }
		r.restoreAccuracy = func(process uint64) (accuracy.State, bool) { return a.learnt.accuracyOf(r.local(), process) }
		r.restoreTransfers = func() transferLog { return a.learnt.transfersTo(r.local()) }
		a.index = append(a.index, r)
		return r
	})
	a.shareMemory()
	return r
}

// shareMemory divides the bound of the mirrors among the workers that there are,
// or at least the engines that are to come.
func (a *Agent) shareMemory() {
	ranks := a.ranks()
	each := int(a.cfg.Limits.Memory) / mirrorBlockBytes / max(1, len(a.cfg.Engines), len(ranks))
	for _, r := range ranks {
		r.setMaxBlocks(each)
	}
}

// ranks returns all workers of this host by index.
func (a *Agent) ranks() []*rank {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]*rank, 0, len(a.index))
	for _, r := range a.index {
		if r != nil {
			out = append(out, r)
		}
	}
	return out
}

// watching are the engines that are watched.
func (a *Agent) watching() []*watched {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*watched(nil), a.engines...)
}

// helloChanged has what the hello says told again.
func (a *Agent) helloChanged() { a.dialer.HelloChanged() }

func (a *Agent) rank(index uint32) *rank {
	a.mu.Lock()
	defer a.mu.Unlock()
	if int(index) >= len(a.index) {
		return nil
	}
	return a.index[index]
}

// watchedOf returns the engine that a worker's index belongs to.
func (a *Agent) watchedOf(index uint32) *watched {
	for _, w := range a.watching() {
		for _, r := range w.all() {
			if r.index == index {
				return w
			}
		}
	}
	return nil
}

// wireGossip prepares lanes and mesh.
func (a *Agent) wireGossip() error {
	var source *identity.Source
	dopt := lane.DialerOptions{Hello: a.lanes.hello, Load: a.lanes.load, News: a.lanes.loadNews, Handler: a.lanes, Coalescer: a.ticks, Logger: a.log, Registerer: a.opt.Registerer}
	if a.cfg.TLS.set() {
		var err error
		source, err = identity.Open(identity.Options{Files: identity.Files{CA: a.cfg.TLS.CAFile, Cert: a.cfg.TLS.CertFile, Key: a.cfg.TLS.KeyFile}, Logger: a.log})
		if err != nil {
			return bad("tls", "%w", err)
		}
		if source.Name() != a.name {
			return bad("name", "%q, but the certificate in tls.cert_file is %q's", a.name, source.Name())
		}
		if err := a.opt.Registerer.Register(source); err != nil {
			return err
		}
		a.identity = source
		dopt.TLS = source.Client(identity.ClientOptions{Accept: []identity.Role{identity.RoleCoordinator}, Protocols: []string{"h2"}})
	}
	var err error
	if a.dialer, err = lane.NewDialer(dopt); err != nil {
		return err
	}
	if err := a.dialer.SetAddresses(lane.FromConfig, texts(a.cfg.Cluster.Coordinators)); err != nil {
		return bad("cluster.coordinators", "%w", err)
	}
	a.mesh, err = mesh.New(mesh.Options{
		Name: a.name, Fleet: a.cfg.Mesh.Fleet, Role: mesh.RoleAgent, Version: a.opt.Version, Process: a.process, Listen: string(a.cfg.Mesh.Listen),
		Advertise: a.cfg.Mesh.Advertise, Join: texts(a.cfg.Mesh.Join), KeyFile: a.cfg.Mesh.KeyFile, PeersFile: filepath.Join(a.cfg.StateDir, "peers"),
		Local: a.cfg.Mesh.Listen.Loopback(), Logger: a.log, Registerer: a.opt.Registerer, OnChange: a.meshChanged,
	})
	return err
}

func texts(list []daemon.HostPort) []string {
	out := make([]string, 0, len(list))
	for _, a := range list {
		out = append(out, string(a))
	}
	return out
}

// meshChanged dials the coordinators that the mesh knows.
func (a *Agent) meshChanged(members []mesh.Member) {
	var addrs []string
	for _, m := range members {
		if m.Meta.Role == mesh.RoleCoordinator && m.Meta.ClusterAddress != "" && m.Status == mesh.StatusAlive {
			addrs = append(addrs, m.Meta.ClusterAddress)
		}
	}
	if err := a.dialer.SetAddresses(lane.FromMesh, addrs); err != nil {
		a.log.Warn("coordinator addresses of the mesh refused", "error", err)
	}
}

// Start runs the agent.
func (a *Agent) Start() error {
	if err := os.MkdirAll(a.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("agent: state directory: %w", err)
	}
	// What is known now is in the first word to coordinators.
	a.discovery.look(time.Now())
	a.loadLearnt()
	if err := a.wish.read(); err != nil {
		a.log.Error("whether this host is to be drained is not known; say it again with: waypost drain --local", "error", err)
	}
	if err := a.mesh.Start(); err != nil {
		return fmt.Errorf("agent: mesh: %w", err)
	}
	if err := a.startLocal(); err != nil {
		return errors.Join(err, a.mesh.Stop())
	}
	a.started.Store(true)
	for _, w := range a.watching() {
		w.start(a.ctx, &a.tasks)
	}
	a.startFacts()
	a.tasks.Go(func() {
		if err := a.ticks.Run(a.ctx); err != nil {
			a.log.Warn("events and lanes are read one by one, which takes more processor time", "error", err)
		}
	})
	a.tasks.Go(a.discovery.run)
	a.tasks.Go(a.tick)
	a.tasks.Go(a.keepLearnt)
	a.tasks.Go(a.sketching)
	a.dialer.Start()
	a.log.Info("agent started", "engines", len(a.watching()), "mesh", a.MeshAddress())
	return nil
}

// tick drives the prefix streams and tells what is learnt. It waits for no disk:
// the views of all coordinators age with it.
func (a *Agent) tick() {
	t := time.NewTicker(cmp.Or(a.opt.DeltaEvery, defaultDeltaEvery))
	defer t.Stop()
	for {
		select {
		case <-a.ctx.Done():
			return
		case now := <-t.C:
			outdated := false
			for _, r := range a.ranks() {
				r.tick(now)
				outdated = r.helloOutdated() || outdated
			}
			if outdated {
				a.dialer.HelloChanged()
			}
		}
	}
}

// Stop ends the agent; it leaves the mesh in good order within ctx.
func (a *Agent) Stop(ctx context.Context) error {
	a.cancel()
	a.dialer.Close()
	err := a.stopLocal(ctx)
	a.tasks.Wait()
	a.saveLearnt()
	if err := a.mesh.Leave(ctx); err != nil {
		a.log.Warn("not every member has heard the goodbye, the others take this host for lost", "error", err)
	}
	return errors.Join(err, a.mesh.Stop())
}

// MeshAddress is the gossip address, for others to join.
func (a *Agent) MeshAddress() string {
	address, _ := a.mesh.Address()
	return address
}

// Name is the host's name.
func (a *Agent) Name() string { return a.name }
