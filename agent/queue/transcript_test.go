package queue

import (
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

const testAgent = 0xa

// claimed is a request of a transcript or a test, and its prompt's prefixes.
type claimed struct {
	coordinator, seq uint64
	// text makes the prompt: claims of one text share their prefixes.
	text           string
	prompt, reused int
}

// key names a prefix of a text.
func key(text string, depth int) prefix.Key {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s %d", text, depth)
	return prefix.Key(h.Sum64() | 1)
}

// keys are what a coordinator sends along: the first new block, checkpoints
// and the tip.
func (c *claimed) keys() (keys []prefix.Key, depths []uint32) {
	const block = 16
	add := func(depth int) {
		if depth > c.reused && depth <= c.prompt && (len(depths) == 0 || depth > int(depths[len(depths)-1])) {
			keys, depths = append(keys, key(c.text, depth)), append(depths, uint32(depth))
		}
	}
	add(c.reused + block)
	for d := prefix.ChunkTokens; d <= c.prompt; d += prefix.ChunkTokens {
		add(d)
	}
	add(c.prompt / block * block)
	return keys, depths
}

// blocks is the store event of a text's blocks in (from, to].
func blocks(text string, from, to int) Store {
	const block = 16
	s := Store{}
	if from > 0 {
		s.Parent = key(text, from)
	}
	for d := from + block; d <= to; d += block {
		s.Points = append(s.Points, Point{key(text, d), d})
	}
	return s
}

func (c *claimed) offer(ageMs float64) ledger.Offer {
	keys, depths := c.keys()
	return ledger.Offer{AgeMs: ageMs, Claim: ledger.Claim{
		Seq: c.seq, EngineProcess: 1, PromptTokens: c.prompt, UncachedTokens: c.prompt - c.reused, OutputTokens: 10, Sequences: 1,
		Keys: keys, KeyDepths: depths,
	}}
}

func newLedgerEstimator(t testing.TB, change ...func(*Options)) *Estimator {
	t.Helper()
	o := Options{AgentProcess: testAgent, Facts: Facts{
		Model: ledger.StepModel{P0Ms: 10, P1MsPerToken: .1, D0Ms: 20}, StepTokens: 1000, BlockTokens: 16, PoolBlocks: 1000, MaxRunning: 8,
	}}
	for _, c := range change {
		c(&o)
	}
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	e.ms(start)
	e.SetProcess(1)
	return e
}

func atMs(ms float64) time.Time {
	return start.Add(time.Duration(ms * float64(time.Millisecond)))
}

// The transcripts in testdata/evidence read as the manual of the evidence: what
// each kind of fact says of the queue. The worker's prefill takes 10 + 0.1·n ms
// per step of at most 1,000 tokens and every step 20 ms for decoding; blocks
// hold 16 tokens. Commands:
//
//	new [unordered] [lag=MS]           a worker that nothing is known of
//	claim at= seq= tokens= [of=COORDINATOR] [reused=] [n=] [age=] [text=] [prev=] [process=] [agent=]
//	mark at= seq= what= [of=] [age=] [out=]
//	store at= text= to= [from=]        blocks of a text are stored
//	sample at= [running=] [waiting=] [finished=] [kv=]
//	queued at= tokens=                 the engine's own sum of waiting tokens
//	slots at= LENGTH/DONE ...          busy slots
//	restart process=
//	load at=                           the report
func TestEvidence(t *testing.T) {
	datadriven.Walk(t, "testdata/evidence", func(t *testing.T, path string) {
		var e *Estimator
		prev := map[uint64]uint64{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			a := args{t, d, map[string]string{}, nil}
			a.parse()
			var out strings.Builder
			run := func(cmd string, a args) {
				if cmd == "new" {
					e = newLedgerEstimator(t, func(o *Options) { o.Facts.Unordered = a.has("unordered") })
					if a.has("lag") {
						e.lag.set(a.number("lag", 0))
					}
					clear(prev)
					return
				}
				out.WriteString(play(t, e, cmd, a, prev))
			}
			run(d.Cmd, a)
			for line := range strings.Lines(d.Input) {
				fields := strings.Fields(line)
				b := args{t: t, d: d, values: map[string]string{}}
				for _, f := range fields[1:] {
					b.add(f)
				}
				run(fields[0], b)
			}
			if out.Len() == 0 {
				return "ok\n"
			}
			return out.String()
		})
	})
}

type args struct {
	t      *testing.T
	d      *datadriven.TestData
	values map[string]string
	words  []string
}

func (a *args) parse() {
	for _, arg := range a.d.CmdArgs {
		if len(arg.Vals) == 0 {
			a.add(arg.Key)
		} else {
			a.add(arg.Key + "=" + arg.Vals[0])
		}
	}
}

func (a *args) add(word string) {
	if k, v, ok := strings.Cut(word, "="); ok {
		a.values[k] = v
		return
	}
	a.words = append(a.words, word)
	a.values[word] = ""
}

func (a *args) has(k string) bool { _, ok := a.values[k]; return ok }

func (a *args) number(k string, otherwise float64) float64 {
	v, ok := a.values[k]
	if !ok {
		return otherwise
	}
	n, err := strconv.ParseFloat(v, 64)
	if err != nil {
		a.t.Fatalf("%s: %s: %v", a.d.Pos, k, err)
	}
	return n
}

func (a *args) text(k, otherwise string) string {
	if v, ok := a.values[k]; ok {
		return v
	}
	return otherwise
}

// play runs one command and returns what it prints.
func play(t *testing.T, e *Estimator, cmd string, a args, prev map[uint64]uint64) string {
	at := atMs(a.number("at", 0))
	of := uint64(a.number("of", 1))
	seq := uint64(a.number("seq", 0))
	switch cmd {
	case "claim":
		c := claimed{of, seq, a.text("text", fmt.Sprint(seq)), int(a.number("tokens", 0) + a.number("reused", 0)), int(a.number("reused", 0))}
		o := c.offer(a.number("age", 0))
		o.Sequences, o.EngineProcess = int(a.number("n", 1)), uint64(a.number("process", 1))
		in, err := e.Claims(at, &ledger.ClaimFrame{Coordinator: of, Agent: uint64(a.number("agent", testAgent)), Prev: uint64(a.number("prev", float64(prev[of]))), Offers: []ledger.Offer{o}})
		if err != nil {
			return err.Error() + "\n"
		}
		switch {
		case in.Gap:
			return fmt.Sprintf("claim %d: gap\n", seq)
		case in.Ignored:
			return fmt.Sprintf("claim %d: for another agent\n", seq)
		case in.Fenced > 0:
			prev[of] = seq
			return fmt.Sprintf("claim %d: for another engine process\n", seq)
		case in.Taken == 0:
			return fmt.Sprintf("claim %d: a duplicate\n", seq)
		}
		prev[of] = seq
	case "mark":
		f := &ledger.MarkFrame{Coordinator: of, Marks: []ledger.Marked{{Seq: seq, What: ledger.Mark(a.text("what", "")), AgeMs: a.number("age", 0), OutputTokens: int(a.number("out", 0))}}}
		if _, err := e.Marks(at, f); err != nil {
			return err.Error() + "\n"
		}
	case "store":
		e.Stores(at, []Store{blocks(a.text("text", ""), int(a.number("from", 0)), int(a.number("to", 0)))})
	case "sample":
		s := Sample{At: at}
		for k, field := range map[string]**int{"running": &s.Running, "waiting": &s.Waiting} {
			if a.has(k) {
				*field = ptr(int(a.number(k, 0)))
			}
		}
		if a.has("finished") {
			s.Finished = ptr(a.number("finished", 0))
		}
		if a.has("kv") {
			s.KVUsedRatio = ptr(a.number("kv", 0))
		}
		e.Sample(s)
	case "queued":
		e.Queued(at, int(a.number("tokens", 0)))
	case "slots":
		var slots []Slot
		for _, w := range a.words {
			var s Slot
			if _, err := fmt.Sscanf(w, "%d/%d", &s.PromptTokens, &s.ProcessedTokens); err != nil {
				t.Fatalf("%s: %v", a.d.Pos, err)
			}
			slots = append(slots, s)
		}
		e.Slots(at, slots)
	case "restart":
		e.SetProcess(uint64(a.number("process", 2)))
	case "load":
		l := e.Load(at)
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%v: %s\n", a.number("at", 0), describe(&l))
	case "counts":
		return fmt.Sprintf("%+v\n", e.Counts())
	default:
		t.Fatalf("%s: unknown command %q", a.d.Pos, cmd)
	}
	return ""
}

// describe is a report in a line.
func describe(l *ledger.Load) string {
	number := func(v *float64) string {
		if v == nil {
			return "?"
		}
		return strconv.FormatFloat(*v, 'f', -1, 64)
	}
	rounded := func(v *float64) string {
		if v == nil {
			return "?"
		}
		return strconv.FormatFloat(float64(int(*v*10+.5))/10, 'f', -1, 64)
	}
	count := func(v *uint32) string {
		if v == nil {
			return "?"
		}
		return fmt.Sprint(*v)
	}
	s := fmt.Sprintf("queue %s ms, %s open; live %s, decoding %s, context %s", rounded(l.QueueMs), count(l.OpenTokens), count(l.Live), count(l.Decoding), rounded(l.ContextTokens))
	if l.Foreign != nil && *l.Foreign > 0 {
		s += ", foreign " + count(l.Foreign)
	}
	if l.HeldBlocks != nil {
		s += ", held " + number(l.HeldBlocks)
	}
	if l.QueueBasis != "" {
		s += "; by " + string(l.QueueBasis)
	}
	for _, echo := range l.Echo {
		s += fmt.Sprintf("; echo %d:%d", echo.Coordinator, echo.Upto)
	}
	return s
}
