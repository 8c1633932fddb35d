package ctl

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	rule "waypost/coordinator/placement"
	waypostv1 "waypost/proto/waypost/v1"
)

// maxPromptFile bounds a prompt read from a file.
const maxPromptFile = 64 << 20

func placeCommand(f *flags) *cobra.Command {
	var (
		pool, tenant, promptFile, idsFile, adapter, salt, zone, requestID, infeasible string
		tokens, output                                                                uint32
		deadline, firstToken                                                          time.Duration
		exclude                                                                       []string
		reserve, raw                                                                  bool
	)
	c := &cobra.Command{
		Use: "place", Short: "Ask which worker would serve a request, and why", Args: cobra.NoArgs,
		Long: "Ask which worker would serve a request, and why. Nothing is reserved unless --reserve is given.",
		Example: "  waypost place --pool qwen3-32b --tokens 8000 --output 256\n" +
			"  waypost place --token-ids-file ids.json --reserve --request-id r1",
		RunE: func(cmd *cobra.Command, _ []string) error {
			in, err := placeInput(promptFile, idsFile, tokens)
			if err != nil {
				return err
			}
			req := &waypostv1.PlaceRequest{
				RequestId: optional(requestID), Pool: optional(pool), Tenant: optional(tenant), Input: in, Adapter: optional(adapter), CacheSalt: optional(salt),
				CallerZone: optional(zone), Exclude: exclude, IfInfeasible: optional(infeasible), Explain: proto.String("terms"), Reserve: &reserve,
			}
			if output > 0 {
				req.OutputTokensMax = &output
			}
			if deadline != 0 {
				req.DeadlineMs = proto.Float64(float64(deadline) / float64(time.Millisecond))
			}
			if firstToken != 0 {
				req.FirstTokenBudgetMs = proto.Float64(float64(firstToken) / float64(time.Millisecond))
			}
			resp, err := ask(cmd, f, placement, req, waypostv1.PlacementServiceClient.Place)
			if err != nil {
				return err
			}
			return showPlaced(cmd, f, resp, raw)
		},
	}
	fl := c.Flags()
	fl.StringVar(&pool, "pool", "", "pool; may be left out when there is exactly one")
	fl.StringVar(&tenant, "tenant", "", "tenant")
	fl.StringVar(&requestID, "request-id", "", "your id of the request")
	fl.StringVar(&promptFile, "prompt-file", "", "file with the prompt as text, - for standard input")
	fl.StringVar(&idsFile, "token-ids-file", "", "file with the prompt as a JSON array of token ids, - for standard input")
	fl.Uint32Var(&tokens, "tokens", 0, "only the length of a prompt that nobody has cached")
	fl.Uint32Var(&output, "output", 0, "upper limit of output tokens")
	fl.StringVar(&adapter, "adapter", "", "LoRA adapter")
	fl.StringVar(&salt, "cache-salt", "", "cache salt")
	fl.StringVar(&zone, "zone", "", "zone the caller is in")
	fl.StringVar(&infeasible, "if-infeasible", "", "best-effort, reject or retry-after")
	fl.DurationVar(&deadline, "deadline", 0, "time until the whole answer must be there")
	fl.DurationVar(&firstToken, "first-token-budget", 0, "time until the first token must be there")
	fl.StringSliceVar(&exclude, "exclude", nil, "workers that must not be chosen")
	fl.BoolVar(&raw, "raw", false, "terms without the weights they have in the total")
	fl.BoolVar(&reserve, "reserve", false, "reserve the worker, as a real request does")
	return c
}

func placeInput(promptFile, idsFile string, tokens uint32) (*waypostv1.Input, error) {
	given := 0
	for _, set := range []bool{promptFile != "", idsFile != "", tokens > 0} {
		if set {
			given++
		}
	}
	if given != 1 {
		return nil, Usage("give the prompt in exactly one way: --prompt-file, --token-ids-file or --tokens")
	}
	switch {
	case promptFile != "":
		b, err := readFile(promptFile)
		if err != nil {
			return nil, Usage("--prompt-file: %w", err)
		}
		return &waypostv1.Input{Prompt: proto.String(string(b))}, nil
	case idsFile != "":
		b, err := readFile(idsFile)
		if err != nil {
			return nil, Usage("--token-ids-file: %w", err)
		}
		var ids []uint32
		if err := json.Unmarshal(b, &ids); err != nil {
			return nil, Usage("--token-ids-file %s: a JSON array of token ids is needed: %w", idsFile, err)
		}
		return &waypostv1.Input{TokenIds: ids}, nil
	default:
		return &waypostv1.Input{PrefixKeys: &waypostv1.PrefixKeys{PromptTokens: &tokens}}, nil
	}
}

func readFile(path string) ([]byte, error) {
	var r io.Reader = os.Stdin
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		// It is only read; a failing close loses nothing.
		defer func() { _ = file.Close() }()
		r = file
	}
	b, err := io.ReadAll(io.LimitReader(r, maxPromptFile+1))
	if err == nil && len(b) > maxPromptFile {
		err = fmt.Errorf("%s is over %d MiB", path, maxPromptFile>>20)
	}
	return b, err
}

func showPlaced(cmd *cobra.Command, f *flags, resp *waypostv1.PlaceResponse, raw bool) error {
	out := cmd.OutOrStdout()
	if r := resp.GetRefused(); r != nil {
		if f.asJSON() {
			if err := printJSON(out, resp); err != nil {
				return err
			}
			return failed(ExitInfeasible, "%s", r.GetReason())
		}
		retry := ""
		if r.RetryAfterMs != nil {
			retry = ", ask again in " + millis(r.RetryAfterMs)
		}
		more := ""
		if r.GetPlacementId() != "" {
			more = "; read it again: waypost explain " + r.GetPlacementId()
		}
		return failed(ExitInfeasible, "no placement: %s%s: %s%s", r.GetReason(), retry, r.GetDetail(), more)
	}
	p := resp.GetPlacement()
	if f.asJSON() {
		return printJSON(out, p)
	}
	fmt.Fprintf(out, "Chosen     %s   %s\n", p.GetWorker().GetName(), expectation(p.GetExpected(), nil))
	fmt.Fprintf(out, "Reach it   %s\n", p.GetWorker().GetUrl())
	headers := p.GetWorker().GetHeaders()
	for _, k := range slices.Sorted(maps.Keys(headers)) {
		fmt.Fprintf(out, "           with header %s: %s\n", k, headers[k])
	}
	fmt.Fprintf(out, "Because    %s\n\n", p.GetBecause())
	termTable(out, p, raw)
	if p.GetPlacementId() != "" {
		fmt.Fprintf(out, "\nPlacement  %s   read it again: waypost explain %s\n", p.GetPlacementId(), p.GetPlacementId())
	}
	return nil
}

func expectation(e *waypostv1.Expected, promptTokens *uint32) string {
	reuse := "reuse unknown"
	if e.GetReuseTokens() > 0 || (e != nil && e.ReuseTokens != nil) {
		reuse = fmt.Sprintf("reuse %s tokens expected", count(e.ReuseTokens))
		if promptTokens != nil && *promptTokens > 0 {
			reuse += fmt.Sprintf(" (%.0f%%)", 100*float64(e.GetReuseTokens())/float64(*promptTokens))
		}
	}
	if e == nil || e.FirstTokenMs == nil {
		return reuse
	}
	return reuse + ", first token in " + millis(e.FirstTokenMs)
}

// weighted applies the weight that gap and stall have in the total, so that a
// row adds up.
func weighted(v *float64, theta float64) *float64 {
	if v == nil {
		return nil
	}
	w := *v * theta
	return &w
}

// termTable prints the cost terms of every candidate, best first, as they
// count in the total, or raw.
func termTable(out io.Writer, p *waypostv1.Placement, raw bool) {
	theta := 1.0
	if b := p.GetBasis(); !raw && b != nil && b.Theta != nil {
		theta = b.GetTheta()
	}
	// LOAD stands where somebody's saved KV is read back from host memory.
	loads := slices.ContainsFunc(p.GetTerms(), func(c *waypostv1.Terms) bool { return c.GetHostTokens() > 0 })
	withLoad := func(cells []string, load string) []string {
		if !loads {
			return cells
		}
		return slices.Insert(cells, 4, load)
	}
	t := newTable(withLoad([]string{"ms", ">REUSE", ">START", ">PREFILL", ">PULL", ">ROOM", ">DOUBT", ">DIST", "│", ">OWN", "│", ">QUEUE", ">GAP", ">STALL", "│", ">TOTAL", ""}, ">LOAD")...)
	var best *float64
	refused := p.GetWorker() == nil
	for _, c := range p.GetTerms() {
		note := ""
		switch {
		case c.GetExcluded() != "":
			note = c.GetExcluded()
		case refused:
			note = c.GetPassedOver()
		case best == nil:
			best, note = c.TotalMs, "chosen"
		case c.GetPassedOver() != "":
			note = c.GetPassedOver()
		case c.TotalMs != nil:
			note = fmt.Sprintf("%+.0f", c.GetTotalMs()-*best)
		}
		t.row(withLoad([]string{
			c.GetWorker(), count(c.ReuseTokens), number(c.StartMs), number(c.PrefillMs), pullCell(c, raw), number(c.RoomMs), number(c.DoubtMs), number(c.DistanceMs),
			"│", number(c.OwnMs), "│", number(c.QueueMs), number(weighted(c.GapMs, theta)), number(weighted(c.StallMs, theta)), "│", number(c.TotalMs), note,
		}, loadCell(c))...)
	}
	t.print(out)
	printPulls(out, p)
	printUnlisted(out, p)
}

// pullCell is the PULL column: what counts in OWN in the place of PREFILL, "-"
// where computing is cheaper or nobody holds more, "n/a" where nothing can be
// pulled. Raw it is the price of the best pull, asked for or not.
func pullCell(t *waypostv1.Terms, raw bool) string {
	switch note := t.GetPullNote(); {
	case note == "" || note == rule.PullNoMore.String() || note == rule.PullDearer.String() && !raw:
		return "-"
	case note == rule.PullDearer.String() || note == rule.PullTaken.String() || note == rule.PullSpare.String():
		return number(t.PullMs)
	}
	return "n/a"
}

// loadCell is the LOAD column: "-" where nothing is read back from host memory, "?"
// where nobody knows what that takes, which then stands under DOUBT.
func loadCell(t *waypostv1.Terms) string {
	switch {
	case t.GetHostTokens() == 0:
		return "-"
	case t.LoadMs == nil:
		return unknown
	}
	return number(t.LoadMs)
}

// printPulls says what the table leaves open about moving saved KV: why a
// worker cannot pull, whom the chosen one pulls from, and what a pair's
// hand-over costs within OWN.
func printPulls(out io.Writer, p *waypostv1.Placement) {
	var notes, hands []string
	by := map[string][]string{}
	dearer := false
	for _, t := range p.GetTerms() {
		switch note := t.GetPullNote(); note {
		case "", rule.PullNoMore.String(), rule.PullTaken.String(), rule.PullSpare.String():
		case rule.PullDearer.String():
			dearer = true
		default:
			if by[note] == nil {
				notes = append(notes, note)
			}
			by[note] = append(by[note], t.GetWorker())
		}
		if t.HandMs != nil {
			hands = append(hands, t.GetWorker()+" "+millis(t.HandMs))
		}
	}
	for i, note := range notes {
		notes[i] = strings.Join(by[note], ", ") + ": " + note
	}
	line := ""
	if len(notes) > 0 {
		line = "PULL n/a: " + strings.Join(notes, " · ") + ".  "
	}
	if dearer {
		line += "PULL -: not cheaper than computing."
	}
	if line != "" {
		fmt.Fprintln(out, strings.TrimRight(line, " "))
	}
	if pull := p.GetPull(); pull != nil {
		ifGone := ""
		if pull.GetOnlyIfGone() {
			ifGone = " if its own are gone"
		}
		fmt.Fprintf(out, "Pulls %s tokens from %s in %s%s.\n", count(pull.Tokens), pull.GetSource().GetName(), millis(pull.TransferMs), ifGone)
	}
	if len(hands) > 0 {
		fmt.Fprintf(out, "OWN holds the hand-over to a decode worker: %s.\n", strings.Join(hands, " · "))
	}
	if w := p.GetPrefillWorker(); w != nil {
		fmt.Fprintf(out, "Prefilled by %s, decoded by %s.\n", w.GetName(), p.GetWorker().GetName())
	}
}

// printUnlisted counts the workers that the table does not list: nobody is
// silently absent.
func printUnlisted(out io.Writer, p *waypostv1.Placement) {
	excluded, listed := uint32(0), 0
	for _, n := range p.GetBasis().GetExcludedWorkers() {
		excluded += n
	}
	for _, t := range p.GetTerms() {
		if t.GetExcluded() != "" {
			listed++
		}
	}
	if n := p.GetBasis().GetUnpricedWorkers(); n > 0 {
		fmt.Fprintf(out, "%s more could not have won by a lower bound of their price and were not priced.\n", thousands(float64(n)))
	}
	if int(excluded) > listed {
		var parts []string
		for _, k := range byCount(p.GetBasis().GetExcludedWorkers()) {
			parts = append(parts, fmt.Sprintf("%s %s", strings.ReplaceAll(k.name, "_", " "), thousands(float64(k.n))))
		}
		fmt.Fprintf(out, "Excluded in all: %s.\n", strings.Join(parts, " · "))
	}
}

func outcomeCommand(f *flags) *cobra.Command {
	var (
		result, errorClass             string
		status, cached, prompt, output uint32
		firstToken, duration           time.Duration
	)
	c := &cobra.Command{
		Use: "outcome PLACEMENT", Short: "Report what happened to a placement", Args: cobra.ExactArgs(1),
		Example: "  waypost outcome pl_c1_9k3f7q2m --cached-tokens 5120 --prompt-tokens 8192 --first-token 281ms",
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &waypostv1.ReportOutcomeRequest{PlacementId: &args[0], Result: &result, ErrorClass: optional(errorClass)}
			set := cmd.Flags().Changed
			if set("status") {
				req.HttpStatus = &status
			}
			if set("cached-tokens") {
				req.CachedTokens = &cached
			}
			if set("prompt-tokens") {
				req.PromptTokens = &prompt
			}
			if set("output-tokens") {
				req.OutputTokens = &output
			}
			if set("first-token") {
				req.FirstTokenMs = proto.Float64(float64(firstToken) / float64(time.Millisecond))
			}
			if set("duration") {
				req.DurationMs = proto.Float64(float64(duration) / float64(time.Millisecond))
			}
			resp, err := ask(cmd, f, placement, req, waypostv1.PlacementServiceClient.ReportOutcome)
			if err != nil {
				return err
			}
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), resp)
			}
			if !resp.GetJoined() {
				return failed(ExitFailed, "not joined: no such placement is kept there (any more)")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "joined: %s\n", resp.GetReuseClass())
			return nil
		},
	}
	fl := c.Flags()
	fl.StringVar(&result, "result", "done", "done, failed or cancelled")
	fl.StringVar(&errorClass, "error-class", "", "of a failure: worker, client, overload or timeout")
	fl.Uint32Var(&status, "status", 0, "HTTP status of the engine's answer")
	fl.Uint32Var(&cached, "cached-tokens", 0, "prompt tokens the engine reused")
	fl.Uint32Var(&prompt, "prompt-tokens", 0, "prompt tokens the engine counted")
	fl.Uint32Var(&output, "output-tokens", 0, "output tokens the engine counted")
	fl.DurationVar(&firstToken, "first-token", 0, "time to the first token")
	fl.DurationVar(&duration, "duration", 0, "time to the end")
	return c
}
