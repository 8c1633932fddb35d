package agent

import (
	"context"
	"errors"
	"path/filepath"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"waypost/nvml"
)

// gpuReading is the reading of the host's GPUs, as its settings say, which may
// change. The zero value reads none.
type gpuReading struct {
	mu  sync.Mutex
	cfg GPUConfig
	// reader is nil while GPUs are not read. registered are its metrics; end ends it
	// and waits for that, nil: it does not run.
	reader     gpuReader
	registered *registrations
	end        func()
	// changed gets a value when facts have.
	changed chan struct{}
}

// client is what reads the GPUs; nil: they are not read.
func (g *gpuReading) client() gpuReader {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.reader
}

// open prepares the reading by settings, for run.
func (g *gpuReading) open(a *Agent, cfg GPUConfig) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.changed = make(chan struct{}, 1)
	return g.openLocked(a, cfg)
}

func (g *gpuReading) openLocked(a *Agent, cfg GPUConfig) error {
	g.cfg, g.reader, g.registered = cfg, nil, &registrations{Registerer: a.opt.Registerer}
	if cfg.Enabled == "off" {
		return nil
	}
	client, err := nvml.New(nvml.Options{
		Logger: a.log, Registerer: g.registered, Executable: cfg.Helper, Poll: cfg.Poll.D(),
		KernelLog: "/dev/kmsg", StateFile: filepath.Join(a.cfg.StateDir, "gpus.json"),
	})
	if err == nil {
		err = g.registered.Register(newGPUCollector(a))
	}
	if err != nil {
		g.registered.undo()
		return err
	}
	g.reader = client
	return nil
}

// run begins to read.
func (g *gpuReading) run(a *Agent) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.runLocked(a)
}

func (g *gpuReading) runLocked(a *Agent) {
	reader := g.reader
	if reader == nil {
		return
	}
	ctx, cancel := context.WithCancel(a.ctx)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		if err := reader.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			a.log.Warn("GPU facts ended", "error", err)
		}
	})
	tasks.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-reader.Changed():
				g.signal()
			}
		}
	})
	a.tasks.Go(tasks.Wait)
	g.end = func() {
		cancel()
		tasks.Wait()
	}
}

// reload reads by other settings from now on. What was kept of errors is read again.
func (g *gpuReading) reload(a *Agent, cfg GPUConfig) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if cfg == g.cfg || a.ctx.Err() != nil {
		return nil
	}
	if g.end != nil {
		g.end()
		g.end = nil
	}
	g.registered.undo()
	err := g.openLocked(a, cfg)
	g.runLocked(a)
	g.signal()
	return err
}

func (g *gpuReading) signal() {
	select {
	case g.changed <- struct{}{}:
	default:
	}
}

// registrations remembers what was registered with it, to take it back.
type registrations struct {
	prometheus.Registerer
	all []prometheus.Collector
}

// Register implements prometheus.Registerer.
func (r *registrations) Register(c prometheus.Collector) error {
	err := r.Registerer.Register(c)
	if err == nil {
		r.all = append(r.all, c)
	}
	return err
}

func (r *registrations) undo() {
	for _, c := range r.all {
		r.Unregister(c)
	}
	r.all = nil
}
