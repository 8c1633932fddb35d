package kvevents

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"waypost/agent/engine"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"
)

// transcript writes what a stream wants done, one line each.
type transcript struct {
	out   strings.Builder
	run   uint64
	quiet bool
}

func (x *transcript) Apply(m Message) {
	if x.quiet {
		return
	}
	how := ""
	if m.Replayed {
		how = " (replayed)"
	}
	fmt.Fprintf(&x.out, "apply %d %s%s\n", m.Seq, m.Payload, how)
}

func (x *transcript) AskReplay(run, from uint64) {
	x.run = run
	fmt.Fprintf(&x.out, "ask replay %d from %d\n", run, from)
}
func (x *transcript) Reset(c engine.ResetCause)   { fmt.Fprintf(&x.out, "reset: %s\n", c) }
func (x *transcript) Rebuild(c engine.ResetCause) { fmt.Fprintf(&x.out, "rebuild: %s\n", c) }
func (x *transcript) Rebuilt()                    { fmt.Fprintf(&x.out, "rebuilt\n") }
func (x *transcript) Coverage(c engine.Coverage, hint string) {
	fmt.Fprintf(&x.out, "coverage %s: %s\n", c, hint)
}

func (x *transcript) Counted(what string, n int) {
	if what != CountReplays { // told by the request itself
		fmt.Fprintf(&x.out, "counted %s %d\n", what, n)
	}
}

// TestStream plays the transcripts in testdata/stream. The commands are
//
//	new [replay=false] [once=true] [pool=N]
//	connected | disconnected | gone | back | restart | sleep | resync | malformed
//	live SEQ[:PAYLOAD]...            messages of the event socket
//	replay [run=N] SEQ[:PAYLOAD]...  answers to the last request
//	end [run=N] | fail [run=N]       its end marker; its failure
//	tick DURATION [busy]             time passes
//	stored N | damaged N [removals]  what became of the last batch
//	untold N                         blocks of the last batch of no known tier
//	silent | heard                   the engine works without events, or not
//	doubt | trust                    the adapter's own doubts
//	wrongrank N | rightrank          whose the last batch was
//	history FROM TO                  many answers, not shown
func TestStream(t *testing.T) {
	datadriven.Walk(t, "testdata/stream", func(t *testing.T, path string) {
		var s *Stream
		x := &transcript{}
		now := time.Unix(1000, 0)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			x.out.Reset()
			if d.Cmd == "new" {
				o := StreamOptions{Replay: true, MaxHeld: 8, Setting: "--kv-events-config", Endpoint: "tcp://127.0.0.1:5557", Check: "the engine"}
				d.MaybeScanArgs(t, "replay", &o.Replay)
				d.MaybeScanArgs(t, "once", &o.Once)
				s = NewStream(o, x)
				var pool int
				d.MaybeScanArgs(t, "pool", &pool)
				s.SetPool(pool)
				return ""
			}
			for _, line := range append([]string{strings.TrimSpace(d.Cmd + " " + args(d))}, strings.Split(d.Input, "\n")...) {
				if line != "" {
					now = play(t, s, x, now, strings.Fields(line))
				}
			}
			if x.out.Len() == 0 {
				return "nothing\n"
			}
			return x.out.String()
		})
	})
}

func args(d *datadriven.TestData) string {
	var out []string
	for _, a := range d.CmdArgs {
		out = append(out, a.String())
	}
	return strings.Join(out, " ")
}

func play(t *testing.T, s *Stream, x *transcript, now time.Time, words []string) time.Time {
	run := x.run
	words = slices.DeleteFunc(words, func(w string) bool {
		v, ok := strings.CutPrefix(w, "run=")
		if ok {
			run, _ = strconv.ParseUint(v, 10, 64)
		}
		return ok
	})
	number := func(i int) int {
		n, err := strconv.Atoi(words[i])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	switch words[0] {
	case "connected":
		s.Connected(now)
	case "disconnected":
		s.Disconnected(now)
	case "gone":
		s.Gone(now)
	case "back":
		s.Back(now)
	case "restart":
		s.Restart(now)
	case "sleep":
		s.Slept(now)
	case "resync":
		s.Resync(now, len(words) > 1 && words[1] == "lacking")
	case "malformed":
		s.Malformed(now)
	case "live", "replay":
		for _, w := range words[1:] {
			seq, payload, ok := strings.Cut(w, ":")
			if !ok {
				payload = "p" + seq
			}
			n, err := strconv.ParseUint(seq, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			m := Message{Seq: n, Payload: []byte(payload), Received: now}
			if words[0] == "live" {
				s.Live(m)
			} else {
				s.Replayed(run, m)
			}
		}
	case "end":
		s.ReplayEnded(run, now)
	case "fail":
		s.ReplayFailed(run, now)
	case "tick":
		d, err := time.ParseDuration(words[1])
		if err != nil {
			t.Fatal(err)
		}
		now = now.Add(d)
		s.Tick(now, len(words) > 2)
	case "silent":
		s.Silent(true)
	case "heard":
		s.Silent(false)
	case "doubt":
		s.Doubt("a reason")
	case "trust":
		s.Doubt("")
	case "wrongrank":
		s.WrongRank(now, number(1))
		s.Tick(now, false)
	case "rightrank":
		s.RightRank()
		s.Tick(now, false)
	case "history":
		x.quiet = true
		for seq := number(1); seq <= number(2); seq++ {
			s.Replayed(run, Message{Seq: uint64(seq), Payload: []byte("p"), Received: now})
		}
		x.quiet = false
	case "stored":
		s.Applied(now, number(1), 0, 0, false)
		s.Tick(now, false)
	case "untold":
		s.UnknownTier(number(1))
		s.Tick(now, false)
	case "damaged":
		s.Applied(now, 0, number(1), 0, len(words) > 2)
		s.Tick(now, false)
	default:
		t.Fatalf("unknown command %q", words[0])
	}
	return now
}

func TestParseFrames(t *testing.T) {
	b := func(parts ...string) (out [][]byte) {
		for _, p := range parts {
			out = append(out, []byte(p))
		}
		return out
	}
	const seven, end = "\x00\x00\x00\x00\x00\x00\x00\x07", "\xff\xff\xff\xff\xff\xff\xff\xff"
	tests := []struct {
		name    string
		frames  [][]byte
		seq     uint64
		payload string
		end     bool
		err     error
	}{
		{"live", b("topic", seven, "x"), 7, "x", false, nil},
		{"live with a topic of eight bytes", b(end, seven, "x"), 7, "x", false, nil},
		{"replay to 0.25", b("", seven, "x"), 7, "x", false, nil},
		{"replay from 0.26", b("", "topic", seven, "x"), 7, "x", false, nil},
		{"end to 0.25", b("", end, ""), 0, "", true, nil},
		{"end from 0.26", b("", "", end, ""), 0, "", true, nil},
		{"one frame", b("x"), 0, "", false, ErrFrames},
		{"none", nil, 0, "", false, ErrFrames},
		{"short number", b("topic", "\x07", "x"), 0, "", false, ErrFrames},
	}
	for _, test := range tests {
		seq, payload, end, err := ParseFrames(test.frames)
		if seq != test.seq || string(payload) != test.payload || end != test.end || err != test.err {
			t.Errorf("%s: %d %q %v %v", test.name, seq, payload, end, err)
		}
	}
}

// publisher is an engine's publisher with a ring for replay; its batches name
// the life they are of.
type publisher struct {
	life, next int
	ring       []Message
	size       int
}

func (p *publisher) publish() Message {
	m := Message{Seq: uint64(p.next), Payload: fmt.Appendf(nil, "life %d batch %d", p.life, p.next)}
	p.next++
	p.ring = append(p.ring, m)
	if len(p.ring) > p.size {
		p.ring = p.ring[1:]
	}
	return m
}

// view is what a mirror would hold: the batches applied, in order.
type view struct {
	batches []string
	beside  []string
	asks    []ask // the latest, if not answered yet
	rebuild bool
	cover   engine.Coverage
	hint    string
}

func (v *view) Apply(m Message) {
	if v.rebuild {
		v.beside = append(v.beside, string(m.Payload))
	} else {
		v.batches = append(v.batches, string(m.Payload))
	}
}
func (v *view) AskReplay(run, from uint64)           { v.asks = []ask{{run, from}} }
func (v *view) Reset(engine.ResetCause)              { v.batches, v.beside, v.rebuild = nil, nil, false }
func (v *view) Rebuild(engine.ResetCause)            { v.beside, v.rebuild = nil, true }
func (v *view) Rebuilt()                             { v.batches, v.beside, v.rebuild = v.beside, nil, false }
func (v *view) Coverage(c engine.Coverage, h string) { v.cover, v.hint = c, h }
func (v *view) Counted(string, int)                  {}

// Whatever is lost, repeated or restarted: once things are quiet the view is
// that of the living process, without a hole that is not admitted, and with
// full coverage if the ring reached the beginning.
func TestStreamConverges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := &publisher{size: rapid.SampledFrom([]int{3, 10, 1000}).Draw(t, "ring")}
		v := &view{}
		s := NewStream(StreamOptions{Replay: true, MaxHeld: 5}, v)
		now := time.Unix(1000, 0)
		answer := func(drop bool) {
			if len(v.asks) == 0 {
				return
			}
			a := v.asks[0]
			v.asks = nil
			first := true
			for _, m := range p.ring {
				// Answers are dropped when too many are under way, so the
				// first one always comes.
				if m.Seq < a.from || drop && !first && rapid.IntRange(0, 3).Draw(t, "drop reply") == 0 {
					continue
				}
				first = false
				m.Received = now
				s.Replayed(a.run, m)
			}
			if drop && rapid.IntRange(0, 3).Draw(t, "no end") == 0 {
				s.ReplayFailed(a.run, now)
				return
			}
			s.ReplayEnded(a.run, now)
		}
		gone := false // a batch is in no ring
		holes := 0    // such batches of this life
		deliver := func(m Message) {
			m.Received = now
			s.Live(m)
		}
		s.Connected(now)
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			now = now.Add(100 * time.Millisecond)
			switch rapid.IntRange(0, 15).Draw(t, "step") {
			case 0:
				p.publish() // lost
			case 15: // lost for good, inside the ring
				p.publish()
				p.ring = p.ring[:len(p.ring)-1]
				gone = true
				holes++
			case 1:
				m := p.publish()
				deliver(m)
				deliver(m)
			case 2: // another process
				s.Disconnected(now)
				*p = publisher{life: p.life + 1, size: p.size}
				gone, holes = false, 0
				for range rapid.IntRange(0, 4).Draw(t, "head start") {
					p.publish()
				}
				s.Connected(now)
			case 3:
				s.Disconnected(now)
				s.Connected(now)
			case 4, 5:
				answer(true)
			case 6:
				now = now.Add(6 * time.Second)
				s.Tick(now, rapid.Bool().Draw(t, "busy"))
			case 7:
				s.Resync(now, rapid.Bool().Draw(t, "lacking"))
			default:
				deliver(p.publish())
			}
		}
		// Quiet: everything is delivered, replays answer, time passes.
		for range 80 {
			// Each hole is asked for twice: once more, and then to go on behind it.
			for k := 0; len(v.asks) > 0; k++ {
				answer(false)
				if k > 10+2*holes {
					t.Fatalf("asks %d times, with %d holes", k, holes)
				}
			}
			deliver(p.publish())
			now = now.Add(61 * time.Second)
			s.Tick(now, false)
		}
		for len(v.asks) > 0 {
			answer(false)
		}
		if v.rebuild {
			t.Fatalf("still rebuilding")
		}
		want := 0
		if k := len(v.batches); k > 0 {
			fmt.Sscanf(v.batches[0], fmt.Sprintf("life %d batch %%d", p.life), &want)
		}
		if v.cover == engine.CoverageFull && want != 0 {
			t.Fatalf("full coverage from batch %d on", want)
		}
		if p.size == 1000 && !gone && v.cover != engine.CoverageFull {
			t.Fatalf("coverage %s though the ring holds everything", v.cover)
		}
		for _, b := range v.batches {
			if b != fmt.Sprintf("life %d batch %d", p.life, want) {
				t.Fatalf("%q where batch %d of life %d belongs, of %q", b, want, p.life, v.batches)
			}
			want++
		}
		if want != p.next {
			t.Fatalf("view ends at %d, publisher at %d", want, p.next)
		}
	})
}

// A replay that lags behind the live stream must not be asked again and again.
func TestReplayRequestsAreBounded(t *testing.T) {
	v := &view{}
	s := NewStream(StreamOptions{Replay: true}, v)
	now := time.Unix(1000, 0)
	s.Connected(now)
	asked, next := 0, uint64(55)
	for range 600 { // 60 s
		now = now.Add(100 * time.Millisecond)
		for _, a := range v.asks {
			asked++
			v.asks = nil
			for seq := a.from; seq <= 40; seq++ { // it never gets further
				s.Replayed(a.run, Message{Seq: seq, Payload: fmt.Appendf(nil, "%d", seq), Received: now})
			}
			s.ReplayEnded(a.run, now)
		}
		s.Live(Message{Seq: next, Payload: fmt.Appendf(nil, "%d", next), Received: now})
		next++
		s.Tick(now, true)
	}
	if asked >= 10 || v.cover != engine.CoveragePartial || !strings.Contains(v.hint, "behind its own event stream") {
		t.Errorf("%d replays asked for in a minute, coverage %s (%s)", asked, v.cover, v.hint)
	}
	// What came live was taken, each batch once: the cursor never went back.
	seen := map[string]int{}
	for _, b := range v.batches {
		if seen[b]++; seen[b] > 1 {
			t.Fatalf("batch %s was taken twice", b)
		}
	}
	if seen[fmt.Sprint(next-1)] != 1 {
		t.Errorf("of %d batches that were taken none is the latest", len(seen))
	}
}
