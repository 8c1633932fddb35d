package enginefaults

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"waypost/systemd/daemon"
	"waypost/testbed/emulator"
	"waypost/testbed/emulator/faults"
	"waypost/testbed/emulator/profile"
)

// ListCommand is "waypost testbed faults".
func ListCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "faults", Short: "List the faults that an emulated engine can have", Args: cobra.NoArgs,
		Example: "  waypost testbed faults\n  waypost testbed engine --kind vllm --fault short-ring",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printFaults(cmd.OutOrStdout(), asJSON)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func printFaults(w io.Writer, asJSON bool) error {
	type shown struct {
		Name string `json:"name"`
		Kind string `json:"kind"`
		What string `json:"what"`
		Want string `json:"want"`
	}
	var all []shown
	for _, f := range faults.List() {
		all = append(all, shown{f.Name, string(f.Kind), f.What, f.Want})
	}
	if asJSON {
		return json.NewEncoder(w).Encode(map[string]any{"faults": all})
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "KIND\tFAULT\tWHAT HAPPENS\tWHAT AN AGENT MUST DO")
	for _, f := range all {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", f.Kind, f.Name, f.What, f.Want)
	}
	return t.Flush()
}

// engineOptions says which engine to run.
type engineOptions struct {
	kind, version, model, listen, fault string
}

// versionsOf are the versions of a kind, nil if there is no such kind.
func versionsOf(kind string) []string {
	if kind == string(faults.VLLM) {
		return emulator.Versions()
	}
	return profile.Versions(profile.Kind(kind))
}

func wrong(flag, format string, args ...any) error {
	return &daemon.FieldError{Field: flag, Err: fmt.Errorf(format, args...)}
}

// started is a running engine of any kind.
type started interface {
	URL() string
	EventsEndpoint() string
	ReplayEndpoint() string
	Close()
}

// run starts the engine.
func (o engineOptions) run() (started, error) {
	known := versionsOf(o.kind)
	switch {
	case known == nil:
		return nil, wrong("--kind", "%q: use vllm, sglang, trtllm or llamacpp", o.kind)
	case o.version != "" && !slices.Contains(known, o.version):
		return nil, wrong("--version", "%q: use one of %s", o.version, strings.Join(known, ", "))
	}
	var f faults.Fault
	if o.fault != "" {
		var err error
		if f, err = faults.Named(o.fault); err != nil {
			return nil, wrong("--fault", "%v", err)
		}
		if string(f.Kind) != o.kind {
			return nil, wrong("--fault", "%s is a fault of %s: use --kind %s", f.Name, f.Kind, f.Kind)
		}
	}
	if o.kind == string(faults.VLLM) {
		e, err := emulator.Of(o.version)
		if err != nil {
			return nil, err
		}
		e.Model, e.Address, e.AdminPath = o.model, o.listen, o.fault == ""
		if o.fault != "" {
			f.ToVLLM(&e)
		}
		return emulator.Start(e)
	}
	p, err := profile.Of(profile.Kind(o.kind), o.version)
	if err != nil {
		return nil, err
	}
	p.Model, p.Address = o.model, o.listen
	if o.fault != "" {
		f.ToProfile(&p)
	}
	return profile.Start(p)
}

// EngineCommand is "waypost testbed engine".
func EngineCommand() *cobra.Command {
	var o engineOptions
	c := &cobra.Command{
		Use: "engine", Short: "Run one emulated engine, with a fault or without", Args: cobra.NoArgs,
		Long: "Run one emulated engine until Ctrl-C. A fault is on from the start; GET " + faults.ControlPath + " tells of it, and\n" +
			"POST " + faults.ControlPath + ` with {"on": false} turns it off.`,
		Example: "  waypost testbed engine --kind sglang --version 0.5.18\n  waypost testbed engine --kind trtllm --fault second-reader",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return o.serve(ctx, cmd.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.kind, "kind", "vllm", "vllm, sglang, trtllm or llamacpp")
	f.StringVar(&o.version, "version", "", "release to behave as; empty: the newest")
	f.StringVar(&o.model, "model", "emulated", "served name")
	f.StringVar(&o.listen, "listen", "127.0.0.1:0", "address of the HTTP API")
	f.StringVar(&o.fault, "fault", "", `a name of "waypost testbed faults"`)
	return c
}

func (o engineOptions) serve(ctx context.Context, w io.Writer) error {
	e, err := o.run()
	if err != nil {
		return err
	}
	defer e.Close()
	fmt.Fprintf(w, "[[engine]]\nkind = %q\nurl = %q\n", o.kind, e.URL())
	if at := e.EventsEndpoint(); at != "" {
		fmt.Fprintf(w, "kv_events = %q\n", at)
	}
	if at := e.ReplayEndpoint(); at != "" {
		fmt.Fprintf(w, "kv_replay = %q\n", at)
	}
	<-ctx.Done()
	return nil
}
