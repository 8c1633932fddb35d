package emulator

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"waypost/testbed/emulator/internal/recording"
)

// sameButTime compares payloads without their time stamp, which is a float at
// byte 2.
func sameButTime(a, b []byte) bool {
	const from, to = 2, 10
	return len(a) == len(b) && len(a) > to && bytes.Equal(a[:from], b[:from]) && bytes.Equal(a[to:], b[to:])
}

// TestRecordedOverTheWire sends a recording's requests over HTTP: what comes
// over ZeroMQ are the bytes the real engine sent, and the answers report the
// same cached tokens. The recording generates one token per request, which is
// never cached, so that its contents do not matter.
func TestRecordedOverTheWire(t *testing.T) {
	s, err := recording.Load(recording.Sample(), "dup-one")
	if err != nil {
		t.Fatal(err)
	}
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	send(t, c, "POST", e.URL()+"/reset_prefix_cache", nil) // as the recording's driver did
	for _, r := range s.Requests {
		if r.MaxTokens != 1 {
			t.Fatalf("request %d generates %d tokens", r.N, r.MaxTokens)
		}
		if got := cachedTokens(t, complete(t, c, e, r.Prompt, 1)); got != float64(r.Cached) {
			t.Errorf("request %d: %v tokens cached, the engine had %d", r.N, got, r.Cached)
		}
	}
	for i, want := range s.Batches {
		got := sub.batch()
		if got.seq != uint64(i) || got.topic != want.Topic || !sameButTime(got.payload, want.Payload) {
			t.Fatalf("batch %d (topic %s, seq %d):\n%x, the engine's\n%x", i, got.topic, got.seq, got.payload, want.Payload)
		}
	}
}

func TestReplay(t *testing.T) {
	o := small()
	o.BufferBatches = 3
	e, c := start(t, o), client(t)
	sub := subscribe(t, e, 0)
	var live []batch
	for i := range 5 {
		complete(t, c, e, ids(1000*i, 40), 1)
		live = append(live, sub.batch())
	}
	for _, test := range []struct {
		from uint64
		want []uint64
	}{{0, []uint64{2, 3, 4}}, {3, []uint64{3, 4}}, {4, []uint64{4}}, {5, nil}, {1 << 60, nil}} {
		var got []uint64
		for _, b := range replayed(t, e, 0, test.from) {
			got = append(got, b.seq)
			if !bytes.Equal(b.payload, live[b.seq].payload) || b.topic != "kv@test" {
				t.Errorf("batch %d: the replayed payload differs from the live one", b.seq)
			}
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("replay from %d: %v, want %v", test.from, got, test.want)
		}
	}
}

// The frames are those of the recorded replay: (empty, topic, sequence,
// payload), before 0.26 without the topic.
func TestReplayForms(t *testing.T) {
	for _, without := range []bool{false, true} {
		o := small()
		o.ReplayWithoutTopic = without
		e, c := start(t, o), client(t)
		complete(t, c, e, ids(1, 40), 1)
		z := dialZMQ(t, e.ReplayEndpoint(), "DEALER")
		z.write([]byte{0, 1, 7})             // no empty frame: never answered
		z.write([]byte{1, 0, 1, 0, 0, 1, 7}) // three frames: never answered
		z.write([]byte{1, 0, 0, 1, 0})       // one byte is a number too
		data, end := z.message(), z.message()
		want := [][]byte{{}, []byte("kv@test"), make([]byte, 8), data[len(data)-1]}
		wantEnd := [][]byte{{}, {}, bytes.Repeat([]byte{0xff}, 8), {}}
		if without {
			want, wantEnd = slices.Delete(want, 1, 2), slices.Delete(wantEnd, 1, 2)
		}
		if d := cmp.Diff([][][]byte{want, wantEnd}, [][][]byte{data, end}); d != "" {
			t.Errorf("without topic %t: frames (-want +got):\n%s", without, d)
		}
	}
}

func TestEventForms(t *testing.T) {
	o := small()
	o.ArrayEvents, o.DigestHashes, o.BlockTokens, o.PoolBlocks, o.Adapters = true, true, 16, 200, []Adapter{{Name: "a"}}
	e, c := start(t, o), client(t)
	sub := subscribe(t, e, 0)
	send(t, c, "POST", e.URL()+"/v1/completions", object{"model": "a", "prompt": ids(1, 20), "max_tokens": 1, "cache_salt": "s"})
	event := sub.batch().events[0].([]any)
	hashes := event[1].([]any)
	if len(event) != 12 || len(hashes) != 1 || len(hashes[0].([]byte)) != 32 || event[5] != int64(1) || event[7] != "a" {
		t.Errorf("event %v", event)
	}
	if d := cmp.Diff([]any{[]any{"a", "s"}}, event[8]); d != "" {
		t.Errorf("extra keys (-want +got):\n%s", d)
	}
}

// Two ranks behind one port: own caches, own numbering, ports + 1, the same
// hashes.
func TestRanks(t *testing.T) {
	o := small()
	o.Ranks = 2
	e, c := start(t, o), client(t)
	subs := []*zmq{subscribe(t, e, 0), subscribe(t, e, 1)}
	const header = "X-data-parallel-rank"
	for i, test := range []struct {
		rank   string
		cached float64
	}{{"0", 0}, {"1", 0}, {"0", 32}, {"1", 32}, {"x", 32}, {"", 32}} {
		var h []string
		if test.rank != "" {
			h = []string{header, test.rank}
		}
		if got := cachedTokens(t, complete(t, c, e, ids(1, 40), 1, h...)); got != test.cached {
			t.Errorf("request %d: %v tokens cached, want %v", i, got, test.cached)
		}
	}
	r := send(t, c, "POST", e.URL()+"/v1/completions", object{"prompt": ids(1, 40), "max_tokens": 1}, header, "7")
	if r.status != 400 || at(t, r.json(t), "error", "message") != "data_parallel_rank 7 is out of range [0, 2)." {
		t.Errorf("status %d, %s", r.status, r.body)
	}
	a, b := subs[0].batch(), subs[1].batch()
	if a.seq != 0 || b.seq != 0 || a.rank != int64(0) || b.rank != int64(1) {
		t.Errorf("sequences %d and %d, ranks %v and %v", a.seq, b.seq, a.rank, b.rank)
	}
	if d := cmp.Diff(a.events, b.events); d != "" {
		t.Errorf("the ranks' events differ:\n%s", d)
	}
	if got := replayed(t, e, 1, 0); len(got) != 1 || !bytes.Equal(got[0].payload, b.payload) {
		t.Errorf("replay of rank 1: %v", got)
	}
	sources := send(t, c, "GET", e.URL()+"/kv_event_sources", nil).json(t)
	_, port, _ := splitAddress(e.ports.events[0])
	if got, want := at(t, sources, "1", "endpoint"), fmt.Sprintf("tcp://*:%d", port+1); got != want {
		t.Errorf("endpoint of rank 1 %v, want %v", got, want)
	}
}

// Requests that name no rank go where the least waits.
func TestRequestsSpreadOverRanks(t *testing.T) {
	o := small()
	o.Ranks = 2
	e, c := start(t, o), client(t)
	e.Stall()
	done := make(chan error, 8)
	for i := range cap(done) {
		go func() {
			_, err := try(c, "POST", e.URL()+"/v1/completions", object{"prompt": ids(i*100, 10), "max_tokens": 1})
			done <- err
		}()
	}
	queued := func(i int) int {
		r, _ := e.rank(i)
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.calls)
	}
	eventually(t, "all have arrived", func() bool { return queued(0)+queued(1) == cap(done) })
	// Two requests may choose at the same moment, so the halves need not be exact.
	if a := queued(0); a < 2 || a > 6 {
		t.Errorf("%d of %d requests on rank 0", a, cap(done))
	}
	e.Resume()
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// An engine whose endpoint has no "*" connects to its subscriber.
func TestEventsByDialing(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	o := small()
	o.EventsDial = ln.Addr().String()
	e, c := start(t, o), client(t)
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	z := shake(t, conn, "SUB")
	z.write([]byte{0, 1, 1})
	eventually(t, "subscribed", func() bool { return e.Subscribers(0) == 1 })
	complete(t, c, e, ids(1, 40), 1)
	if got := z.batch(); got.seq != 0 || !slices.Equal(got.kinds, []string{"BlockStored"}) {
		t.Errorf("batch %+v", got)
	}
	sources := send(t, c, "GET", e.URL()+"/kv_event_sources", nil).json(t)
	if got := at(t, sources, "0", "endpoint"); got != "tcp://"+o.EventsDial || e.EventsEndpoint() != "" {
		t.Errorf("endpoint %v", got)
	}
}

func TestSessionsAndReportMode(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	url := e.URL() + "/v1/completions"
	session := func(b batch) any { return b.events[0].(map[string]any)["session_id"] }
	send(t, c, "POST", url, object{"prompt": ids(1, 40), "max_tokens": 1, "session_id": "s1"})
	if got := session(sub.batch()); got != "s1" {
		t.Errorf("session %v, want that of the body", got)
	}
	send(t, c, "POST", url, object{"prompt": ids(500, 40), "max_tokens": 1}, "X-Session-ID", "s2")
	if got := session(sub.batch()); got != "s2" {
		t.Errorf("session %v, want that of the header", got)
	}
	send(t, c, "POST", url, object{"prompt": ids(1, 40), "max_tokens": 1, "session_id": "s3", "vllm_xargs": object{"kv_cache_report_mode": "full"}})
	if b := sub.batch(); session(b) != "s3" || !slices.Equal(b.kinds, []string{"BlockStored"}) || e.Status(0).CachedBlocks != 2 {
		t.Errorf("batch %+v, %d blocks: want the hit announced again without a copy", b, e.Status(0).CachedBlocks)
	}
}

func TestSleepAndPause(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	complete(t, c, e, ids(1, 40), 1)
	sub.batch()
	post := func(path string) { t.Helper(); send(t, c, "POST", e.URL()+path, nil) }
	for _, pair := range [][2]string{{"/sleep?level=1", "/wake_up"}, {"/pause", "/resume"}} {
		post(pair[0])
		done := make(chan reply, 1)
		go func() {
			r, _ := try(c, "POST", e.URL()+"/v1/completions", object{"prompt": ids(1, 40), "max_tokens": 1})
			done <- r
		}()
		r, _ := e.rank(0)
		eventually(t, "the request waits", func() bool {
			waiting := make(chan int, 1)
			r.post(func() { waiting <- r.core.Status().Waiting })
			return <-waiting == 1
		})
		post(pair[1])
		got := <-done
		if n := cachedTokens(t, got.json(t)); n != 0 {
			t.Errorf("%s: %v tokens cached afterwards, want 0", pair[0], n)
		}
		if b := sub.batch(); !slices.Equal(b.kinds, []string{"AllBlocksCleared", "BlockStored"}) {
			t.Errorf("%s: events %v", pair[0], b.kinds)
		}
	}
}

func TestServerInfo(t *testing.T) {
	e, c := start(t, small()), client(t)
	v := at(t, send(t, c, "GET", e.URL()+"/server_info?config_format=json", nil).json(t), "vllm_config")
	if at(t, v, "scheduler_config", "max_num_seqs") != 16. || at(t, v, "scheduler_config", "max_num_batched_tokens") != 2048. || at(t, v, "model_config", "max_model_len") != 2048. {
		t.Errorf("server info %v", v)
	}
	before := at(t, v, "instance_id")
	if err := e.Restart(0); err != nil {
		t.Fatal(err)
	}
	after := at(t, send(t, c, "GET", e.URL()+"/server_info", nil).json(t), "vllm_config", "instance_id")
	if before == after || before == "" {
		t.Errorf("instance %v before and %v after a restart", before, after)
	}
}

func TestEventTimesAreWallClock(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	before := e.opts.Clock.Now()
	complete(t, c, e, ids(1, 40), 1)
	b := sub.batch()
	ts := binary.BigEndian.Uint64(b.payload[2:10])
	var seconds float64
	if err := json.Unmarshal([]byte(fmt.Sprint(floatOf(ts))), &seconds); err != nil {
		t.Fatal(err)
	}
	if d := seconds - float64(before.UnixNano())/1e9; d < -1 || d > patience.Seconds() {
		t.Errorf("time stamp %v s after the request", d)
	}
}
