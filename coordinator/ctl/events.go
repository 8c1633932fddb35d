package ctl

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	waypostv1 "waypost/proto/waypost/v1"
)

// eventsFlags choose among events.
type eventsFlags struct {
	follow     bool
	since      time.Duration
	host, kind string
	after      string
}

func eventsCommand(f *flags) *cobra.Command {
	var e eventsFlags
	c := &cobra.Command{
		Use: "events", Short: "Show what happened, as one coordinator saw it", Args: cobra.NoArgs,
		Long: "Show what happened, as one coordinator saw it: hosts and engines that came and went, views that were read again, what operators changed. " +
			"With --json each line is a message of the watch; --after takes the rev of one and goes on from there.",
		Example: "  waypost events --since 30m\n  waypost events -f --host gpu-02\n  waypost events --kind engine_restarted --json",
		RunE:    func(cmd *cobra.Command, _ []string) error { return showEvents(cmd, f, &e) },
	}
	c.Flags().BoolVarP(&e.follow, "follow", "f", false, "go on with what happens from now on")
	c.Flags().DurationVar(&e.since, "since", 0, "only what happened in this time; 0: all that is remembered")
	c.Flags().StringVar(&e.host, "host", "", "only what is about this host or its workers")
	c.Flags().StringVar(&e.kind, "kind", "", "only this event, such as engine_restarted")
	c.Flags().StringVar(&e.after, "after", "", "only what came after this rev")
	return c
}

// showEvents prints events until all that is remembered was told, or for ever.
func showEvents(cmd *cobra.Command, f *flags, e *eventsFlags) error {
	conn, err := f.dial()
	if err != nil {
		return err
	}
	// The stream is over by then; a failing close changes nothing.
	defer func() { _ = conn.Close() }()
	stream, err := operator(conn).Watch(cmd.Context(), &waypostv1.WatchRequest{Kinds: []string{"events"}, After: optional(e.after)})
	if err != nil {
		return unreachable(conn, err)
	}
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF), cmd.Context().Err() != nil:
			return nil
		case err != nil:
			return unreachable(conn, err)
		case m.GetKind() == "synced" && !e.follow:
			return nil
		case m.GetKind() == "restart":
			fmt.Fprintln(cmd.ErrOrStderr(), "(more happened than is remembered; what is remembered follows)")
		case m.Event == nil || !e.wants(m.GetEvent()):
		case f.asJSON():
			err = printLines(cmd.OutOrStdout(), []*waypostv1.WatchResponse{m})
		default:
			printHappened(cmd.OutOrStdout(), m.GetEvent())
		}
		if err != nil {
			return err
		}
	}
}

func (e *eventsFlags) wants(ev *waypostv1.Event) bool {
	if e.kind != "" && ev.GetEvent() != e.kind {
		return false
	}
	if e.since > 0 && ev.GetAgeMs() > float64(e.since)/float64(time.Millisecond) {
		return false
	}
	if e.host == "" {
		return true
	}
	for _, key := range []string{"host", "member", "worker", "target"} {
		if host, _, _ := strings.Cut(ev.GetFields()[key], "/"); host == e.host {
			return true
		}
	}
	return false
}

// printHappened is one line: when, how bad, what, and what it is about.
func printHappened(out io.Writer, e *waypostv1.Event) {
	var about []string
	for _, k := range slices.Sorted(maps.Keys(e.GetFields())) {
		v := e.GetFields()[k]
		if strings.ContainsAny(v, " \"=\t\n") || v == "" {
			v = strconv.Quote(v)
		}
		about = append(about, k+"="+v)
	}
	fmt.Fprintf(out, "%s  %-5s  %s  %s  %s\n", text(e.GetAt()), e.GetLevel(), e.GetEvent(), strings.Join(about, " "), e.GetMessage())
}
