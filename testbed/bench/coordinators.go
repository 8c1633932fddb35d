package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"waypost/testbed/cluster"
	"waypost/testbed/dev"
	"waypost/testbed/emulator"
	"waypost/testbed/workload"
)

// Coordinators says how several coordinators are compared with one.
type Coordinators struct {
	// Quick takes one short round.
	Quick bool
	// Progress is told what is being measured; nil: nobody is.
	Progress func(what string)
}

// Shared is what a number of coordinators made of a workload.
type Shared struct {
	Coordinators int
	// Cut says that they could not tell each other what they placed.
	Cut bool
	// Requests were answered; Lost were refused or failed.
	Requests, Lost int
	// MeanMs, P50Ms and P99Ms are of the time to the first token.
	MeanMs, P50Ms, P99Ms float64
	// Reuse is the share of the prompts' tokens that engines had.
	Reuse float64
	// ToOne is the mean of the rounds' ratios of MeanMs to that of one
	// coordinator; 0: none was measured.
	ToOne float64

	ttftMs                     []float64
	promptTokens, reusedTokens int
	ratios                     []float64
}

// CoordinatorsReport is what was measured.
type CoordinatorsReport struct {
	Quick bool
	Arms  []Shared
	Took  time.Duration
}

// coordinatorsPlan is one size of the comparison.
type coordinatorsPlan struct {
	engines        int
	perSecond      float64
	length         time.Duration
	rounds         int
	maxPrompt      int
	coordinators   int
	speed, speedup float64 // of engines, and of the pauses between turns
}

func (o Coordinators) plan() coordinatorsPlan {
	p := coordinatorsPlan{engines: 8, perSecond: 12, length: 90 * time.Second, rounds: 3, maxPrompt: 32_000, coordinators: 4, speed: 1, speedup: 1}
	if o.Quick {
		p.length, p.rounds = 40*time.Second, 1
	}
	return p
}

// Run measures all arms, in turn within each round. With an error it returns
// what was measured before.
func (o Coordinators) Run(ctx context.Context) (*CoordinatorsReport, error) {
	began, p := time.Now(), o.plan()
	r := &CoordinatorsReport{Quick: o.Quick}
	err := o.run(ctx, p, r)
	r.Took = time.Since(began)
	return r, err
}

func (o Coordinators) run(ctx context.Context, p coordinatorsPlan, r *CoordinatorsReport) error {
	trace, err := workload.SampleConversations()
	if err != nil {
		return err
	}
	arms := []Shared{{Coordinators: 1}, {Coordinators: p.coordinators}, {Coordinators: p.coordinators, Cut: true}}
	for round := range p.rounds {
		requests, err := trace.Conversations(workload.Sampling{
			Shape: workload.Shape{MaxPromptTokens: p.maxPrompt}, Seed: benchSeed + uint64(round), RequestsPerSecond: p.perSecond, Duration: p.length, Speedup: p.speedup,
		})
		if err != nil {
			return err
		}
		one := 0.0
		for i := range arms {
			a := &arms[i]
			if o.Progress != nil {
				o.Progress(fmt.Sprintf("round %d of %d: %d requests by %s", round+1, p.rounds, len(requests), a.name()))
			}
			meanMs, err := a.drive(ctx, p, requests)
			if err != nil {
				return fmt.Errorf("%s: %w", a.name(), err)
			}
			if i == 0 {
				one = meanMs
			}
			a.ratios = append(a.ratios, meanMs/one)
		}
		r.Arms = r.Arms[:0]
		for i := range arms {
			arms[i].sum()
			r.Arms = append(r.Arms, arms[i])
		}
	}
	return nil
}

func (a *Shared) name() string {
	switch {
	case a.Cut:
		return fmt.Sprintf("%d coordinators, PLACE cut", a.Coordinators)
	case a.Coordinators == 1:
		return "1 coordinator"
	}
	return fmt.Sprintf("%d coordinators", a.Coordinators)
}

// drive starts a cluster with empty caches, sends it the workload and returns
// the mean time to the first token.
func (a *Shared) drive(ctx context.Context, p coordinatorsPlan, requests []workload.Request) (meanMs float64, err error) {
	dir, err := os.MkdirTemp("", "waypost-bench")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	engines := slices.Repeat([]emulator.Options{{Model: benchModel, StreamInterval: 25, Speed: p.speed}}, p.engines)
	c, err := cluster.Start(ctx, cluster.Options{Dir: dir, Engines: engines, Coordinators: a.Coordinators, Version: "bench"})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.Stop()) }()
	for _, co := range c.Coordinators {
		co.CutPlaces(a.Cut)
	}
	d := dev.Drive(ctx, c, benchModel, requests)
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if len(d.TTFTMs) == 0 {
		return 0, fmt.Errorf("nothing was answered: %s", d.Problem)
	}
	a.Lost += d.Failed + d.Refused
	a.promptTokens, a.reusedTokens = a.promptTokens+d.PromptTokens, a.reusedTokens+d.ReusedTokens
	a.ttftMs = append(a.ttftMs, d.TTFTMs...)
	return mean(d.TTFTMs), nil
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// sum makes the figures of all rounds so far.
func (a *Shared) sum() {
	slices.Sort(a.ttftMs)
	n := len(a.ttftMs)
	a.Requests, a.MeanMs, a.P50Ms, a.P99Ms = n, mean(a.ttftMs), a.ttftMs[(n-1)/2], a.ttftMs[(n-1)*99/100]
	a.Reuse = float64(a.reusedTokens) / float64(max(1, a.promptTokens))
	a.ToOne = mean(a.ratios)
}

// sharedRow is one object of the JSON output.
type sharedRow struct {
	Coordinators int     `json:"coordinators"`
	PlaceCut     bool    `json:"placeCut"`
	Requests     int     `json:"requests"`
	Lost         int     `json:"lost"`
	TTFTMs       meanRow `json:"ttftMs"`
	Reuse        float64 `json:"reuse"`
	RatioToOne   float64 `json:"ratioToOne"`
}

type meanRow struct {
	Mean float64 `json:"mean"`
	quantiles
}

// IsEmpty says that nothing was measured.
func (r *CoordinatorsReport) IsEmpty() bool { return len(r.Arms) == 0 }

// WriteJSON writes one object a line.
func (r *CoordinatorsReport) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	for i := range r.Arms {
		a := &r.Arms[i]
		if err := e.Encode(sharedRow{a.Coordinators, a.Cut, a.Requests, a.Lost, meanRow{a.MeanMs, quantiles{a.P50Ms, a.P99Ms}}, a.Reuse, a.ToOne}); err != nil {
			return err
		}
	}
	return nil
}

// What several coordinators may cost in mean time to the first token.
const (
	sharedFactor = 1.1
	cutFactor    = 1.15
)

func (r *CoordinatorsReport) targets() (out []target) {
	for i := range r.Arms {
		a := &r.Arms[i]
		bound := sharedFactor
		if a.Cut {
			bound = cutFactor
		}
		if a.Coordinators > 1 {
			out = append(out, atMost(a.name()+": mean time to the first token, of that of 1", "×", a.ToOne, bound))
		}
	}
	return out
}

// WriteText writes tables for people.
func (r *CoordinatorsReport) WriteText(out io.Writer) error {
	p := &printer{w: tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)}
	p.text("Time to the first token over real sockets, ms, placing included")
	p.line("", "answered", "lost", "mean", "p50", "p99", "reuse")
	for i := range r.Arms {
		a := &r.Arms[i]
		p.line(a.name(), num(a.Requests), num(a.Lost), fmt.Sprintf("%.0f", a.MeanMs), fmt.Sprintf("%.0f", a.P50Ms), fmt.Sprintf("%.0f", a.P99Ms), fmt.Sprintf("%.1f %%", 100*a.Reuse))
	}
	p.writeTargets(r.targets())
	p.line("")
	if r.Quick {
		p.text("--quick: one short round; leave it out for the figures that count")
	}
	p.text("took %.0f s; the same arrivals for all, caches empty at the start; a ratio is the mean of the rounds'", r.Took.Seconds())
	return p.flush()
}
