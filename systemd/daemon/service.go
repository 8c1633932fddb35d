package daemon

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
)

// Service is a daemon as its command runs it.
type Service interface {
	// Start runs it and returns once it serves.
	Start() error
	// Stop ends it within ctx.
	Stop(ctx context.Context) error
}

// stopWithin bounds an orderly end; the unit's own bound is longer.
const stopWithin = 10 * time.Second

// stuckAfter is how long the service loop may take for a turn of a second.
const stuckAfter = 10 * time.Second

// Serve runs a service until a signal ends it, and speaks to the service
// manager meanwhile. reload is called on SIGHUP.
func Serve(parent context.Context, log *slog.Logger, s Service, statusLine func() string, reload func() error) error {
	ctx, hup, release := Signals(parent)
	defer release()
	n := NewNotifier(log)
	if err := s.Start(); err != nil {
		return err
	}
	n.Ready()
	// The status line takes the locks of what matters, so a loop that gets
	// round proves that none of them is stuck.
	var turned atomic.Int64
	turned.Store(time.Now().UnixNano())
	watch := make(chan struct{})
	go func() {
		defer close(watch)
		n.Watchdog(ctx, func() bool { return time.Since(time.Unix(0, turned.Load())) < stuckAfter })
	}()
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-t.C:
			n.Status(statusLine())
			turned.Store(time.Now().UnixNano())
		case <-hup:
			n.Reloading()
			if err := reload(); err != nil {
				log.Error("configuration not reloaded; the former one stays in force", "error", err)
			}
			n.Ready()
		}
	}
	n.Stopping()
	<-watch
	log.Info("stopping", "cause", context.Cause(ctx))
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(parent), stopWithin)
	defer cancel()
	return s.Stop(stopCtx)
}

// Configure adds the flags of a configuration to a command: --config, one per
// setting, and --print-config. The returned function loads the configuration
// when the command runs; done says that printing was all that was asked for.
func Configure(cmd *cobra.Command, cfg any, standardFile string) (load func() (loaded *Loaded, done bool, err error)) {
	var file string
	var show bool
	cmd.Flags().StringVar(&file, "config", standardFile, "configuration file")
	cmd.Flags().BoolVar(&show, "print-config", false, "print every setting with its value and where it comes from, and end")
	BindFlags(cmd.Flags(), cfg)
	return func() (*Loaded, bool, error) {
		loaded, err := Load(cfg, LoadOptions{File: file, MustExist: cmd.Flags().Changed("config"), Env: os.Environ(), Flags: cmd.Flags()})
		if err != nil {
			return nil, false, err
		}
		for _, u := range loaded.UnknownEnv {
			fmt.Fprintln(cmd.ErrOrStderr(), "warning:", u)
		}
		if show {
			PrintSettings(cmd.OutOrStdout(), loaded.Settings)
		}
		return loaded, show, nil
	}
}

// PrintSettings prints a table of settings with their sources.
func PrintSettings(w io.Writer, settings []Setting) {
	for _, s := range settings {
		fmt.Fprintf(w, "%-28s = %-24s # %s; %s\n", s.Key, s.Value, s.Source, s.Help)
	}
}
