package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// row is one object of the JSON output; what a row does not measure is null.
type row struct {
	Workload             string     `json:"workload"`
	Workers              int        `json:"workers"`
	SnapshotBitsPerBlock *float64   `json:"snapshotBitsPerBlock"`
	StreamBytesPerSec    *float64   `json:"streamBytesPerSec"`
	RawBytesPerSec       *float64   `json:"rawBytesPerSec"`
	LookupNs             *quantiles `json:"lookupNs"`
	DecideNs             *quantiles `json:"decideNs"`
	OpsPerSec            *float64   `json:"opsPerSec"`
	BlockEventsPerSec    *float64   `json:"blockEventsPerSec"`
	HeapBytesPerBlock    *float64   `json:"heapBytesPerBlock"`
	AgentNsPerBlockEvent *float64   `json:"agentNsPerBlockEvent"`
	ColdStartMs          *float64   `json:"coldStartMs"`
	RegretTokens         *float64   `json:"regretTokens"`
	GrossErrorShare      *float64   `json:"grossErrorShare"`
}

// rows are the objects of the JSON output: one per workload and worker count.
func (r *Report) rows() []row {
	var out []row
	for i := range r.Streams {
		s := &r.Streams[i]
		out = append(out, row{
			Workload: s.Workload, Workers: s.Workers, SnapshotBitsPerBlock: &s.SnapshotBits, StreamBytesPerSec: &s.StreamBytes,
			RawBytesPerSec: &s.RawBytes, AgentNsPerBlockEvent: &s.AgentNs, RegretTokens: new(s.Regret()), GrossErrorShare: new(s.GrossShare()),
		})
	}
	for i := range r.Indexes {
		x := &r.Indexes[i]
		one := row{
			Workload: x.Workload, Workers: x.Workers, LookupNs: &x.Lookup, DecideNs: &x.Decide,
			OpsPerSec: measured(x.OpsPerSec), BlockEventsPerSec: measured(x.EventsPerSec), HeapBytesPerBlock: &x.HeapChurned,
		}
		for j := range r.Cold {
			if c := &r.Cold[j]; x.Workload == coldWorkload && c.Workers == x.Workers && c.Hosts < c.Workers {
				one.ColdStartMs = &c.Ms
			}
		}
		out = append(out, one)
	}
	return out
}

// measured is nil for a rate that was not measured.
func measured(v float64) *float64 {
	if v == 0 {
		return nil
	}
	return &v
}

// WriteJSON writes one object a line.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	for _, one := range r.rows() {
		if err := e.Encode(one); err != nil {
			return err
		}
	}
	return nil
}

// WriteText writes tables for people.
func (r *Report) WriteText(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	p := &printer{w: w}
	r.writeShapes(p)
	r.writeStreams(p)
	r.writeErrors(p)
	r.writeLookups(p)
	r.writeIndexes(p)
	r.writeCold(p)
	p.writeTargets(r.targets())
	p.line("")
	if r.Quick {
		p.text("--quick: shorter workloads and less churn, and where there are 1,000 workers their caches are a quarter; leave it out for the figures that count")
	}
	p.text("took %.0f s; timings are the best of %d windows by the wall clock, rates and agent times by the processor time of one thread", r.Took.Seconds(), repetitions)
	return p.flush()
}

// printer writes tables and keeps the first error.
type printer struct {
	w   *tabwriter.Writer
	err error
}

func (p *printer) line(cells ...string) {
	if p.err == nil {
		_, p.err = fmt.Fprintln(p.w, strings.Join(cells, "\t")+"\t")
	}
}

// text writes a line outside the tables' columns.
func (p *printer) text(format string, args ...any) {
	if p.err == nil {
		p.err = p.w.Flush()
	}
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

func (p *printer) flush() error {
	if p.err != nil {
		return p.err
	}
	return p.w.Flush()
}

func (r *Report) writeShapes(p *printer) {
	p.text("Workloads as measured at the engines, per worker")
	p.line("workload", "workers", "hit rate", "blocks/s", "requests/s", "runs", "blocks/run", "busy", "seconds", "requests")
	for i := range r.Streams {
		s := &r.Streams[i]
		h := &s.Shape
		p.line(s.Workload, num(s.Workers), fmt.Sprintf("%.1f %%", 100*h.HitRate), fmt.Sprintf("%.0f", h.BlocksPerSec), fmt.Sprintf("%.2f", h.RequestsPerSec),
			fmt.Sprintf("%.0f", h.Runs), fmt.Sprintf("%.0f", h.RunBlocks), fmt.Sprintf("%.0f %%", 100*h.Utilisation), fmt.Sprintf("%.0f", h.Seconds), num(h.Requests))
	}
	for i := range r.Streams {
		p.text("%s: %s", r.Streams[i].Workload, r.Streams[i].Source)
	}
}

func (r *Report) writeStreams(p *printer) {
	p.text("\nStreams, per worker; one frame a second, lane message share included")
	p.line("workload", "workers", "snapshot bits/block", "stream B/s", "raw B/s (8 B hashes)", "raw B/s (32 B)", "Bloom bits/block", "Bloom B/s", "agent ns/block event", "replay of 10 s B (most)")
	for i := range r.Streams {
		s := &r.Streams[i]
		p.line(s.Workload, num(s.Workers), fmt.Sprintf("%.2f", s.SnapshotBits), fmt.Sprintf("%.0f", s.StreamBytes), fmt.Sprintf("%.0f", s.RawBytes), fmt.Sprintf("%.0f", s.RawWideBytes),
			num(bloomBits), fmt.Sprintf("%.0f", s.BloomBytes), fmt.Sprintf("%.0f", s.AgentNs), fmt.Sprintf("%.0f (%d)", s.Recovery, s.RecoveryMost))
	}
}

func (r *Report) writeErrors(p *printer) {
	p.text("\nWhat is lost, against exact lists of the same age")
	p.line("workload", "view", "regret tokens/request", "beyond the exact list", "off > 512 tokens", "> 1 block over", "> 1 block under", "blocks off the truth")
	for i := range r.Streams {
		s := &r.Streams[i]
		for _, v := range []struct {
			name string
			d    *Deviation
		}{{"summary", &s.Summary}, {"exact list", &s.Exact}, {"Bloom, 10 bits", &s.Bloom}} {
			p.line(s.Workload, v.name, fmt.Sprintf("%.2f", v.d.Regret), fmt.Sprintf("%.2f", v.d.Regret-s.Exact.Regret),
				share(v.d.Gross, s.Pairs), share(v.d.Over, s.Pairs), share(v.d.Under, s.Pairs), fmt.Sprintf("%.2f", v.d.Absolute))
		}
	}
}

func (r *Report) writeLookups(p *printer) {
	p.text("\nLookups, p50 / p99 µs; chains of about 1,000 blocks unless said otherwise")
	p.line("workload", "workers", "pool", "holders", "lookup", "as a list", "any length", "from token ids", "at rest", "while writing (frames/s)", "with argmin", "allocs", "exact per block", "Bloom, 10 bits")
	for i := range r.Indexes {
		x := &r.Indexes[i]
		resting, writing, exact, filter := "–", "–", "–", "–"
		if x.WrittenPerSec > 0 {
			resting, writing = micros(x.LookupResting), fmt.Sprintf("%s (%.0f)", micros(x.LookupWriting), x.WrittenPerSec)
		}
		if x.References {
			exact, filter = micros(x.Exact), micros(x.Bloom)
		}
		p.line(x.Workload, num(x.Workers), num(x.PoolBlocks), fmt.Sprintf("%.1f", x.Matches), micros(x.Lookup), micros(x.LookupList), micros(x.LookupAny), micros(x.LookupTokens), resting, writing, micros(x.Decide),
			fmt.Sprintf("%.2g", x.DecideAllocs), exact, filter)
	}
	p.text("lookup: which sets of workers hold how much; as a list: worker by worker; at rest: in turns with writing; with argmin: every worker is looked at")
	for i := range r.Indexes {
		for _, c := range r.Indexes[i].Cases {
			p.text("%s, %d workers, %s: %s µs, %.0f holders", r.Indexes[i].Workload, r.Indexes[i].Workers, c.Name, micros(c.Lookup), c.Holders)
		}
	}
}

func (r *Report) writeIndexes(p *printer) {
	p.text("\nIndex: updates on one core, memory per resident block")
	p.line("workload", "workers", "pool", "blocks", "runs/worker", "blocks/run", "frames/s", "ops/s", "block events/s", "events/op", "heap B/block at fill", "after churn of", "heap B/block", "exact B/block", "Bloom B/block", "off > 512 tokens", "> 1 block over")
	for i := range r.Indexes {
		x := &r.Indexes[i]
		exact, filter, gross, over, eventsPerOp := "–", "–", "–", "–", "–"
		if x.OpsPerSec > 0 {
			eventsPerOp = fmt.Sprintf("%.0f", x.EventsPerSec/x.OpsPerSec)
		}
		if x.References {
			exact, filter = fmt.Sprintf("%.1f", x.ExactBytes), fmt.Sprintf("%.2f", x.BloomBytes)
			gross, over = share(x.Differs.Gross, x.Pairs), share(x.Differs.Over, x.Pairs)
		}
		p.line(x.Workload, num(x.Workers), num(x.PoolBlocks), millions(float64(x.Blocks)), fmt.Sprintf("%.0f", x.Runs), fmt.Sprintf("%.0f", float64(x.Blocks)/max(1, x.Runs*float64(x.Workers))),
			thousands(x.FramesPerSec), thousands(x.OpsPerSec), millions(x.EventsPerSec), eventsPerOp,
			fmt.Sprintf("%.2f", x.HeapFill), fmt.Sprintf("%.0f s", x.ChurnSeconds), fmt.Sprintf("%.2f", x.HeapChurned), exact, filter, gross, over)
	}
	for i := range r.Indexes {
		if x := &r.Indexes[i]; x.Refused > 0 {
			p.text("%d requests of the fleet of %d were larger than a worker's pool and left out", x.Refused, x.Workers)
		}
	}
}

func (r *Report) writeCold(p *printer) {
	if len(r.Cold) == 0 {
		return
	}
	p.text("\nCold start over mutual-TLS lanes on loopback, both ends in this process")
	p.line("hosts", "workers", "ms to 99 % of keys", "snapshots kB", "threads", "coordinator's descriptors")
	for i := range r.Cold {
		c := &r.Cold[i]
		threads, descriptors := "unknown", "unknown"
		if c.Threads > 0 {
			threads, descriptors = num(c.Threads), num(c.Descriptors)
		}
		p.line(num(c.Hosts), num(c.Workers), fmt.Sprintf("%.0f", c.Ms), fmt.Sprintf("%.0f", float64(c.SnapshotBytes)/1000), threads, descriptors)
	}
}

func num(n int) string { return fmt.Sprint(n) }

func micros(q quantiles) string { return fmt.Sprintf("%.2f / %.2f", q.P50/1000, q.P99/1000) }

func millions(v float64) string { return fmt.Sprintf("%.1f M", v/1e6) }

func thousands(v float64) string {
	if v == 0 {
		return "–"
	}
	return fmt.Sprintf("%.0f k", v/1000)
}

func share(n, of int) string { return fmt.Sprintf("%.3f %%", 100*float64(n)/float64(max(1, of))) }
