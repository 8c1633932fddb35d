package emulator

import (
	"bufio"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

func floatOf(bits uint64) float64 { return math.Float64frombits(bits) }

func hashesOf(b batch) []any {
	return b.events[len(b.events)-1].(map[string]any)["block_hashes"].([]any)
}

func TestRestart(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	complete(t, c, e, ids(1, 40), 1)
	first := sub.batch()
	url, events, replay := e.URL(), e.EventsEndpoint(), e.ReplayEndpoint()
	if err := e.Restart(0); err != nil {
		t.Fatal(err)
	}
	if e.URL() != url || e.EventsEndpoint() != events || e.ReplayEndpoint() != replay || e.Lives() != 2 {
		t.Errorf("after the restart: %s %s %s, life %d", e.URL(), e.EventsEndpoint(), e.ReplayEndpoint(), e.Lives())
	}
	if _, err := sub.r.ReadByte(); err == nil {
		t.Error("the old connection lives on")
	}
	c.CloseIdleConnections()
	sub = subscribe(t, e, 0)
	if n := cachedTokens(t, complete(t, c, e, ids(1, 40), 1)); n != 0 {
		t.Errorf("%v tokens cached in the new life", n)
	}
	second := sub.batch()
	if second.seq != 0 || first.seq != 0 || !slices.Equal(hashesOf(first), hashesOf(second)) || !slices.Equal(second.kinds, []string{"BlockStored"}) {
		t.Errorf("first batch of the new life %+v: want sequence 0, no clear, and the hashes of before", second)
	}
	if got := replayed(t, e, 0, 0); len(got) != 1 {
		t.Errorf("%d batches replayed: want those of the new life", len(got))
	}
}

func TestRestartKillsRequests(t *testing.T) {
	o := small()
	o.Speed = .001 // a request would take minutes
	e, c := start(t, o), client(t)
	result := make(chan reply, 1)
	go func() {
		r, _ := try(c, "POST", e.URL()+"/v1/completions", object{"prompt": ids(1, 40), "max_tokens": 100, "ignore_eos": true})
		result <- r
	}()
	eventually(t, "the request runs", func() bool { return openAnswers(e) == 1 })
	if err := e.Restart(time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if r := <-result; r.status == 200 {
		t.Errorf("status %d, %s", r.status, r.body)
	}
}

// openAnswers counts the requests rank 0 knows of.
func openAnswers(e *Engine) int {
	r, err := e.rank(0)
	if err != nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.open
}

func TestKillAPI(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	complete(t, c, e, ids(1, 40), 1)
	sub.batch()
	e.KillAPI()
	if _, err := try(c, "GET", e.URL()+"/health", nil); err == nil {
		t.Error("HTTP still answers")
	}
	if got := replayed(t, e, 0, 0); len(got) != 1 {
		t.Errorf("%d batches replayed: want the old view", len(got))
	}
	if e.Subscribers(0) != 1 {
		t.Error("the subscriber was cut off")
	}
	if err := e.Restart(0); err != nil {
		t.Fatal(err)
	}
	if r := send(t, c, "GET", e.URL()+"/health", nil); r.status != 200 {
		t.Errorf("status %d after the restart", r.status)
	}
}

func TestKilledAPILeavesTheEngineAtWork(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	e.Stall()
	go func() {
		_, _ = try(c, "POST", e.URL()+"/v1/completions", object{"prompt": ids(1, 40), "max_tokens": 100, "ignore_eos": true})
	}()
	eventually(t, "the request has arrived", func() bool { return openAnswers(e) == 1 })
	e.KillAPI()
	e.Resume()
	blocks := 0
	for blocks < 4 { // (40+100-1)/32
		blocks += len(hashesOf(sub.batch()))
	}
}

func TestKillAndComeBack(t *testing.T) {
	e, c := start(t, small()), client(t)
	e.Kill()
	for _, err := range []error{e.DropBatches(0, 1, DropLive), e.ClaimBlockTokens(3), func() error { _, err := e.EvictSilently(0, 1); return err }()} {
		if err != ErrDown {
			t.Errorf("error %v: want ErrDown", err)
		}
	}
	e.Stall()
	e.DropConnections()
	e.KillAPI()
	if e.ClearCache() || e.Status(0).UsableBlocks != 0 {
		t.Error("a dead engine clears its cache")
	}
	if err := e.Restart(0); err != nil {
		t.Fatal(err)
	}
	complete(t, c, e, ids(1, 40), 1)
}

func TestClearCache(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	complete(t, c, e, ids(1, 40), 1)
	sub.batch()
	if !e.ClearCache() {
		t.Fatal("an idle engine cannot clear its cache")
	}
	if n := cachedTokens(t, complete(t, c, e, ids(1, 40), 1)); n != 0 {
		t.Errorf("%v tokens cached", n)
	}
	if b := sub.batch(); !slices.Equal(b.kinds, []string{"AllBlocksCleared", "BlockStored"}) {
		t.Errorf("events %v: want the clear with the next step", b.kinds)
	}
}

func TestDropBatches(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	next := 0
	prompt := func() { next += 1000; complete(t, c, e, ids(next, 40), 1) }
	var live, again []uint64
	heard := func() { live = append(live, sub.batch().seq) } // a batch may follow the answer
	prompt()                                                 // 0
	heard()
	if err := e.DropBatches(0, 2, DropLive); err != nil {
		t.Fatal(err)
	}
	prompt() // 1, lost on the way
	prompt() // 2, lost on the way
	prompt() // 3
	heard()
	if err := e.DropBatches(0, 1, DropForever); err != nil {
		t.Fatal(err)
	}
	prompt() // 4, lost for ever
	prompt() // 5
	heard()
	for _, b := range replayed(t, e, 0, 0) {
		again = append(again, b.seq)
	}
	if !slices.Equal(live, []uint64{0, 3, 5}) || !slices.Equal(again, []uint64{0, 1, 2, 3, 5}) {
		t.Errorf("live %v and replayed %v: want [0 3 5] and [0 1 2 3 5]", live, again)
	}
}

func TestStall(t *testing.T) {
	e, c := start(t, small()), client(t)
	complete(t, c, e, ids(1, 40), 1)
	e.Stall()
	done := make(chan object, 1)
	go func() {
		r, _ := try(c, "POST", e.URL()+"/v1/completions", object{"prompt": ids(1, 40), "max_tokens": 1})
		done <- r.json(t)
	}()
	eventually(t, "the request has arrived", func() bool { return openAnswers(e) == 1 })
	if r := send(t, c, "GET", e.URL()+"/health", nil); r.status != 200 {
		t.Errorf("health %d: a stalled engine looks healthy", r.status)
	}
	if n, err := e.EvictSilently(0, 100); n != 1 || err != nil { // faults work on a stalled engine
		t.Errorf("evicted %d, %v", n, err)
	}
	select {
	case v := <-done:
		t.Fatalf("a stalled engine answered %v", v)
	default:
	}
	e.Resume()
	if n := cachedTokens(t, <-done); n != 0 {
		t.Errorf("%v tokens cached, want 0", n)
	}
}

func TestSlow(t *testing.T) {
	clock := newStepClock()
	o := small()
	o.Clock, o.Speed = clock, 1
	o.StepTime.P0, o.StepTime.D0 = 10, 10 // ms
	e, c := start(t, o), client(t)
	took := func() time.Duration {
		before := clock.slept()
		complete(t, c, e, ids(1, 2), 11)
		return (clock.slept() - before).Round(time.Millisecond)
	}
	if got := took(); got != 110*time.Millisecond {
		t.Errorf("11 steps took %v", got)
	}
	if err := e.Slow(4); err != nil {
		t.Fatal(err)
	}
	if got := took(); got != 440*time.Millisecond {
		t.Errorf("11 slow steps took %v", got)
	}
	for _, bad := range []float64{0, -1, math.NaN(), math.Inf(1)} {
		if e.Slow(bad) == nil {
			t.Errorf("factor %v is accepted", bad)
		}
	}
}

func TestDropConnections(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	complete(t, c, e, ids(1, 40), 1)
	sub.batch()
	e.DropConnections()
	if _, err := sub.r.ReadByte(); err == nil {
		t.Error("the subscription lives on")
	}
	sub = subscribe(t, e, 0)
	if n := cachedTokens(t, complete(t, c, e, ids(1, 70), 1)); n != 32 {
		t.Errorf("%v tokens cached: want the cache untouched", n)
	}
	if b := sub.batch(); b.seq != 1 {
		t.Errorf("sequence %d: want the same life", b.seq)
	}
}

func TestClaimedBlockSize(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	if err := e.ClaimBlockTokens(16); err != nil {
		t.Fatal(err)
	}
	complete(t, c, e, ids(1, 70), 1)
	event := sub.batch().events[0].(map[string]any)
	if event["block_size"] != int64(16) && event["block_size"] != uint64(16) || len(event["token_ids"].([]any)) != 64 || len(hashesOf(batch{events: []any{event}})) != 2 {
		t.Errorf("event %v", event)
	}
	if page := send(t, c, "GET", e.URL()+"/metrics", nil).body; !strings.Contains(page, `block_size="16"`) {
		t.Error("the metrics state the true block size")
	}
}

func TestEvictSilently(t *testing.T) {
	e, c := start(t, small()), client(t)
	sub := subscribe(t, e, 0)
	complete(t, c, e, ids(1, 140), 1)
	sub.batch()
	if n, err := e.EvictSilently(0, 3); n != 3 || err != nil {
		t.Fatalf("evicted %d, %v", n, err)
	}
	if n := cachedTokens(t, complete(t, c, e, ids(1, 140), 1)); n != 32 {
		t.Errorf("%v tokens cached: want the head alone", n)
	}
	if b := sub.batch(); !slices.Equal(b.kinds, []string{"BlockStored"}) {
		t.Errorf("events %v: want no removal", b.kinds)
	}
}

func TestClientThatLeavesAborts(t *testing.T) {
	o := small()
	o.Speed = 10
	e, c := start(t, o), client(t)
	resp, err := c.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(`{"prompt":[1,2,3],"max_tokens":2000,"ignore_eos":true,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	eventually(t, "the request is gone", func() bool { return openAnswers(e) == 0 && e.Status(0).Running == 0 && e.Status(0).UsedBlocks == 0 })
	if n := e.Status(0).Counters.GeneratedTokens; n >= 2000 {
		t.Errorf("%d tokens generated for nobody", n)
	}
}

func TestFaultsOverHTTP(t *testing.T) {
	o := small()
	o.AdminPath = true
	e, c := start(t, o), client(t)
	fault := func(body object) reply { t.Helper(); return send(t, c, "POST", e.URL()+"/emulator/fault", body) }
	complete(t, c, e, ids(1, 140), 1)
	if got := fault(object{"fault": "evict-silently", "count": 2}).json(t); at(t, got, "evicted") != 2. {
		t.Errorf("evicted %v", got)
	}
	if got := fault(object{"fault": "clear"}).json(t); at(t, got, "cleared") != true {
		t.Errorf("cleared %v", got)
	}
	for _, body := range []object{
		{"fault": "stall"},
		{"fault": "resume"},
		{"fault": "slow", "factor": 2},
		{"fault": "block-tokens", "count": 16},
		{"fault": "gauge-lag", "lagMs": 100},
		{"fault": "drop-batches", "count": 1, "replay": true},
	} {
		if r := fault(body); r.status != 200 {
			t.Errorf("%v: status %d, %s", body, r.status, r.body)
		}
	}
	for _, body := range []object{
		{"fault": "melt"}, {"fault": "slow"}, {"fault": "drop-batches", "rank": 3}, {"fault": "gauge-lag", "lagMs": -1}, {"fault": "restart", "downMs": -1}, {"fault": 7},
	} {
		if r := fault(body); r.status != 400 {
			t.Errorf("%v: status %d, %s; want 400", body, r.status, r.body)
		}
	}
	if r := fault(object{"fault": "restart"}); r.status != 200 {
		t.Errorf("restart: status %d", r.status)
	}
	eventually(t, "the next life", func() bool { return e.Lives() == 2 })
	// The client may hold a connection of the former life, and the answer may die
	// with the server.
	c.CloseIdleConnections()
	_, _ = try(c, "POST", e.URL()+"/emulator/fault", object{"fault": "kill-api"})
	eventually(t, "no HTTP", func() bool { _, err := try(c, "GET", e.URL()+"/health", nil); return err != nil })
}

func TestOptionErrors(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"Ranks":            func(o *Options) { o.Ranks = 65 },
		"Speed":            func(o *Options) { o.Speed = -1 },
		"GaugeLag":         func(o *Options) { o.GaugeLag = -1 },
		"MaxModelTokens":   func(o *Options) { o.MaxModelTokens = 1 << 20 },
		"VocabularyTokens": func(o *Options) { o.VocabularyTokens = 10 },
		"Address":          func(o *Options) { o.Address = "nowhere" },
		"EventsDial":       func(o *Options) { o.EventsDial = "host:99999" },
		"is empty or":      func(o *Options) { o.Adapters = []Adapter{{Name: "tiny"}} },
		"BufferBatches":    func(o *Options) { o.BufferBatches = -1 },
		"listen for HTTP":  func(o *Options) { o.Address = "192.0.2.1:1" },
		"none above 65535": func(o *Options) { o.Ranks, o.EventsAddress = 2, "127.0.0.1:65535" },
	} {
		o := small()
		change(&o)
		e, err := Start(o)
		if err == nil {
			e.Close()
		}
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestCloseIsRepeatable(t *testing.T) {
	e, err := Start(small())
	if err != nil {
		t.Fatal(err)
	}
	e.Close()
	e.Close()
	if e.Restart(0) != ErrDown {
		t.Error("a closed engine restarts")
	}
	if _, err := http.Get(e.URL() + "/health"); err == nil {
		t.Error("a closed engine answers")
	}
}
