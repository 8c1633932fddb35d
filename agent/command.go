package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"waypost/systemd/daemon"
)

// gcPercent is how much the heap may grow between two collections. Nearly all of
// it are mirrors of block tables, which hold no pointers: a collection takes two to
// six milliseconds, twice in three seconds with eight busy engines, and the host's
// memory belongs to the engines.
const gcPercent = 8

// tidyEvery is how often memory is handed back. It takes a few milliseconds.
const tidyEvery = 10 * time.Second

// handBack gives the system what only the start, or the growth of a table, needed:
// free pages of the heap, and mapped pages of the program's file.
func handBack() error {
	debug.FreeOSMemory()
	return daemon.DropFilePages()
}

// tidy hands memory back until ctx ends.
func tidy(ctx context.Context, log *slog.Logger, handBack func() error) {
	t := time.NewTicker(tidyEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			if err := handBack(); err != nil {
				log.Debug("pages of the program's file stay mapped", "error", err)
			}
		}
	}
}

// Command is the daemon's command.
func Command(version string) *cobra.Command {
	cfg := DefaultConfig()
	c := &cobra.Command{
		Use: "agent", Short: "Run the agent of this GPU host", Args: cobra.NoArgs,
		Long: "Run the agent of this GPU host: it reads the engines and GPUs, and tells the coordinators.\n\n" +
			"Settings come from flags, WAYPOST_ variables (mesh.listen is WAYPOST_MESH_LISTEN), the file and the defaults, in this order.",
		Example: "  waypost agent --config /etc/waypost/agent.toml\n  waypost agent --print-config",
	}
	load := daemon.Configure(c, &cfg, "/etc/waypost/agent.toml")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		_, done, err := load()
		if err != nil || done {
			return err
		}
		runtime.GOMAXPROCS(cfg.Limits.CPUs)
		runtime.MemProfileRate = 0 // nobody reads a profile, whose table takes a megabyte
		if os.Getenv("GOGC") == "" {
			debug.SetGCPercent(gcPercent)
		}
		log, logging := daemon.NewLogger(cmd.ErrOrStderr(), cfg.Log.Level, cfg.Log.Format)
		reg := prometheus.NewRegistry()
		log, err = daemon.CountEvents(log, reg)
		if err != nil {
			return err
		}
		reloads, err := daemon.NewReloadMetrics(reg)
		if err != nil {
			return err
		}
		a, err := New(Options{Config: cfg, Version: version, Logger: log, Registerer: reg, Gatherer: reg})
		if err != nil {
			return err
		}
		started := cfg
		ctx, end := context.WithCancel(cmd.Context())
		var tasks sync.WaitGroup
		defer tasks.Wait()
		defer end()
		tasks.Go(func() { tidy(ctx, log, handBack) })
		return daemon.Serve(ctx, log, a, a.statusLine, func() error {
			_, _, err := load()
			if err == nil {
				logging.Set(cfg.Log.Level, cfg.Log.Format)
				daemon.WarnRestart(log, &started, &cfg)
				a.discovery.reload(cfg.Discover)
				err = errors.Join(a.gpus.reload(a, cfg.GPU), a.reloadKeys())
			}
			reloads.Done(err)
			return err
		})
	}
	return c
}

// reloadKeys reads the mesh's keys and the certificate anew; bad files change
// nothing.
func (a *Agent) reloadKeys() error {
	err := a.mesh.ReloadKeys()
	if a.identity != nil {
		err = errors.Join(err, a.identity.Reload())
	}
	return err
}

// statusLine is what the service manager shows.
func (a *Agent) statusLine() string {
	ready, up := 0, 0
	for _, r := range a.ranks() {
		if id := r.identity(); id.known {
			ready++
		}
	}
	lanes := a.dialer.Status()
	for _, l := range lanes {
		if l.State == "up" {
			up++
		}
	}
	return fmt.Sprintf("%d engines, %d workers known, lanes %d/%d, mesh %d", len(a.watching()), ready, up, len(lanes), len(a.mesh.Members()))
}
