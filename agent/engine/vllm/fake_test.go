package vllm

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"waypost/agent/engine/enginetest"
)

// fakeEngine is an engine on real sockets: HTTP, an event publisher and a
// replay socket per rank. Its life can end and begin anew on the same ports.
type fakeEngine struct {
	*enginetest.Server
	mu    sync.Mutex
	start float64 // process_start_time_seconds
	model string
	ranks []*enginetest.Publisher
	// hold answers /metrics, "" normally.
	metrics func(w http.ResponseWriter)
	asleep  bool
	extra   map[string]string // path -> answer
	// routes answers paths besides.
	routes map[string]http.HandlerFunc
}

func newFakeEngine(t testing.TB, ranks int) *fakeEngine {
	f := &fakeEngine{start: 1000, model: "tiny", extra: map[string]string{}}
	for range ranks {
		r := enginetest.NewPublisher(t)
		t.Cleanup(r.Close)
		f.ranks = append(f.ranks, r)
	}
	f.Server = enginetest.NewServer(t, f.handle)
	return f
}

func (f *fakeEngine) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeEngine) handle(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	extra, hasExtra := f.extra[r.URL.Path]
	metrics, asleep, start, model, ranks := f.metrics, f.asleep, f.start, f.model, f.ranks
	f.mu.Unlock()
	own := f.routes[r.URL.Path]
	switch {
	case own != nil:
		own(w, r)
	case hasExtra:
		io.WriteString(w, extra)
	case r.URL.Path == "/metrics" && metrics != nil:
		metrics(w)
	case r.URL.Path == "/metrics":
		fmt.Fprintf(w, "process_start_time_seconds %v\n", start)
		for i := range ranks {
			fmt.Fprintf(w, "vllm:num_requests_running{engine=\"%d\"} %d.0\nvllm:num_requests_waiting{engine=\"%d\"} 0.0\n", i, i, i)
			fmt.Fprintf(w, "vllm:engine_sleep_state{engine=\"%d\",sleep_state=\"weights_offloaded\"} %v\n", i, map[bool]int{true: 1}[asleep])
			fmt.Fprintf(w, "vllm:cache_config_info{block_size=\"2\",engine=\"%d\",num_gpu_blocks=\"101\",num_gpu_blocks_override=\"101\"} 1.0\n", i)
		}
	case r.URL.Path == "/v1/models":
		fmt.Fprintf(w, `{"data":[{"id":%q,"parent":null,"max_model_len":2048},{"id":"sql","parent":%q,"max_model_len":null}]}`, model, model)
	case r.URL.Path == "/version":
		io.WriteString(w, `{"version":"0.32.0"}`)
	case r.URL.Path == "/health":
	case r.URL.Path == "/kv_event_sources":
		var parts []string
		for i, rank := range ranks {
			parts = append(parts, fmt.Sprintf(`"%d":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}`, i, rank.Port(), rank.ReplayPort()))
		}
		fmt.Fprintf(w, "{%s}", strings.Join(parts, ","))
	default:
		http.NotFound(w, r)
	}
}

// restart is another process on the same ports: nothing is remembered, the
// numbers begin again and connections are cut.
func (f *fakeEngine) restart() {
	f.set(func() { f.start += 100 })
	for _, r := range f.ranks {
		r.Restart()
	}
}
