package trtllm

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/enginetest"
	"waypost/agent/engine/kvevents"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func read(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// fake is a server that hands out each event once.
type fake struct {
	*enginetest.Server
	mu      sync.Mutex
	answers map[string]string
	queue   []string // answers to questions for events
	asked   int
}

func newFake(t testing.TB) *fake {
	f := &fake{answers: map[string]string{
		"/v1/models": `{"data":[{"id":"tiny"}]}`, "/version": `{"version":"1.3.0"}`, "/health": "", "/prometheus/metrics": read(t, "metrics.txt"),
	}}
	f.Server = enginetest.NewServer(t, f.handle)
	return f
}

func (f *fake) handle(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.URL.Path == eventsPath {
		f.asked++
		if r.Method != http.MethodPost {
			http.Error(w, "", http.StatusMethodNotAllowed)
			return
		}
		answer := "[]"
		if len(f.queue) > 0 {
			answer, f.queue = f.queue[0], f.queue[1:]
		}
		switch answer {
		case "404":
			f.queue = []string{"404"}
			http.NotFound(w, r)
		case "500":
			http.Error(w, "priority is null", http.StatusInternalServerError)
		default:
			io.WriteString(w, answer)
		}
		return
	}
	answer, ok := f.answers[r.URL.Path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	io.WriteString(w, answer)
}

func (f *fake) hand(answers ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue = append(f.queue, answers...)
}

func (f *fake) set(path, answer string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if answer == "" {
		delete(f.answers, path)
		return
	}
	f.answers[path] = answer
}

func watch(t *testing.T, f *fake, target engine.Target, sink engine.Sink) {
	t.Helper()
	target.Name, target.URL = "trtllm-test", f.URL
	a, err := New(Options{Options: engine.Options{Target: target, Logger: slog.New(slog.DiscardHandler), FactsEvery: time.Second}})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := any(a).(engine.Tokenizer); ok {
		t.Error("a server that tells no token ids has a tokenizer")
	}
	enginetest.Watch(t, a, sink)
}

// event is a store of one block of two tokens, as the server hands it out.
func event(id int, parent, hash int) string {
	up := "null"
	if parent != 0 {
		up = fmt.Sprint(parent)
	}
	return fmt.Sprintf(`{"event_id":%d,"data":{"type":"stored","parent_hash":%s,"blocks":[{"block_hash":%d,"tokens":[{"token_id":%d},{"token_id":%d}],"cache_level":0}]}}`, id, up, hash, 10*hash, 10*hash+1)
}

func list(events ...string) string { return "[" + strings.Join(events, ",") + "]" }

func TestHandedOutEvents(t *testing.T) {
	f := newFake(t)
	m := enginetest.NewMirror(t)
	f.hand(list(event(0, 0, 1), event(1, 1, 2)))
	watch(t, f, engine.Target{}, m)
	m.Await("from the beginning", func() bool { return m.Of(0).Match(1, 2) == 4 && m.Of(0).Coverage == engine.CoverageFull })
	m.Await("what events omit", func() bool { return m.Known.Capabilities.Has(engine.OmitsAdapters | engine.OmitsSalts) })
	// The ring overflowed: what it held is lost, and nobody can bring it back.
	f.hand(list(event(5, 2, 3)))
	m.Await("a gap", func() bool {
		r := m.Of(0)
		return r.Match(1, 2, 3) == 6 && r.Coverage == engine.CoveragePartial && r.Counts[kvevents.CountMissing] == 3
	})
	// The same number again is another process, even with the same event.
	f.hand(list(event(0, 0, 1)))
	m.Await("restart", func() bool {
		r := m.Of(0)
		return slices.Equal(r.Resets, []engine.ResetCause{engine.ResetRestart}) && r.Match(1) == 2 && r.Match(1, 2) == 2 && r.Coverage == engine.CoverageFull
	})
}

// What the server's serialiser breaks on is lost, and seen to be.
func TestFailedAnswers(t *testing.T) {
	f := newFake(t)
	m := enginetest.NewMirror(t)
	f.hand(list(event(0, 0, 1)), "500", `{"a":`, `{"event_id":1}`, `[5,{"event_id":"x"},{"event_id":-1},{"event_id":1,"attention_dp_rank":-2}]`, "["+strings.Repeat("0,", maxMembers)+"0]", list(event(2, 1, 2)))
	watch(t, f, engine.Target{}, m)
	m.Await("what came after", func() bool {
		r := m.Of(0)
		return r.Match(1, 2) == 4 && r.Counts[kvevents.CountMissing] == 1 && r.Counts[kvevents.CountMalformed] == 7 && r.Coverage == engine.CoveragePartial
	})
}

// A server that fails to answer again and again does not speak of events in an
// unknown form.
func TestAnswersThatKeepFailing(t *testing.T) {
	f := newFake(t)
	m := enginetest.NewMirror(t)
	f.hand(list(event(0, 0, 1)), "500", "500", "500", "500", "500")
	watch(t, f, engine.Target{}, m)
	asked := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.queue)
	}
	m.Await("the last failure", func() bool { return asked() == 0 && m.Of(0).Hint != "" })
	m.Await("why", func() bool {
		r := m.Of(0)
		return r.Coverage == engine.CoveragePartial && r.Hint == hintUnanswered && r.Counts[kvevents.CountMalformed] == 0
	})
	f.hand(list(event(1, 1, 2)))
	m.Await("all of it is known", func() bool { return m.Of(0).Match(1, 2) == 4 && m.Of(0).Coverage == engine.CoverageFull })
}

func TestNoSuchRoute(t *testing.T) {
	f := newFake(t)
	m := enginetest.NewMirror(t)
	f.hand("404")
	watch(t, f, engine.Target{}, m)
	m.Await("the setting is named", func() bool { return m.Of(0).Coverage == engine.CoverageNone && m.Of(0).Hint == dialect.HintNoEvents() })
}

// Events of all ranks come in one answer; those of ranks that are not followed
// yet are kept, for they come once.
func TestRanks(t *testing.T) {
	f := newFake(t)
	m := enginetest.NewMirror(t)
	of := func(rank int, e string) string {
		return strings.Replace(e, "{", fmt.Sprintf(`{"attention_dp_rank":%d,`, rank), 1)
	}
	f.hand(list(of(0, event(0, 0, 1)), of(1, event(0, 0, 2)), of(1, event(1, 2, 3))))
	watch(t, f, engine.Target{}, m)
	m.Await("both", func() bool {
		return m.Of(0).Match(1) == 2 && m.Of(1).Match(2, 3) == 4 && m.Of(0).Match(2) == 0 && m.Of(1).Coverage == engine.CoverageFull && m.Known.Ranks == 2
	})
}

// A server that streams is read where the configuration says.
func TestStreamedEvents(t *testing.T) {
	f := newFake(t)
	p := enginetest.NewPublisher(t)
	t.Cleanup(p.Close)
	p.Publish(false, enginetest.Stored(0, 1))
	m := enginetest.NewMirror(t)
	watch(t, f, engine.Target{Events: fmt.Sprintf("tcp://%s:%d", enginetest.Host, p.Port()), Replay: fmt.Sprintf("tcp://%s:%d", enginetest.Host, p.ReplayPort())}, m)
	m.Await("replay", func() bool { return m.Of(0).Match(1) == 2 && m.Of(0).Coverage == engine.CoverageFull })
	p.AwaitSubscriber()
	p.Publish(false, enginetest.Stored(1, 2))
	m.Await("live", func() bool { return m.Of(0).Match(1, 2) == 4 })
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.asked > 0 {
		t.Error("events were taken over HTTP as well")
	}
}

func TestFactsAndLoad(t *testing.T) {
	f := newFake(t)
	m := enginetest.NewMirror(t)
	watch(t, f, engine.Target{}, m)
	m.Await("facts", func() bool { return m.Up && m.Of(0).Load.Running != nil && m.Known.PoolBlocks > 0 })
	n, k := func(v float64) *float64 { return &v }, func(v int) *int { return &v }
	m.Mu.Lock()
	load, known := m.Of(0).Load, m.Known
	m.Mu.Unlock()
	want := engine.Load{
		At: load.At, Running: k(4), Waiting: k(1), KVUsedRatio: n(.5), PromptTokens: n(1000), ComputedPromptTokens: n(750), GenerationTokens: n(70),
		FirstTokens: n(7), FirstTokenSeconds: n(3.5), Finished: n(7),
	}
	if diff := cmp.Diff(want, load); diff != "" {
		t.Error(diff)
	}
	if known.Version != "1.3.0" || known.Model != "tiny" || known.BlockTokens != 2 || known.PoolBlocks != 100 || known.StartMark == 0 || !known.Capabilities.Has(engine.ReportsCachedTokens) {
		t.Errorf("%+v", known)
	}
	// Without the page, the records of steps tell.
	f.set("/prometheus/metrics", "")
	f.set("/metrics", read(t, "iterations.json"))
	m.Await("records", func() bool {
		l := m.Of(0).Load
		return l.Running != nil && *l.Running == 3 && *l.Waiting == 2 && *l.KVUsedRatio == .25 && l.PromptTokens == nil && m.Known.MaxRunning == 256
	})
	f.set("/metrics", "[]")
	m.Await("no step: unknown, not none", func() bool { return m.Up && m.Of(0).Load.Running == nil && m.Of(0).Load.KVUsedRatio != nil })
	f.set("/metrics", `[{"numActiveRequests":0,"numQueuedRequests":0},{"attentionDpRank":-1},{"attentionDpRank":1000000000}]`)
	m.Await("idle", func() bool { l := m.Of(0).Load; return l.Running != nil && *l.Running == 0 })
	f.set("/metrics", "[]")
	f.set("/metrics", "")
	m.Await("nothing at all", func() bool { return m.Up && m.Of(0).Load.Running == nil })
	f.set("/v1/models", "")
	m.Await("down", func() bool { return !m.Up && strings.Contains(m.Reason, "404") })
}

func describe(events []blocktable.Event) (out []string) {
	for _, e := range events {
		marks := ""
		for _, m := range e.Marks {
			marks += map[bool]string{true: "x", false: "-"}[m != 0]
		}
		out = append(out, fmt.Sprintf("op=%d medium=%d hashes=%v parent=%v,%d tokens=%v block=%d %s", e.Op, e.Medium, e.Hashes, e.HasParent, e.Parent, e.Tokens, e.BlockTokens, marks))
	}
	return out
}

func TestDecode(t *testing.T) {
	var raw []json.RawMessage
	if err := json.Unmarshal([]byte(read(t, "events.json")), &raw); err != nil {
		t.Fatal(err)
	}
	d := newDecoder()
	const a, b = "17461474797406555673", "949730894463544763"
	for i, want := range [][]string{
		nil,
		{"op=1 medium=0 hashes=[" + a + "] parent=false,0 tokens=[0 1] block=2 -", "op=1 medium=0 hashes=[" + b + "] parent=true," + a + " tokens=[2 3] block=2 -"},
		{"op=1 medium=1 hashes=[" + b + "] parent=false,0 tokens=[] block=0 ", "op=2 medium=0 hashes=[" + b + "] parent=false,0 tokens=[] block=0 "},
		nil,
		{"op=1 medium=0 hashes=[" + b + "] parent=false,0 tokens=[] block=0 ", "op=2 medium=1 hashes=[" + b + "] parent=false,0 tokens=[] block=0 "},
		nil, // of a smaller window
		{"op=2 medium=0 hashes=[" + b + " 5] parent=false,0 tokens=[] block=0 ", "op=2 medium=1 hashes=[" + b + " 5] parent=false,0 tokens=[] block=0 "},
	} {
		seq, rank, err := head(raw[i])
		if err != nil || seq != uint64(i) || rank != 0 {
			t.Fatalf("%d: %v, number %d, rank %d", i, err, seq, rank)
		}
		got, err := d.Decode(raw[i])
		if diff := cmp.Diff(want, describe(got.Events)); err != nil || diff != "" || got.Damaged+got.Unknown > 0 {
			t.Errorf("%d: %v, %+v: %s", i, err, got, diff)
		}
	}
}

// A block that went to the host and came back is what it was.
func TestMovedBlockKeepsItsPlace(t *testing.T) {
	var raw []json.RawMessage
	if err := json.Unmarshal([]byte(read(t, "events.json")), &raw); err != nil {
		t.Fatal(err)
	}
	table, d := blocktable.New(blocktable.Options{}), newDecoder()
	for i, want := range []int{0, 4, 2, 2, 4, 4, 2} {
		b, err := d.Decode(raw[i])
		if err != nil {
			t.Fatal(err)
		}
		for k := range b.Events {
			table.Apply(&b.Events[k])
		}
		if got := table.Match([]uint32{0, 1, 2, 3, 4}, "", ""); got != want {
			t.Errorf("after event %d %d tokens match, want %d", i, got, want)
		}
	}
}

func TestOddEvents(t *testing.T) {
	for _, test := range []struct {
		name, data string
		events     int
		damaged    int
		unknown    int
		lost       bool
	}{
		{name: "hexadecimal hashes", data: `{"type":"stored","parent_hash":"a75df711d2fb0436d4b242fdb989e492","blocks":[{"block_hash":"3d6d38d54c5e8be0a1a66889ae464a2f","tokens":[{"token_id":1}]}]}`, events: 1},
		{name: "an image", data: `{"type":"stored","blocks":[{"block_hash":1,"tokens":[{"token_id":1,"token_extra_id":7}],"mm_keys":[{"hash":"00"}]}]}`, events: 1},
		{name: "a second block that is damaged", data: `{"type":"stored","blocks":[{"block_hash":1,"tokens":[{"token_id":1}]},{"block_hash":1.5,"tokens":[]}]}`, events: 1, damaged: 1},
		{name: "a token that cannot be", data: `{"type":"stored","blocks":[{"block_hash":1,"tokens":[{"token_id":4294967296}]}]}`, damaged: 1},
		{name: "a hash of 65 bits", data: `{"type":"removed","block_hashes":[18446744073709551616]}`, damaged: 1, lost: true},
		{name: "a signed hash", data: `{"type":"removed","block_hashes":[-5]}`, events: 2},
		{name: "a move of nothing", data: `{"type":"updated"}`, damaged: 1, lost: true},
		{name: "a kind of the future", data: `{"type":"touched"}`, unknown: 1},
		{name: "no data", data: `5`, damaged: 1, lost: true},
		{name: "blocks without end", data: `{"type":"stored","blocks":[` + strings.Repeat("0,", maxMembers) + `0]}`, damaged: 1, lost: true},
	} {
		b, err := newDecoder().Decode([]byte(`{"event_id":1,"data":` + test.data + `}`))
		if err != nil || len(b.Events) != test.events || b.Damaged != test.damaged || b.Unknown != test.unknown || b.LostRemovals != test.lost {
			t.Errorf("%s: %v %+v", test.name, err, b)
		}
	}
	b, _ := newDecoder().Decode([]byte(`{"event_id":1,"data":{"type":"stored","parent_hash":"a75df711d2fb0436d4b242fdb989e492","blocks":[{"block_hash":"3d6d38d54c5e8be0a1a66889ae464a2f","tokens":[{"token_id":1,"token_extra_id":3}]}]}}`))
	if e := b.Events[0]; e.Parent != 12060067033094226998 || e.Hashes[0] != 4426256497535519712 || e.Marks[0] == 0 {
		t.Errorf("%+v: want the first 64 bits of both hashes, and a mark", e)
	}
	if _, err := newDecoder().Decode([]byte(`[`)); err == nil {
		t.Error("what is no event was accepted")
	}
}

// The largest window counts, also for one who came too late to be told of the pools,
// and an engine that is started again may have others, and blocks of another length.
func TestWindowsAndBlocksOfALife(t *testing.T) {
	id := 5
	event := func(window int, data string) []byte {
		id++
		return fmt.Appendf(nil, `{"event_id":%d,"window_size":%d,"data":%s}`, id-1, window, data)
	}
	store := func(window, hash int, tokens ...int) []byte {
		var list []string
		for _, token := range tokens {
			list = append(list, fmt.Sprintf(`{"token_id":%d}`, token))
		}
		return event(window, fmt.Sprintf(`{"type":"stored","blocks":[{"block_hash":%d,"tokens":[%s]}]}`, hash, strings.Join(list, ",")))
	}
	table, d := blocktable.New(blocktable.Options{}), newDecoder()
	apply := func(payload []byte) {
		t.Helper()
		b, err := d.Decode(payload)
		if err != nil || b.Damaged > 0 {
			t.Fatal(err, b)
		}
		for i := range b.Events {
			table.Apply(&b.Events[i])
		}
	}
	match := func(when string, want int, tokens ...uint32) {
		t.Helper()
		if got := table.Match(append(tokens, 0), "", ""); got != want {
			t.Errorf("%s: %d tokens match, want %d", when, got, want)
		}
	}
	apply(store(64, 1, 10, 11, 12, 13))
	match("a window alone", 4, 10, 11, 12, 13)
	apply(store(1024, 2, 20, 21, 22, 23))
	match("a larger one came", 0, 10, 11, 12, 13)
	match("a larger one came", 4, 20, 21, 22, 23)
	apply(store(64, 3, 30, 31, 32, 33))
	match("the small one again", 0, 30, 31, 32, 33)

	table.Clear()
	id = 0
	apply(event(128, `{"type":"created","num_blocks_per_cache_level":[100,0]}`))
	apply(event(512, `{"type":"created","num_blocks_per_cache_level":[100,0]}`))
	apply(store(128, 4, 40, 41))
	apply(store(512, 5, 50, 51))
	match("the next life's small window", 0, 40, 41)
	match("the next life's large window", 2, 50, 51)
	apply(store(512, 6, 60, 61, 62))
	apply(store(512, 7, 70))
	match("a block that is not whole", 0, 70)

	d.SetBlockTokens(4)
	apply(store(512, 8, 80, 81, 82))
	match("a block shorter than is told", 0, 80, 81, 82)
}

// Events that wait for a reader are bounded.
func TestWaitingIsBounded(t *testing.T) {
	w := waiting{byRank: map[int][]kvevents.Message{}}
	for i := range 3 * maxWaiting {
		w.put(i%7, kvevents.Message{Payload: []byte("x")})
	}
	if w.n != maxWaiting || w.bytes != maxWaiting {
		t.Errorf("%d events of %d bytes wait", w.n, w.bytes)
	}
	for rank := range 7 {
		w.take(rank)
	}
	if w.n != 0 || w.bytes != 0 || len(w.byRank) != 0 {
		t.Errorf("%+v", w)
	}
}

func FuzzDecode(f *testing.F) {
	var raw []json.RawMessage
	if err := json.Unmarshal([]byte(read(f, "events.json")), &raw); err != nil {
		f.Fatal(err)
	}
	for _, r := range raw {
		f.Add([]byte(r))
	}
	for _, event := range []string{ // of forms that the recording has not
		`{"event_id":1,"attention_dp_rank":1,"data":{"type":"stored","parent_hash":-5,"blocks":[{"block_hash":"0011223344556677","tokens":[{"token_id":1,"token_extra_id":3}],"cache_level":2,"mm_keys":[{"hash":"x"}]},{"block_hash":9,"tokens":[]}]}}`,
		`{"event_id":2,"window_size":64,"data":{"type":"stored","blocks":[{"block_hash":"ab","tokens":[]}]}}`,
		`{"event_id":3,"data":{"type":"stored","blocks":[{"block_hash":3,"tokens":[{"token_id":-1}]}]}}`,
		`{"event_id":4,"data":{"type":"updated","block_hash":5,"cache_level":{"old_value":0,"new_value":1}}}`,
		`{"event_id":5,"data":{"type":"updated"}}`,
		`{"event_id":6,"data":{"type":"another"}}`,
		`{"event_id":7,"data":{"type":5}}`,
		`{"event_id":8,"attention_dp_rank":-1}`,
		`{}`,
	} {
		f.Add([]byte(event))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		_, rank, err := head(payload)
		if err == nil && (rank < 0 || rank >= engine.MaxRanks) {
			t.Fatalf("rank %d", rank)
		}
		b, err := newDecoder().Decode(payload)
		if err != nil {
			return
		}
		table := blocktable.New(blocktable.Options{MaxBlocks: 100})
		tokens := 0
		for i := range b.Events {
			e := &b.Events[i]
			tokens += len(e.Tokens)
			if len(e.Marks) > 0 && len(e.Marks) != len(e.Hashes) {
				t.Fatalf("%d marks for %d hashes", len(e.Marks), len(e.Hashes))
			}
			table.Apply(e)
		}
		if tokens+b.Damaged > len(payload) {
			t.Fatalf("%d tokens from %d bytes", tokens, len(payload))
		}
	})
}
