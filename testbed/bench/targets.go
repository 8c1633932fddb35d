package bench

import (
	"fmt"
	"math"
	"strings"
)

// target is a figure that the design promises, beside what was measured.
type target struct {
	what, reach, measured string
	met                   bool
}

// atMost is the target of staying below a bound.
func atMost(what, unit string, measured, bound float64) target {
	return target{what, strings.TrimSpace("≤ " + figure(bound) + " " + unit), figure(measured), measured <= bound}
}

// atLeast is the target of getting as far as a bound.
func atLeast(what, unit string, measured, bound float64) target {
	return target{what, fmt.Sprintf("≥ %s %s", figure(bound), unit), figure(measured), measured >= bound}
}

// near is the target of being within a distance of a figure.
func near(what string, measured, want, off float64) target {
	return target{what, fmt.Sprintf("%s ± %s", figure(want), figure(off)), figure(measured), math.Abs(measured-want) <= off}
}

// atMostBoth bounds both quantiles, given in µs.
func atMostBoth(what string, q quantiles, p50, p99 float64) target {
	return target{what, fmt.Sprintf("≤ %s / %s µs", figure(p50), figure(p99)), micros(q), q.P50 <= 1000*p50 && q.P99 <= 1000*p99}
}

// figure writes three significant digits, or all before the point.
func figure(v float64) string {
	if math.Abs(v) >= 100 || v == math.Trunc(v) {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// targets are the figures to reach, of what this report measured.
func (r *Report) targets() []target {
	var out []target
	for i := range r.Streams {
		out = append(out, r.Streams[i].targets()...)
	}
	for i := range r.Indexes {
		if x := &r.Indexes[i]; x.Workload == coldWorkload && x.Workers == coldWorkers {
			out = append(out, x.targets()...)
		}
	}
	for i := range r.Cold {
		out = append(out, r.Cold[i].targets()...)
	}
	return out
}

// targets bound the shape of a generated workload, without which its figures
// compare with nothing, and what the workload costs.
func (s *Stream) targets() (out []target) {
	name := s.Workload
	switch h := &s.Shape; name {
	case "conv":
		out = append(out, atMost("conv: snapshot", "bits/block", s.SnapshotBits, 1), atMost("conv: stream", "B/s", s.StreamBytes, 150))
	case "mix":
		out = append(
			out, near("mix: hit rate, %", 100*h.HitRate, 81, 2), near("mix: blocks/s", h.BlocksPerSec, 960, 96),
			near("mix: runs", h.Runs, 148, 15), near("mix: blocks/run", h.RunBlocks, 220, 20),
			atMost("mix: snapshot", "bits/block", s.SnapshotBits, 1.3),
		)
	case "chat":
		out = append(
			out, near("chat: blocks/s", h.BlocksPerSec, 1005, 100.5), near("chat: runs", h.Runs, 226, 20), near("chat: blocks/run", h.RunBlocks, 137, 15),
			atMost("chat: stream", "B/s", s.StreamBytes, 200),
		)
	}
	return append(
		out,
		atMost(name+": agent", "ns/block event", s.AgentNs, 500), atMost(name+": replay of 10 s", "B", s.Recovery, 2000),
		atMost(name+": regret beyond the exact list", "tokens/request", s.Regret(), 5), atMost(name+": off by > 512 tokens", "% of pairs", 100*s.GrossShare(), .1),
	)
}

// writingFactor bounds a lookup's p99 while the writer works, against idle.
const writingFactor = 1.5

func (x *Index) targets() []target {
	name := fmt.Sprintf("%s, %d × %d: ", x.Workload, x.Workers, x.PoolBlocks)
	out := []target{atMostBoth(name+"lookup", x.Lookup, 3, 10)}
	if x.WrittenPerSec > 0 {
		out = append(out, atMost(name+"lookup while writing, p99 of that at rest", "×", x.LookupWriting.P99/x.LookupResting.P99, writingFactor))
	}
	return append(
		out,
		atMostBoth(name+"lookup and argmin", x.Decide, 6, 15), atMost(name+"its allocations", "", x.DecideAllocs, 0),
		atLeast(name+"updates", "k ops/s", x.OpsPerSec/1e3, 500), atLeast(name+"updates", "M block events/s", x.EventsPerSec/1e6, 50),
		atMost(name+"heap at fill", "B/block", x.HeapFill, 1), atMost(fmt.Sprintf("%sheap after %.0f s", name, x.ChurnSeconds), "B/block", x.HeapChurned, 1),
	)
}

func (c *ColdStart) targets() []target {
	name := fmt.Sprintf("cold start, %d hosts, %d workers: ", c.Hosts, c.Workers)
	var out []target
	if c.Hosts == coldHosts {
		out = append(out, atMost(name+"99 % of keys", "ms", c.Ms, 2000))
	}
	if c.Threads > 0 {
		out = append(out, atMost(name+"threads", "", float64(c.Threads), 50), atMost(name+"descriptors", "", float64(c.Descriptors), 1100))
	}
	return out
}

// writeTargets writes the figures to reach.
func (p *printer) writeTargets(targets []target) {
	p.text("\nFigures to reach")
	p.line("figure", "reach", "measured", "")
	for _, t := range targets {
		verdict := "met"
		if !t.met {
			verdict = "not met"
		}
		p.line(t.what, t.reach, t.measured, verdict)
	}
}
