package dev

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"waypost/gossip/identity"
	"waypost/systemd/daemon"
	"waypost/testbed/workload"
)

// Options says what to run.
type Options struct {
	// Engines is the number of emulated engines in each set, 1 to 64.
	Engines int
	// Kinds are the engine kinds, taken in turn; empty: vllm.
	Kinds []string
	// Coordinators is 1 or 3.
	Coordinators int
	// Duration is how long requests arrive; 0: until ctx ends.
	Duration time.Duration
	// JSON prints one object per placement and a last summary.
	JSON bool
	// Seed decides the workload.
	Seed uint64
	// Speedup divides the pauses between the turns of a conversation.
	Speedup float64
	// RequestsPerSecond is the mean rate of arrivals; 0: 1.5 per engine.
	RequestsPerSecond float64
	// Verbose logs what the parts say.
	Verbose bool
	// Version is Waypost's version.
	Version string
	// Out takes the results, Talk everything else.
	Out, Talk io.Writer
}

// endless is the workload's length when no duration is given; it is drawn
// ahead, so it has an end.
const endless = time.Hour

// Validate names the first option that cannot be used.
func (o *Options) Validate() error {
	switch {
	case o.Engines < 1 || o.Engines > 64:
		return wrong("--engines", "%d: use 1 to 64", o.Engines)
	case o.unknownKind() != "":
		return wrong("--kinds", "%q: use some of %s", o.unknownKind(), strings.Join(kinds(), ", "))
	case o.Coordinators != 1 && o.Coordinators != 3:
		return wrong("--coordinators", "%d: use 1 or 3", o.Coordinators)
	case o.Duration < 0:
		return wrong("--duration", "%s: must not be negative", o.Duration)
	case !(o.Speedup > 0) || o.Speedup > 1000:
		return wrong("--speedup", "%v: use more than 0 and at most 1000", o.Speedup)
	case !(o.RequestsPerSecond >= 0) || o.RequestsPerSecond > 1000:
		return wrong("--rate", "%v: use 0 to 1000 requests per second", o.RequestsPerSecond)
	}
	return nil
}

// unknownKind is the first kind that nothing emulates.
func (o *Options) unknownKind() string {
	for _, k := range o.Kinds {
		if !slices.Contains(kinds(), k) {
			return k
		}
	}
	return ""
}

func wrong(flag, format string, args ...any) error {
	return &daemon.FieldError{Field: flag, Err: fmt.Errorf(format, args...)}
}

// Run runs the system until the duration or ctx ends.
func Run(ctx context.Context, o Options) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	requests, err := o.requests()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "waypost-dev-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	log := slog.New(slog.DiscardHandler)
	if o.Verbose {
		log = slog.New(slog.NewTextHandler(o.Talk, nil))
	}
	began := time.Now()
	fmt.Fprintf(o.Talk, "Starting %d emulated engines (and %d for round robin), %d agents, %d coordinator(s) on loopback ...\n", o.Engines, o.Engines, o.Engines, o.Coordinators)
	f := fleet{kinds: o.Kinds, engines: o.Engines, coordinators: o.Coordinators, dir: dir, version: o.Version}
	if len(f.kinds) == 0 {
		f.kinds = []string{vllm}
	}
	s, err := newSystem(ctx, f, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	o.introduce(s, time.Since(began))
	return o.drive(ctx, s, requests)
}

func (o *Options) requests() ([]workload.Request, error) {
	trace, err := workload.SampleConversations()
	if err != nil {
		return nil, err
	}
	length, rate := o.Duration, o.RequestsPerSecond
	if length == 0 {
		length = endless
	}
	if rate == 0 {
		rate = 1.5 * float64(o.Engines)
	}
	return trace.Conversations(workload.Sampling{
		Shape: workload.Shape{MaxPromptTokens: 32_000}, Seed: o.Seed, RequestsPerSecond: rate, Duration: length, Speedup: o.Speedup,
	})
}

// introduce tells how to look at the running system.
func (o *Options) introduce(s *system, took time.Duration) {
	api := s.API(0)
	fmt.Fprintf(o.Talk, "Ready after %.1f s. API on http://%s (JSON and gRPC). From another terminal:\n", took.Seconds(), api)
	for _, line := range []string{
		"go run . workers --addr " + api,
		"go run . explain --last --addr " + api,
		"go run . members --addr unix:" + s.Agents[0].SocketPath(),
		"curl -s http://" + api + `/v1/place -d '{"input":{"tokenIds":[1,2,3]}}'`,
	} {
		fmt.Fprintln(o.Talk, "  "+line)
	}
	if o.Duration == 0 {
		fmt.Fprintln(o.Talk, "Ctrl-C ends it.")
	}
}

// drive runs the workload and prints what happens.
func (o *Options) drive(ctx context.Context, s *system, requests []workload.Request) error {
	enc := json.NewEncoder(o.Out)
	res := newResults(func(out outcome) {
		if o.JSON {
			// A reader that went away ends the run by its closed pipe.
			_ = enc.Encode(out)
		}
	})
	client := newEngineClient(model)
	defer client.close()
	shown := make(chan struct{})
	showing, stopShowing := context.WithCancel(ctx)
	go func() {
		defer close(shown)
		if !o.JSON {
			o.show(showing, res, s)
		}
	}()
	(&load{s: s.Cluster, baseline: s.baseline, client: client, res: res}).run(ctx, requests)
	stopShowing()
	<-shown
	final := res.summary()
	if o.JSON {
		return enc.Encode(map[string]summary{"summary": final})
	}
	o.compare(final)
	if final.Placements == 0 {
		return errors.New("nothing was placed")
	}
	return nil
}

// show prints the state once a second, in place on a terminal.
func (o *Options) show(ctx context.Context, res *results, s *system) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	terminal := isTerminal(o.Out)
	lines := 0
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if !terminal && n%5 != 0 {
			continue
		}
		text := o.state(res, s)
		if terminal && lines > 0 {
			fmt.Fprintf(o.Out, "\x1b[%dA\x1b[J", lines)
		}
		lines = strings.Count(text, "\n")
		fmt.Fprint(o.Out, text)
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

func (o *Options) state(res *results, s *system) string {
	sum := res.summary()
	var b strings.Builder
	fmt.Fprintf(&b, "%-22s %10s %10s %12s %9s\n", "", "REQUESTS", "TTFT P50", "TTFT P99", "REUSED")
	fmt.Fprintf(&b, "%-22s %10d %10s %12s %9s\n", "waypost", sum.Placements, msText(sum.TTFTMs.P50), msText(sum.TTFTMs.P99), share(sum.ActualReuseTokens, sum.PromptTokens))
	fmt.Fprintf(&b, "%-22s %10d %10s %12s %9s\n", "round robin", sum.Baseline.Requests, msText(sum.Baseline.TTFTMs.P50), msText(sum.Baseline.TTFTMs.P99), share(sum.Baseline.ActualReuseTokens, sum.Baseline.PromptTokens))
	res.mu.Lock()
	var names []string
	for n := range res.byWorker {
		names = append(names, n)
	}
	sort.Strings(names)
	for _, n := range names {
		fmt.Fprintf(&b, "  %-20s %10d\n", n, res.byWorker[n])
	}
	if res.lastErr != "" {
		fmt.Fprintf(&b, "  last problem: %.120s\n", res.lastErr)
	}
	res.mu.Unlock()
	return b.String()
}

func msText(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f ms", *v)
}

func share(part, whole int) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(part)/float64(whole))
}

// compare prints the result in words.
func (o *Options) compare(s summary) {
	fmt.Fprintf(o.Out, "\n%d placements: expected reuse %d tokens, engines reported %d; equal to the token in %d, %d prediction errors, %d failed, %d refused.\n",
		s.Placements, s.ExpectedReuseTokens, s.ActualReuseTokens, s.Equal, s.PredictionErrors, s.Failed, s.Refused)
	fmt.Fprintf(o.Out, "First token, p50 / p99: waypost %s / %s, round robin %s / %s on equal engines and arrivals.\n",
		msText(s.TTFTMs.P50), msText(s.TTFTMs.P99), msText(s.Baseline.TTFTMs.P50), msText(s.Baseline.TTFTMs.P99))
	if len(o.Kinds) > 1 {
		fmt.Fprintln(o.Out, "Engines are of the kinds "+strings.Join(o.Kinds, ", ")+", in turn; the other set is mixed alike.")
	}
	fmt.Fprintln(o.Out, "Engine times are a model (Llama-3.1-8B on one H100); the comparison holds for this model and workload.")
}

// Command is `waypost dev` with `dev certs`.
func Command(version string) *cobra.Command {
	o := Options{Version: version}
	c := &cobra.Command{
		Use: "dev", Short: "Run the whole system on loopback with emulated engines", Args: cobra.NoArgs,
		Long: "Run the whole system on loopback in one process: emulated engines, agents, coordinators with real Raft, real gossip,\n" +
			"and a conversation workload sampled from a real trace. A second, equal set of engines takes the same arrivals by round robin.",
		Example: "  waypost dev\n  waypost dev --duration 30s --json\n  waypost dev --coordinators 3 --engines 8\n  waypost dev --kinds vllm,sglang,trtllm,llamacpp",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			o.Out, o.Talk = cmd.OutOrStdout(), cmd.ErrOrStderr()
			err := Run(ctx, o)
			if ctx.Err() != nil && errors.Is(err, context.Canceled) {
				return nil
			}
			return err
		},
	}
	f := c.Flags()
	f.IntVar(&o.Engines, "engines", 4, "emulated engines in each set")
	f.StringSliceVar(&o.Kinds, "kinds", []string{vllm}, "engine kinds, taken in turn: "+strings.Join(kinds(), ", "))
	f.IntVar(&o.Coordinators, "coordinators", 1, "1 or 3")
	f.DurationVar(&o.Duration, "duration", 0, "how long requests arrive; 0: until Ctrl-C")
	f.BoolVar(&o.JSON, "json", false, "one object per placement and a last summary")
	f.Uint64Var(&o.Seed, "seed", 1, "seed of the workload")
	f.Float64Var(&o.Speedup, "speedup", 10, "divides the pauses between the turns of a conversation")
	f.Float64Var(&o.RequestsPerSecond, "rate", 0, "requests per second; 0: 1.5 per engine")
	f.BoolVar(&o.Verbose, "verbose", false, "print the parts' logs")
	c.AddCommand(certsCommand())
	return c
}

func certsCommand() *cobra.Command {
	var agents, coordinators []string
	var asJSON bool
	c := &cobra.Command{
		Use: "certs DIR", Short: "Write a CA, certificates and keys for a fleet", Args: cobra.ExactArgs(1),
		Long:    "Write a CA, a certificate for each agent and coordinator, one for each role of the API, the gossip key and the prefix key. Nothing is overwritten.",
		Example: "  waypost dev certs ./certs --agents gpu-01=10.0.0.11,gpu-02 --coordinators c-1",
		RunE: func(cmd *cobra.Command, args []string) error {
			written, err := identity.WriteDevCerts(args[0], agents, coordinators)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string][]identity.Written{"written": written})
			}
			for _, w := range written {
				fmt.Fprintf(cmd.OutOrStdout(), "%s  %s\n", w.Path, w.What)
			}
			return nil
		},
	}
	c.Flags().StringSliceVar(&agents, "agents", nil, "host names, each optionally NAME=ADDRESS")
	c.Flags().StringSliceVar(&coordinators, "coordinators", nil, "coordinator names, each optionally NAME=ADDRESS")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}
