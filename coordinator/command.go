package coordinator

import (
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"waypost/systemd/daemon"
)

// Command is the daemon's command.
func Command(version string) *cobra.Command {
	cfg := DefaultConfig()
	c := &cobra.Command{
		Use: "coordinator", Short: "Run a coordinator", Args: cobra.NoArgs,
		Long: "Run a coordinator: it answers placements and keeps, with the others, what operators want.\n\n" +
			"Start the first one of a fleet once with --bootstrap; the others name it in [cluster] join.\n" +
			"Settings come from flags, WAYPOST_ variables (api.listen is WAYPOST_API_LISTEN), the file and the defaults, in this order.",
		Example: "  waypost coordinator --config /etc/waypost/coordinator.toml --bootstrap   # once\n  waypost coordinator --config /etc/waypost/coordinator.toml",
	}
	var bootstrap bool
	c.Flags().BoolVar(&bootstrap, "bootstrap", false, "make a new cluster of this coordinator; refused if it has state")
	load := daemon.Configure(c, &cfg, "/etc/waypost/coordinator.toml")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		_, done, err := load()
		if err != nil || done {
			return err
		}
		// The collector of garbage works harder near the limit; what is kept is
		// bounded by the parts themselves.
		debug.SetMemoryLimit(int64(cfg.Limits.Memory))
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
		co, err := New(Options{Config: cfg, Bootstrap: bootstrap, Version: version, Logger: log, Registerer: reg, Gatherer: reg})
		if err != nil {
			return err
		}
		started := cfg
		return daemon.Serve(cmd.Context(), log, co, co.statusLine, func() error {
			_, _, err := load()
			if err == nil {
				logging.Set(cfg.Log.Level, cfg.Log.Format)
				daemon.WarnRestart(log, &started, &cfg)
				err = co.reloadKeys()
			}
			reloads.Done(err)
			return err
		})
	}
	return c
}

// reloadKeys reads the mesh's keys and the certificate anew; bad files change
// nothing.
func (c *Coordinator) reloadKeys() error {
	err := c.mesh.ReloadKeys()
	if c.identity != nil {
		err = errors.Join(err, c.identity.Reload())
	}
	return err
}

// statusLine is what the service manager shows.
func (c *Coordinator) statusLine() string {
	leader := c.leaderName()
	if leader == "" {
		leader = "none"
	}
	return fmt.Sprintf("leader %s, policy v%d, lanes %d, mesh %d", leader, c.replica.State().FleetFile().Version, len(c.laneServer.Sessions()), len(c.mesh.Members()))
}
