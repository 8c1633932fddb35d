package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// Command is "waypost replay".
func Command() *cobra.Command {
	var engineKind, requests string
	var frames []string
	var asJSON bool
	c := &cobra.Command{
		Use:   "replay --engine vllm --frames FILE... --requests FILE",
		Short: "Run a recorded event stream and its requests through block table and index",
		Long: `Run a recorded event stream of an engine and the requests recorded beside it through the same decoder, block
table, prefix stream and index that agents and coordinators use, in the order of time, and compare for each request
the expected reuse with what the engine reported.

FRAMES are JSON lines {"kind":"live","t":seconds,"parts":[hex of each ZeroMQ frame]}; other kinds are passed over.
REQUESTS are JSON lines of HTTP exchanges {"n","t_send","t_done","method","path","headers","request","status",
"response" or "sse"}; token ids are those of the request, "prompt_token_ids" beside it, those the engine returned, or
the answer to an earlier /tokenize of the same messages. Calls that empty the cache (/reset_prefix_cache, /sleep,
/pause) take effect when they were sent, since the engine announces them only with its next step.`,
		Example: "  waypost replay --engine vllm --frames two-turns.frames.jsonl --requests two-turns.requests.jsonl",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if engineKind != "vllm" && engineKind != "sglang" {
				return fmt.Errorf("--engine is %q: vllm and sglang can be replayed", engineKind)
			}
			report, err := runFiles(frames, requests)
			if err != nil {
				return err
			}
			if n := report.WithoutTokens; n > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "%d completions are left out: the recording has no token ids of their prompts\n", n)
			}
			if asJSON {
				return report.writeJSON(cmd.OutOrStdout())
			}
			return report.writeTable(cmd.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&engineKind, "engine", "vllm", "kind of the engine that was recorded: vllm or sglang")
	f.StringArrayVar(&frames, "frames", nil, "recorded event stream; once per rank")
	f.StringVar(&requests, "requests", "", "recorded HTTP exchanges")
	f.BoolVar(&asJSON, "json", false, "print a JSON object per request and one with the summary")
	for _, name := range []string{"frames", "requests"} {
		if err := c.MarkFlagRequired(name); err != nil {
			panic(err) // the flag is defined above
		}
	}
	return c
}

func runFiles(frames []string, requests string) (report *Report, err error) {
	var in Input
	open := func(name string) Source {
		f, e := os.Open(name)
		if e != nil {
			err = errors.Join(err, e)
			return Source{}
		}
		return Source{Name: name, Reader: f}
	}
	for _, name := range frames {
		in.Frames = append(in.Frames, open(name))
	}
	in.Requests = open(requests)
	defer func() {
		for _, s := range append(in.Frames, in.Requests) {
			if f, ok := s.Reader.(io.Closer); ok {
				f.Close()
			}
		}
	}()
	if err != nil {
		return nil, err
	}
	return Run(in)
}

func (r *Report) writeJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	for i := range r.Results {
		if err := enc.Encode(&r.Results[i]); err != nil {
			return err
		}
	}
	return enc.Encode(map[string]*Summary{"summary": &r.Summary})
}

func (r *Report) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "REQUEST\tPROMPT\tTABLE\tINDEX\tACTUAL\t  REASON")
	for _, x := range r.Results {
		actual := "-"
		if x.ActualTokens != nil {
			actual = fmt.Sprint(*x.ActualTokens)
		}
		fmt.Fprintf(t, "%d\t%d\t%d\t%d\t%s\t  %s\n", x.Request, x.PromptTokens, x.BlockTableTokens, x.IndexTokens, actual, x.Reason)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	s := r.Summary
	_, err := fmt.Fprintf(w, "\n%d requests: block table equal %d, over %d, under %d; %d could not be compared\n",
		s.Requests, s.Equal, s.Over, s.Under, s.Unknown)
	for _, reason := range []Reason{Equal, FirstDivergence, PrefixInFlight, MultipleSamples, PromptLogprobs, ReportMode, Unknown} {
		if n := s.ByReason[reason]; n > 0 && err == nil {
			_, err = fmt.Fprintf(w, "  %s: %d\n", reason, n)
		}
	}
	return err
}
