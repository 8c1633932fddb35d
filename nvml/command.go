package nvml

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// Bounds of the poll interval.
const (
	minPoll = 50 * time.Millisecond
	maxPoll = time.Minute
)

// Command is the hidden command nvml: the child process that loads the driver
// library and writes frames to standard output until standard input ends.
func Command() *cobra.Command {
	var library string
	var poll time.Duration
	cmd := &cobra.Command{
		Use:    "nvml",
		Short:  "Read GPU facts for the agent (started by it)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if poll < minPoll || poll > maxPoll {
				return fmt.Errorf("--poll is %v, allowed is %v to %v", poll, minPoll, maxPoll)
			}
			return runCommand(cmd.Context(), library, poll)
		},
	}
	cmd.Flags().StringVar(&library, "library", "", "path of the driver library (default "+defaultLibrary+" as the loader finds it)")
	cmd.Flags().DurationVar(&poll, "poll", time.Second, "interval between readings")
	return cmd
}

// runCommand is the child's life. It ends the process itself, because a driver
// call that does not return must not keep a child whose parent is gone.
func runCommand(ctx context.Context, library string, poll time.Duration) error {
	// A terminal and systemd signal the whole group: the parent decides.
	signal.Ignore(os.Interrupt, syscall.SIGTERM)
	out, err := takeStdout()
	if err != nil {
		return fmt.Errorf("keep standard output for frames: %w", err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(exitParentGone)
	}()
	if ctx == nil {
		ctx = context.Background()
	}
	c := &child{source: librarySource(library), poll: poll, out: out}
	os.Exit(c.run(ctx))
	return nil
}
