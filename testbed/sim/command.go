package sim

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"waypost/coordinator/placement"
	"waypost/systemd/daemon"
	"waypost/testbed/workload"
)

// The engine models by the names of --model.
const (
	modelT2     = "t2"
	modelLedger = "ledger"
)

// flags are the command's.
type flags struct {
	model, trace, cut, evidence, objective, scenario string
	seconds                                          float64
	rawTimes, json                                   bool
	notice, event                                    time.Duration
	t2                                               T2Options
}

// Command is "waypost testbed sim".
func Command() *cobra.Command {
	var f flags
	c := &cobra.Command{
		Use:   "sim --policy RULE",
		Short: "Replay a workload against simulated engines in virtual time and judge a placement rule",
		Long: `Replay a workload against simulated engines in virtual time and judge a placement rule. The same options and
seed give the same run.

Model t2 is the mock engine of NVIDIA Dynamo 1.6 at its defaults, checked against that engine's own replay. Requests
come from a trace in Mooncake's format; without --trace from the sample that ships with the source. Rules: ` + strings.Join(t2Policies, ", ") + `.
The others know first tokens, ends and caches at once, as in their own replay; waypost hears of first tokens and
ends 250 ms late and of cache events 1 s late, learns answer lengths and speeds, and decides with the production rule
over agents' load reports. --notice-delay and --event-delay change that for any rule.

Model ledger is a plain engine under conversations of lognormal length with faults (--scenario). Rules: ` + strings.Join(ledgerPolicies, ", ") + `.
oracle knows the engines' true queues, raw believes their gauges; waypost hears of stored blocks.

Progress goes to standard error. With --json the last object printed is {"summary":{...}}; times are ms.`,
		Example: `  waypost testbed sim --trace conversation.jsonl --workers 8 --speedup 4 --policy waypost
  waypost testbed sim --trace conversation.jsonl --speedup 6 --policy waypost --coordinators 4 --cut place --copies 3
  waypost testbed sim --trace conversation.jsonl --speedup 4 --policy dynamo-s32 --crowd --json
  waypost testbed sim --model ledger --scenario stale-gauges --coordinators 4 --copies 8`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	f.define(c)
	return c
}

func (f *flags) define(c *cobra.Command) {
	o, s := &f.t2, c.Flags()
	s.StringVar(&f.model, "model", modelT2, "engine model: t2 or ledger")
	s.StringVar(&o.Policy, "policy", policyWaypost, "placement rule")
	s.StringVar(&f.trace, "trace", "", "t2: trace file; without it the sample that ships with the source")
	s.IntVar(&o.Workers, "workers", 8, "t2: number of workers")
	s.Float64Var(&o.Speedup, "speedup", 1, "t2: divide all times of the trace")
	s.IntVar(&o.Coordinators, "coordinators", 1, "number of coordinators, waypost only; requests come to any of them (ledger: the scenario's)")
	s.StringVar(&f.scenario, "scenario", scenarios[0].name, "ledger: "+strings.Join(scenarioNames(), ", "))
	s.Float64Var(&f.seconds, "seconds", 240, "ledger: how long requests come")
	s.StringVar(&f.cut, "cut", "", "what coordinators do not share: place, at-once (load reports only by their period), all; a list")
	s.StringVar(&f.evidence, "evidence", "marks", "what tells waypost's agents how far claims are: marks (callers' notices), events (stored blocks), none; a list (ledger: events)")
	s.DurationVar(&f.notice, "notice-delay", 0, "t2: how late first tokens and ends are told (default 250ms for waypost, else 0)")
	s.DurationVar(&f.event, "event-delay", 0, "t2: how late cache events are told (default 1s for waypost, else 0)")
	s.StringVar(&f.objective, "objective", placement.ObjectiveBalanced, "objective of waypost: first-token, balanced, throughput")
	s.BoolVar(&o.Learn, "learn", true, "let agents learn their worker's speed")
	s.Float64Var(&o.PriorScale, "prior-scale", 1, "t2: multiply the step times that agents start from")
	s.StringArrayVar(&o.Set, "set", nil, "change a constant of waypost's policy, name=value; once per constant")
	s.BoolVar(&f.rawTimes, "raw-times", false, "t2: take time stamps as they are instead of spreading equal ones up to the next")
	s.BoolVar(&o.Unique, "unique", false, "t2: let no two requests share a prefix")
	s.IntVar(&o.SlowWorkers, "slow-workers", 0, "t2: number of workers that are slower")
	s.Float64Var(&o.SlowFactor, "slow-factor", 1.6, "t2: how much longer their steps take")
	s.BoolVar(&o.Crowd, "crowd", false, "t2: add a flash crowd: 120/s for 60 s on one prefix of 8,192 tokens, 256 own, 100 output tokens")
	s.Float64Var(&o.CrowdStartSec, "crowd-at", -1, "t2: when it begins, in s of virtual time; default: in the middle")
	s.IntVar(&o.Copies, "copies", 1, "t2: replay so many copies with each arrival moved by 0 to 2 ms and take means (1: once, unmoved); ledger: number of seeds")
	s.Uint64Var(&o.Seed, "seed", 1, "seed of all that is drawn")
	s.BoolVar(&f.json, "json", false, "print the summary as JSON")
	for name, words := range map[string][]string{
		"model":     {modelT2, modelLedger},
		"policy":    append(append([]string{}, t2Policies...), policyOracle, policyRaw),
		"scenario":  scenarioNames(),
		"cut":       {cutPlace, cutAtOnce, cutAll},
		"evidence":  {evidenceMarks, evidenceEvents, evidenceNone},
		"objective": {placement.ObjectiveFirstToken, placement.ObjectiveBalanced, placement.ObjectiveThroughput},
	} {
		if err := c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err) // the flag is defined above
		}
	}
}

// wrong blames a flag.
func wrong(flag, format string, args ...any) error {
	return &daemon.FieldError{Field: "--" + flag, Err: fmt.Errorf(format, args...)}
}

// modelFlags are the flags that only one model knows.
var modelFlags = map[string][]string{
	modelT2: {
		"trace", "workers", "speedup", "notice-delay", "event-delay", "prior-scale", "raw-times", "unique",
		"slow-workers", "slow-factor", "crowd", "crowd-at",
	},
	modelLedger: {"scenario", "seconds"},
}

func (f *flags) run(cmd *cobra.Command) error {
	if _, known := modelFlags[f.model]; !known {
		return wrong("model", "%q is not %s or %s", f.model, modelT2, modelLedger)
	}
	for model, names := range modelFlags {
		for _, name := range names {
			if model != f.model && cmd.Flags().Changed(name) {
				return wrong(name, "belongs to model %s, not %s", model, f.model)
			}
		}
	}
	o := &f.t2
	var err error
	if o.Theta, err = placement.ThetaOf(f.objective); err != nil {
		return wrong("objective", "%w", err)
	}
	if o.Cut, err = parseCut(f.cut); err != nil {
		return err
	}
	if o.Evidence, err = parseEvidence(f.evidence); err != nil {
		return err
	}
	var s interface {
		writeJSON(io.Writer) error
		writeTable(io.Writer) error
	}
	if f.model == modelLedger {
		s, err = f.runLedger(cmd)
	} else {
		s, err = f.runT2(cmd)
	}
	if err != nil {
		return err
	}
	if f.json {
		return s.writeJSON(cmd.OutOrStdout())
	}
	return s.writeTable(cmd.OutOrStdout())
}

func (f *flags) runT2(cmd *cobra.Command) (*Summary, error) {
	o := f.t2
	o.Spread = !f.rawTimes
	o.NoticeMs, o.EventMs = -1, -1
	for _, d := range []struct {
		flag  string
		value time.Duration
		ms    *float64
	}{{"notice-delay", f.notice, &o.NoticeMs}, {"event-delay", f.event, &o.EventMs}} {
		if d.value < 0 {
			return nil, wrong(d.flag, "%s is negative", d.value)
		}
		if cmd.Flags().Changed(d.flag) {
			*d.ms = float64(d.value) / float64(time.Millisecond)
		}
	}
	t, name, err := openTrace(f.trace)
	if err != nil {
		return nil, err
	}
	s, err := RunT2(t, o, progressTo(cmd.Context(), cmd.ErrOrStderr()))
	if err != nil {
		return nil, err
	}
	s.Scope.Trace = name
	return s, nil
}

func (f *flags) runLedger(cmd *cobra.Command) (*LedgerSummary, error) {
	o := LedgerOptions{
		Policy: f.t2.Policy, Scenario: f.scenario, Seconds: f.seconds, Copies: f.t2.Copies, Seed: f.t2.Seed,
		Cut: f.t2.Cut, Evidence: f.t2.Evidence, Theta: f.t2.Theta, Set: f.t2.Set, Learn: f.t2.Learn,
	}
	if cmd.Flags().Changed("coordinators") {
		if o.Coordinators = f.t2.Coordinators; o.Coordinators < 1 {
			return nil, wrong("coordinators", "%d is below 1", o.Coordinators)
		}
	}
	if !cmd.Flags().Changed("evidence") {
		o.Evidence = evidence{stores: true}
	}
	return RunLedger(o, progressTo(cmd.Context(), cmd.ErrOrStderr()))
}

// The words of --cut and --evidence.
const (
	cutPlace  = "place"
	cutAtOnce = "at-once"
	cutAll    = "all"

	evidenceMarks  = "marks"
	evidenceEvents = "events"
	evidenceNone   = "none"
)

// parseCut reads a list of what is not shared.
func parseCut(list string) (cuts, error) {
	var c cuts
	if list == "" {
		return c, nil
	}
	for _, word := range strings.Split(list, ",") {
		switch strings.TrimSpace(word) {
		case cutPlace:
			c.place = true
		case cutAtOnce:
			c.atOnce = true
		case cutAll:
			c.all = true
		default:
			return c, wrong("cut", "%q is not %s, %s or %s", word, cutPlace, cutAtOnce, cutAll)
		}
	}
	return c, nil
}

// parseEvidence reads a list of evidence.
func parseEvidence(list string) (evidence, error) {
	var e evidence
	for _, word := range strings.Split(list, ",") {
		switch strings.TrimSpace(word) {
		case evidenceMarks:
			e.marks = true
		case evidenceEvents:
			e.stores = true
		case evidenceNone:
		default:
			return e, wrong("evidence", "%q is not %s, %s or %s", word, evidenceMarks, evidenceEvents, evidenceNone)
		}
	}
	return e, nil
}

func (e evidence) String() string {
	var words []string
	if e.marks {
		words = append(words, evidenceMarks)
	}
	if e.stores {
		words = append(words, evidenceEvents)
	}
	if words == nil {
		return evidenceNone
	}
	return strings.Join(words, ",")
}

func (c cuts) String() string {
	var words []string
	for _, w := range []struct {
		set  bool
		word string
	}{{c.place, cutPlace}, {c.atOnce, cutAtOnce}, {c.all, cutAll}} {
		if w.set {
			words = append(words, w.word)
		}
	}
	return strings.Join(words, ",")
}

// openTrace reads a trace and gives its name.
func openTrace(file string) (*workload.Trace, string, error) {
	if file == "" {
		t, err := workload.Sample()
		return t, "sample", err
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, "", wrong("trace", "%w", err)
	}
	defer f.Close()
	t, err := workload.ReadMooncake(f)
	if err != nil {
		return nil, "", wrong("trace", "%s: %w", file, err)
	}
	return t, filepath.Base(file), nil
}

// progressTo prints how far a run is, every tenth of it; once ctx is over, the run
// is as well.
func progressTo(ctx context.Context, w io.Writer) func(copyIndex, copies, done, all int) error {
	last := -1
	return func(copyIndex, copies, done, all int) error {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("stopped at copy %d of %d, %d of %d requests served: %w", copyIndex+1, copies, done, all, err)
		}
		tenth := copyIndex*10 + 10*done/all
		if tenth == last {
			return nil
		}
		last = tenth
		if copies > 1 {
			fmt.Fprintf(w, "copy %d of %d: ", copyIndex+1, copies)
		}
		fmt.Fprintf(w, "%d of %d requests served\n", done, all)
		return nil
	}
}
