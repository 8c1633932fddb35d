package emulator

import (
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// sourceOf names an engine as the peer to pull from.
func sourceOf(t *testing.T, e *Engine, key string) object {
	t.Helper()
	host, port, err := net.SplitHostPort(e.SideChannel())
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return object{key: object{"kv_request_id": "x", "remote_host": host, "remote_port": n}}
}

func completion(prompt []int, params any) object {
	return object{"prompt": prompt, "max_tokens": 1, "ignore_eos": true, "kv_transfer_params": params}
}

// An engine reads what a named peer holds, and then it has it itself.
func TestPullFromAPeer(t *testing.T) {
	o := small()
	o.Transfer = &Transfer{}
	from, to := start(t, o), start(t, o)
	o.Transfer = &Transfer{Deaf: true}
	deaf := start(t, o)
	o.Transfer = nil
	plain := start(t, o)
	c := client(t)
	prompt := make([]int, 321) // ten blocks and a token
	for i := range prompt {
		prompt[i] = 300 + i
	}
	cached := func(e *Engine, params any) int {
		t.Helper()
		r := send(t, c, http.MethodPost, e.URL()+"/v1/completions", completion(prompt, params))
		if r.status != http.StatusOK {
			t.Fatalf("%d %s", r.status, r.body)
		}
		return int(cachedTokens(t, r.json(t)))
	}
	source := sourceOf(t, from, "remote_kv_source")
	if got := cached(to, source); got != 0 {
		t.Errorf("%d tokens of an empty peer", got)
	}
	send(t, c, http.MethodPost, to.URL()+"/reset_prefix_cache", nil)
	if got := cached(from, object{"remote_decoder": object{"kv_request_id": "x"}}); got != 0 {
		t.Fatalf("the source had %d", got)
	}
	if got := cached(deaf, source) + cached(plain, source); got != 0 {
		t.Errorf("engines without a working connector had %d", got)
	}
	for _, key := range []string{"remote_kv_source", "remote_prefiller"} {
		send(t, c, http.MethodPost, to.URL()+"/reset_prefix_cache", nil)
		before := to.PulledBlocks()
		if got := cached(to, sourceOf(t, from, key)); got != 320 || to.PulledBlocks()-before != 10 {
			t.Errorf("%s: %d tokens, %d blocks read", key, got, to.PulledBlocks()-before)
		}
		if got := cached(to, nil); got != 320 {
			t.Errorf("%s: %d tokens a moment later", key, got)
		}
	}
	// A peer that is gone costs nothing but the computing.
	from.Close()
	send(t, c, http.MethodPost, to.URL()+"/reset_prefix_cache", nil)
	if got := cached(to, source); got != 0 {
		t.Errorf("%d tokens of a peer that is gone", got)
	}
	for _, params := range []any{
		object{"remote_kv_source": object{"remote_host": "h", "remote_port": 1}},
		object{"remote_kv_source": object{"kv_request_id": "x", "remote_host": "h", "remote_port": 0}},
		object{"remote_prefiller": source["remote_kv_source"], "remote_decoder": object{"kv_request_id": "x"}},
	} {
		r := send(t, c, http.MethodPost, to.URL()+"/v1/completions", completion(prompt, params))
		if r.status != http.StatusBadRequest || !strings.Contains(r.body, "kv_transfer_params") {
			t.Errorf("%v: %d %s", params, r.status, r.body)
		}
	}
}

// What is read takes the time of its bytes, on the engine's clock.
func TestPullTakesItsTime(t *testing.T) {
	o := small()
	o.Speed = 1
	o.Transfer = &Transfer{BytesPerToken: 1e6, BytesPerSec: 320e6 / .2} // ten blocks: 200 ms
	from, to := start(t, o), start(t, o)
	c := client(t)
	prompt := make([]int, 321)
	send(t, c, http.MethodPost, from.URL()+"/v1/completions", completion(prompt, nil))
	began := time.Now()
	send(t, c, http.MethodPost, to.URL()+"/v1/completions", completion(prompt, sourceOf(t, from, "remote_kv_source")))
	if took := time.Since(began); took < 200*time.Millisecond || to.PulledBlocks() != 10 {
		t.Errorf("%v for %d blocks", took, to.PulledBlocks())
	}
}

// The connector is described as a real engine describes it, and its side
// channel is where it was in the next life.
func TestTransferIsDescribed(t *testing.T) {
	o := small()
	o.Transfer = &Transfer{Role: "kv_producer", BytesPerToken: 1000}
	e := start(t, o)
	c := client(t)
	for range 2 {
		info := send(t, c, http.MethodGet, e.URL()+"/server_info?config_format=json", nil).json(t)
		if got := at(t, info, "vllm_config", "kv_transfer_config", "kv_role"); got != "kv_producer" {
			t.Errorf("role %v", got)
		}
		if got := at(t, info, "vllm_config", "cache_config", "kv_cache_memory_bytes"); got != 1000.*100*32 {
			t.Errorf("KV memory %v", got)
		}
		port := at(t, info, "vllm_env", "VLLM_P2P_SIDE_CHANNEL_PORT").(float64)
		if want := sourceOf(t, e, "s")["s"].(object)["remote_port"].(int); int(port) != want {
			t.Errorf("port %v, want %d", port, want)
		}
		if err := e.Restart(0); err != nil {
			t.Fatal(err)
		}
	}
	for _, bad := range []Transfer{{Role: "x"}, {BytesPerSec: -1}, {Address: "x"}} {
		o.Transfer = &bad
		if _, err := Start(o); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}
