package sim

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"waypost/coordinator/placement"
	"waypost/testbed/workload"
)

// Command is "waypost testbed sim".
func Command() *cobra.Command {
	var model, trace, cut, objective, evidenceList, scenarioName string
	var seconds float64
	var raw, asJSON bool
	var notice, event time.Duration
	o := T2Options{}
	c := &cobra.Command{
		Use:   "sim --policy RULE",
		Short: "Replay a workload against simulated engines in virtual time and judge a placement rule",
		Long: `Replay a workload against simulated engines in virtual time and judge a placement rule. The same options and
seed give the same run.

Model t2 is the mock engine of NVIDIA Dynamo 1.6 at its defaults, checked against that engine's own replay. Requests
come from a trace in Mooncake's format; without --trace from the sample that ships with the source.

Rules: ` + strings.Join(t2Policies, ", ") + `. The others know first tokens, ends and caches at once, as in their own
replay; waypost hears of first tokens and ends 250 ms late and of cache events 1 s late, learns answer lengths and
speeds, and decides with the production rule over agents' load reports. --notice-delay and --event-delay change that
for any rule.`,
		Example: `  waypost testbed sim --trace conversation.jsonl --workers 8 --speedup 4 --policy waypost
  waypost testbed sim --trace conversation.jsonl --speedup 6 --policy waypost --coordinators 4 --cut place --copies 3
  waypost testbed sim --trace conversation.jsonl --speedup 4 --policy dynamo-s32 --crowd --json`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Spread = !raw
			o.NoticeMs, o.EventMs = -1, -1
			if cmd.Flags().Changed("notice-delay") {
				o.NoticeMs = float64(notice) / float64(time.Millisecond)
			}
			if cmd.Flags().Changed("event-delay") {
				o.EventMs = float64(event) / float64(time.Millisecond)
			}
			if notice < 0 || event < 0 {
				return fmt.Errorf("%w: --notice-delay and --event-delay: want 0 or more", ErrOptions)
			}
			var err error
			if o.Theta, err = placement.ThetaOf(objective); err != nil {
				return fmt.Errorf("%w: --objective: %w", ErrOptions, err)
			}
			if o.Cut, err = parseCut(cut); err != nil {
				return err
			}
			if o.Evidence, err = parseEvidence(evidenceList); err != nil {
				return err
			}
			switch model {
			case "t2":
			case "ledger":
				l := LedgerOptions{
					Policy: o.Policy, Scenario: scenarioName, Seconds: seconds, Copies: o.Copies, Seed: o.Seed,
					Cut: o.Cut, Evidence: o.Evidence, Theta: o.Theta, Set: o.Set, Learn: o.Learn,
				}
				if cmd.Flags().Changed("coordinators") {
					l.Coordinators = o.Coordinators
				}
				if !cmd.Flags().Changed("evidence") {
					l.Evidence = evidence{stores: true}
				}
				s, err := RunLedger(l, progressTo(cmd.ErrOrStderr()))
				if err != nil {
					return err
				}
				if asJSON {
					return s.writeJSON(cmd.OutOrStdout())
				}
				return s.writeTable(cmd.OutOrStdout())
			default:
				return fmt.Errorf("%w: --model: %q is not t2 or ledger", ErrOptions, model)
			}
			t, name, err := openTrace(trace)
			if err != nil {
				return err
			}
			s, err := RunT2(t, o, progressTo(cmd.ErrOrStderr()))
			if err != nil {
				return err
			}
			s.Scope.Trace = name
			if asJSON {
				return s.writeJSON(cmd.OutOrStdout())
			}
			return s.writeTable(cmd.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&model, "model", "t2", "engine model: t2 or ledger")
	f.StringVar(&scenarioName, "scenario", "base", "model ledger: "+strings.Join(scenarioNames(), ", "))
	f.Float64Var(&seconds, "seconds", 240, "model ledger: how long requests come")
	f.StringVar(&trace, "trace", "", "trace file; without it the sample that ships with the source")
	f.BoolVar(&raw, "raw-times", false, "take time stamps as they are instead of spreading equal ones up to the next")
	f.BoolVar(&o.Unique, "unique", false, "let no two requests share a prefix")
	f.Float64Var(&o.Speedup, "speedup", 1, "divide all times of the trace")
	f.IntVar(&o.Workers, "workers", 8, "number of workers")
	f.IntVar(&o.SlowWorkers, "slow-workers", 0, "number of them that are slower")
	f.Float64Var(&o.SlowFactor, "slow-factor", 1.6, "how much longer their steps take")
	f.StringVar(&o.Policy, "policy", policyWaypost, "rule")
	f.StringVar(&objective, "objective", placement.ObjectiveBalanced, "objective of waypost: first-token, balanced, throughput")
	f.IntVar(&o.Coordinators, "coordinators", 1, "number of coordinators, waypost only; requests come to any of them")
	f.StringVar(&cut, "cut", "", "what coordinators do not share: place, at-once (load reports only by their period), all; a list")
	f.StringVar(&evidenceList, "evidence", "marks", "what tells waypost's agents how far claims are: marks (callers' notices), events (stored blocks), none; a list")
	f.DurationVar(&notice, "notice-delay", 0, "how late first tokens and ends are told (default 250ms for waypost, else 0)")
	f.DurationVar(&event, "event-delay", 0, "how late cache events are told (default 1s for waypost, else 0)")
	f.BoolVar(&o.Learn, "learn", true, "let agents learn their worker's speed")
	f.Float64Var(&o.PriorScale, "prior-scale", 1, "multiply the step times that agents start from")
	f.StringArrayVar(&o.Set, "set", nil, "change a constant of waypost's policy, name=value; once per constant")
	f.BoolVar(&o.Crowd, "crowd", false, "add a flash crowd: 120/s for 60 s on one prefix of 8,192 tokens, 256 own, 100 output tokens")
	f.Float64Var(&o.CrowdStartSec, "crowd-at", -1, "when it begins, in s of virtual time; default: in the middle")
	f.IntVar(&o.Copies, "copies", 1, "replay so many copies with each arrival moved by 0 to 2 ms and take means; 1: once, unmoved")
	f.Uint64Var(&o.Seed, "seed", 1, "seed of all that is drawn")
	f.BoolVar(&asJSON, "json", false, "print the summary as JSON")
	return c
}

// parseCut reads a list of what is not shared.
func parseCut(list string) (cuts, error) {
	var c cuts
	if list == "" {
		return c, nil
	}
	for _, word := range strings.Split(list, ",") {
		switch strings.TrimSpace(word) {
		case "place":
			c.place = true
		case "at-once":
			c.atOnce = true
		case "all":
			c.all = true
		default:
			return c, fmt.Errorf("%w: --cut: %q is not place, at-once or all", ErrOptions, word)
		}
	}
	return c, nil
}

// parseEvidence reads a list of evidence.
func parseEvidence(list string) (evidence, error) {
	var e evidence
	for _, word := range strings.Split(list, ",") {
		switch strings.TrimSpace(word) {
		case "marks":
			e.marks = true
		case "events":
			e.stores = true
		case "none":
		default:
			return e, fmt.Errorf("%w: --evidence: %q is not marks, events or none", ErrOptions, word)
		}
	}
	return e, nil
}

func (e evidence) String() string {
	switch {
	case e.marks && e.stores:
		return "marks,events"
	case e.marks:
		return "marks"
	case e.stores:
		return "events"
	}
	return "none"
}

func (c cuts) String() string {
	var words []string
	for _, w := range []struct {
		set  bool
		word string
	}{{c.place, "place"}, {c.atOnce, "at-once"}, {c.all, "all"}} {
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
		return nil, "", err
	}
	defer f.Close()
	t, err := workload.ReadMooncake(f)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", file, err)
	}
	return t, filepath.Base(file), nil
}

// progressTo prints how far a run is, every tenth of it.
func progressTo(w io.Writer) func(copyIndex, copies, done, all int) {
	last := -1
	return func(copyIndex, copies, done, all int) {
		tenth := copyIndex*10 + 10*done/all
		if tenth == last {
			return
		}
		last = tenth
		if copies > 1 {
			fmt.Fprintf(w, "copy %d of %d: ", copyIndex+1, copies)
		}
		fmt.Fprintf(w, "%d of %d requests served\n", done, all)
	}
}
