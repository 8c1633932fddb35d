package placement

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"waypost/gossip/ledger"
)

// The transcripts in testdata/rule read as the manual of the rule. A block is
//
//	place prompt=8192 output=64
//	gpu-01/vllm-8000/0 queue=310 match=8176
//	----
//	the table of terms, the choice and why
//
// Keys of a worker: queue, open (tokens), claims (of 1,000 tokens on top), age, match, predicted, live,
// decoding, context, held, pool (blocks), batch (largest), distance,
// surcharge, view, viewage, eviction, trust, error, away (ms since the lane
// was lost), process, model (tokens), cordon, doubted=reason:detail, slow
// (factor of its steps), role, outside, adapters, kv (bytes per token: it has a connector, with
// connector, side, fp and exports), sending (transfers); a value of ? is
// unknown. A line "path FROM TO" gives the way of saved KV between two hosts:
// MBps, latency, surcharge, underway, link, figure, never, off. Keys of place: prompt, output, generated, request, shared,
// theta, mean (answer of the pool), lambda (arrivals per s and worker), budget, gapbudget, deadline,
// infeasible, exclude (name), excludeprocess, tenantbarred, tenantover, tenantfull,
// adapter, maxtransfer, policyage.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/rule", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd != "place" {
				t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
			}
			return parseScene(t, d).transcript()
		})
	})
}

// scene is one transcript's situation.
type scene struct {
	req        Request
	candidates []Candidate
	policy     Policy
	sit        Situation
	decision   Decision
}

// parseScene reads a scene. Whoever exports what it holds is a source, as a
// board chooses them.
func parseScene(t *testing.T, d *datadriven.TestData) *scene {
	s := &scene{}
	s.req, s.policy, s.sit = parsePlace(t, d)
	sending := map[WorkerID]int{}
	var paths []pathLine
	for line := range strings.Lines(d.Input) {
		if strings.HasPrefix(line, "path ") {
			paths = append(paths, parsePath(t, line))
			continue
		}
		c, sends := parseCandidate(t, line, len(s.candidates), s.sit.NowMs)
		sending[c.ID] = sends
		s.candidates = append(s.candidates, c)
	}
	way := func(from, to *Worker) (p Path) {
		for _, line := range paths {
			if line.from.names(from) && line.to.names(to) {
				p = line.Path
			}
		}
		return p
	}
	var board Board
	var matches Matches
	for i := range s.candidates {
		c := &s.candidates[i]
		board.Set(c.Worker)
		if c.MatchedTokens > 0 {
			matches.Add(c.ID, Held{Tokens: int32(c.MatchedTokens), GPUTokens: int32(c.MatchedTokens - max(c.LowerTokens, 0)), Predicted: c.Predicted})
		}
	}
	s.sit.Sources = board.AppendSources(nil, &s.req, &matches, func(w *Worker) int { return sending[w.ID] })
	for i := range s.candidates {
		for k := range s.sit.Sources {
			s.candidates[i].Paths = append(s.candidates[i].Paths, way(s.sit.Sources[k].Worker, s.candidates[i].Worker))
		}
	}
	PairUp(&s.req, s.candidates, &s.policy, s.sit, way)
	return s
}

// transcript decides the scene and prints it.
func (s *scene) transcript() string {
	if err := Decide(&s.req, s.candidates, &s.policy, s.sit, &s.decision); err != nil {
		return "error: " + err.Error() + "\n"
	}
	return transcript(&s.req, s.candidates, &s.policy, s.sit, &s.decision)
}

// hostPattern is a host of a path line, or * for all.
type hostPattern string

func (h hostPattern) names(w *Worker) bool {
	return h == "*" || strings.HasPrefix(w.Name, string(h)+"/")
}

type pathLine struct {
	from, to hostPattern
	Path
}

// parsePath reads "path FROM TO key=value...".
func parsePath(t *testing.T, line string) pathLine {
	t.Helper()
	fields := strings.Fields(line)
	p := pathLine{from: hostPattern(fields[1]), to: hostPattern(fields[2])}
	for _, field := range fields[3:] {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "MBps":
			p.BytesPerMs = parseNumber(t, value) * 1000
		case "latency":
			p.LatencyMs = parseNumber(t, value)
		case "surcharge":
			p.SurchargeMs = parseNumber(t, value)
		case "underway":
			p.UnderWay = int(parseNumber(t, value))
		case "link":
			p.Link = strings.ReplaceAll(value, "_", " ")
		case "figure":
			p.Figure = Figure(slices.Index(figureWords[:], value))
		case "never":
			p.Never = true
		case "off":
			p.Off = true
		default:
			t.Fatalf("unknown key %q of a path", key)
		}
	}
	return p
}

const transcriptNowMs = 1_000_000

func parsePlace(t *testing.T, d *datadriven.TestData) (Request, Policy, Situation) {
	req := Request{ID: "r1", Tenant: "default", Pool: "pool"}
	policy := DefaultPolicy()
	sit := Situation{NowMs: transcriptNowMs, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64, PolicyAgeMs: 100}
	for _, arg := range d.CmdArgs {
		value := strings.Join(arg.Vals, ", ")
		switch arg.Key {
		case "prompt":
			req.PromptTokens = int(parseNumber(t, value))
		case "output":
			req.OutputTokensExpected = parseNumber(t, value)
		case "generated":
			req.GeneratedTokens = int(parseNumber(t, value))
		case "request":
			req.ID = value
		case "shared":
			req.SharedKey = uint64(parseNumber(t, value))
		case "theta":
			policy.Theta = parseNumber(t, value)
		case "tie":
			policy.TieMs = parseNumber(t, value)
		case "lambda":
			sit.ArrivalsPerMs = parseNumber(t, value) / 1000
		case "budget":
			req.FirstTokenBudgetMs = parseNumber(t, value)
		case "gapbudget":
			req.GapBudgetMs = parseNumber(t, value)
		case "deadline":
			req.DeadlineMs = parseNumber(t, value)
		case "infeasible":
			req.IfInfeasible = IfInfeasible(value)
		case "exclude":
			req.ExcludeWorkers = append(req.ExcludeWorkers, value)
		case "excludeprocess":
			req.ExcludeProcesses = append(req.ExcludeProcesses, uint64(parseNumber(t, value)))
		case "tenantbarred":
			req.TenantBarred = strings.ReplaceAll(value, "_", " ")
		case "tenantover":
			req.TenantOver = strings.ReplaceAll(value, "_", " ")
		case "adapter":
			req.Adapter = value
		case "tenantfull":
			req.TenantFull = strings.ReplaceAll(value, "_", " ")
		case "maxtransfer":
			req.MaxTransferMs = parseNumber(t, value)
		case "mean":
			sit.MeanOutputTokens = parseNumber(t, value)
		case "policyage":
			sit.PolicyAgeMs = parseNumber(t, value)
		default:
			t.Fatalf("%s: unknown key %q", d.Pos, arg.Key)
		}
	}
	return req, policy, sit
}

func parseNumber(t *testing.T, s string) float64 {
	t.Helper()
	if s == "?" {
		return math.NaN()
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// testWorker is a ready worker: Qwen3-32B on two H100, idle, fully seen.
func testWorker(id int, name string, nowMs float64) Worker {
	w := NewWorker(WorkerID(id), name)
	prior := ledger.PriorFor(ledger.Class{Engine: "vllm", Model: "Qwen3-32B", GPU: "H100", TensorParallel: 2})
	w.BlockTokens, w.PoolBlocks, w.MaxModelTokens, w.MaxRunning = 16, 20_000, 131_072, 256
	w.Steps = ledger.NewSteps(prior.Model, prior.StepTokens, prior.Model.DecodeMs(0, 0, 0))
	w.QueueKnown, w.LoadAtMs, w.Waiting = true, nowMs-100, ledger.Waiting{}
	w.Decoding, w.ContextTokens, w.Live, w.HeldBlocks, w.MeanOutputTokens = 0, 0, 0, 0, 64
	w.View = View{Kind: ViewLive, AtMs: nowMs - 400, Trust: math.NaN(), EvictionAgeMs: math.NaN()}
	w.Process = uint64(100 + id)
	return w
}

func parseCandidate(t *testing.T, line string, id int, now float64) (c Candidate, sending int) {
	t.Helper()
	fields := strings.Fields(line)
	w := testWorker(id, fields[0], now)
	c = Candidate{Worker: &w}
	queue, open, claims, slow := 0.0, 0, 0, 1.0
	host := HostTier{}
	transfer := Transfer{Connector: "nixl", SideChannel: fields[0][:strings.Index(fields[0], "/")] + ":5600", Fingerprint: "bf16", ExportedTier: TierGPU}
	for _, field := range fields[1:] {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "cordon":
			w.Barred, w.BarredWhy = ReasonCordoned, strings.ReplaceAll(value, "_", " ")
			continue
		case "lost":
			w.Barred, w.BarredWhy = ReasonLost, strings.ReplaceAll(value, "_", " ")
			continue
		case "doubted":
			word, detail, _ := strings.Cut(value, ":")
			for r, name := range reasonWords {
				if name == word {
					w.Doubted, w.DoubtedWhy = Reason(r), strings.ReplaceAll(detail, "_", " ")
				}
			}
			continue
		case "predicted":
			c.Predicted = true
			continue
		case "outside":
			c.Outside = true
			continue
		case "hostpcie":
			host.Link = strings.ReplaceAll(value, "_", " ")
			continue
		case "adapters":
			w.Served = strings.Split(value, ",")
			continue
		case "role":
			w.Role, _ = RoleOf(value)
			continue
		case "connector":
			transfer.Connector = value
			continue
		case "side":
			transfer.SideChannel = strings.TrimSuffix(value, "none")
			continue
		case "fp":
			transfer.Fingerprint = value
			continue
		case "exports":
			transfer.ExportedTier = value
			continue
		case "view":
			for k, name := range viewWords {
				if name == value {
					w.View.Kind = ViewKind(k)
				}
			}
			continue
		}
		v := parseNumber(t, value)
		switch key {
		case "slow":
			slow = v
		case "kv":
			transfer.BytesPerToken = v
		case "lower":
			c.LowerTokens = int(v)
		case "hostkv":
			host.BytesPerToken = v
		case "hostlink":
			host.BytesPerMs = v
		case "sending":
			sending = int(v)
		case "queue":
			queue = v
			w.QueueKnown = !math.IsNaN(v)
		case "open":
			open = int(v)
		case "age":
			w.LoadAtMs = now - v
		case "match":
			c.MatchedTokens = Unknown
			if !math.IsNaN(v) {
				c.MatchedTokens = int(v)
			}
		case "live":
			w.Live = v
		case "claims":
			claims = int(v)
		case "decoding":
			w.Decoding = v
		case "context":
			w.ContextTokens = v
		case "held":
			w.HeldBlocks = v
		case "pool":
			w.PoolBlocks = int(v)
		case "batch":
			w.MaxRunning = int(v)
		case "model":
			w.MaxModelTokens = int(v)
		case "distance":
			c.DistanceMs = v
		case "surcharge":
			c.SurchargeMs = v
		case "viewage":
			w.View.AtMs = now - v
		case "eviction":
			w.View.EvictionAgeMs = v
		case "trust":
			w.View.Trust = v
		case "error":
			w.ErrorMs = v
		case "away":
			w.AwaySinceMs = now - v
		case "process":
			w.Process = uint64(v)
		default:
			t.Fatalf("unknown key %q of %s", key, fields[0])
		}
	}
	if !math.IsNaN(w.Decoding) && !math.IsNaN(w.ContextTokens) {
		m := w.Steps.Model()
		for _, v := range []*float64{&m.P0Ms, &m.P1MsPerToken, &m.QMsPerToken2, &m.P2MsPerToken2, &m.D0Ms, &m.D1MsPerRequest, &m.D2MsPerToken, &m.D3Ms} {
			*v *= slow
		}
		w.Steps = ledger.NewSteps(m, w.Steps.BudgetTokens(), m.DecodeMs(w.Decoding, w.ContextTokens, 0))
	}
	if host.BytesPerToken > 0 || host.BytesPerMs > 0 {
		w.Host = &host
	}
	if transfer.BytesPerToken > 0 {
		w.Transfer = &transfer
	}
	w.Waiting = ledger.AtLoad(&w.Steps, now, queue, open)
	for range claims {
		w.Waiting.Fold(&w.Steps, now, 0, 1000)
	}
	w.OpenClaims = float64(claims)
	return c, sending
}

// transcript prints a decision as the explanation shows it.
func transcript(req *Request, candidates []Candidate, policy *Policy, sit Situation, d *Decision) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-20s %7s %7s %7s %6s %6s %7s %6s │ %7s │ %6s %6s %6s │ %7s\n", "ms",
		"REUSE", "START", "PREFILL", "PULL", "ROOM", "DOUBT", "DIST", "OWN", "QUEUE", "GAP", "STALL", "TOTAL")
	cell := func(v float64) string {
		if math.IsNaN(v) {
			return "?"
		}
		return number(v)
	}
	for _, i := range d.Ranked() {
		c, t := &candidates[i], &d.Terms[i]
		reuse := "?"
		if t.ReuseTokens != Unknown {
			reuse = thousands(t.ReuseTokens)
		}
		pull := "-"
		switch t.Pull.Note {
		case PullNone, PullNoMore:
		case PullDearer, PullTaken, PullSpare:
			pull = cell(t.PullMs)
		default:
			pull = "n/a"
		}
		fmt.Fprintf(&b, "%-20s %7s %7s %7s %6s %6s %7s %6s │ %7s │ %6s %6s %6s │ %7s", c.Name, reuse,
			cell(t.StartMs), cell(t.PrefillMs), pull, cell(t.RoomMs), cell(t.DoubtMs), cell(t.DistanceMs), cell(t.OwnMs),
			cell(t.QueueMs), cell(t.GapMs), cell(t.StallMs), cell(t.TotalMs))
		switch {
		case i == d.Chosen:
			b.WriteString("  chosen")
		case !t.Placeable:
			b.WriteString("  " + t.Excluded(c.Worker))
		case t.Missed != BudgetNone:
			b.WriteString("  misses the " + t.Missed.String())
		case t.OverLimit:
			b.WriteString("  own time over the limit")
		}
		b.WriteByte('\n')
	}
	for i := range d.Terms {
		switch t := &d.Terms[i]; {
		case t.Pull.Note >= PullDearer:
			fmt.Fprintf(&b, "pull: %s from %s: %s, %s tokens in %s ms at %s (%s)\n", candidates[i].Name, sit.Sources[t.Pull.Source].Name,
				t.Pull.Note, thousands(t.Pull.Tokens), number(t.Pull.TransferMs), perSec(t.Pull.BytesPerMs), t.Pull.Figure)
			if t.Pull.Note == PullDearer && !math.IsInf(t.Pull.PaysFromBytesPerMs, 1) {
				fmt.Fprintf(&b, "it would pay from %s\n", perSec(t.Pull.PaysFromBytesPerMs))
			}
		case t.Pull.Note != PullNone && t.Pull.Note != PullNoMore:
			fmt.Fprintf(&b, "pull n/a: %s: %s\n", candidates[i].Name, t.Pull.Note)
		}
		if t := &d.Terms[i]; t.HostTokens > 0 {
			fmt.Fprintf(&b, "load: %s reads %s tokens from host memory in %s ms\n", candidates[i].Name, thousands(t.HostTokens), cell(t.LoadMs))
		}
		if t := &d.Terms[i]; t.Partner >= 0 {
			fmt.Fprintf(&b, "hand-over: %s to %s, %s ms\n", candidates[i].Name, candidates[i].Partners[t.Partner].Worker.Name, number(t.HandMs))
		}
	}
	if d.Chosen < 0 {
		fmt.Fprintf(&b, "refused: %s\n", d.Refusal.Reason)
		fmt.Fprintf(&b, "detail: %s\n", d.Because(candidates))
		if ms := d.Refusal.RetryAfterMs; !math.IsNaN(ms) {
			fmt.Fprintf(&b, "retry after: %s ms\n", number(ms))
		}
		fmt.Fprintf(&b, "workers: %v\n", d.RefusedWorkers())
		return b.String()
	}
	fmt.Fprintf(&b, "because: %s\n", d.Because(candidates))
	expected := "unknown"
	if n := d.Terms[d.Chosen].ExpectedReuseTokens(); n != Unknown {
		expected = thousands(n)
	}
	fmt.Fprintf(&b, "expected: %s tokens reused, first token in %s ms, p90 %s ms\n", expected, number(d.FirstTokenMs), number(d.FirstTokenP90Ms))
	record := NewRecord(req, candidates, policy, sit, d, 64)
	for _, w := range record.WouldChange(d) {
		fmt.Fprintf(&b, "would change if: %s\n", w.Sentence())
	}
	if d.Marks != 0 {
		fmt.Fprintf(&b, "marks: %s\n", strings.Join(d.Marks.Words(), " "))
	}
	return b.String()
}
