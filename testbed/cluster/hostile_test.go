package cluster

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"waypost/agent"
	"waypost/testbed/emulator"
)

// hostile is an engine that answers HTTP as vLLM does and whose sockets of
// events and replay speak ZMTP up to the point where they do harm.
type hostile struct {
	http           *httptest.Server
	events, replay net.Listener
	// connections counts those that got as far as the harm.
	connections atomic.Int64
}

func startHostile(t *testing.T, harm func(conn net.Conn, n int64)) *hostile {
	t.Helper()
	h := &hostile{http: httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/metrics":
			io.WriteString(w, "process_start_time_seconds 1000\nvllm:num_requests_running{engine=\"0\"} 0.0\nvllm:num_requests_waiting{engine=\"0\"} 0.0\n"+
				"vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"1000\"} 1.0\n")
		case "/v1/models":
			io.WriteString(w, `{"data":[{"id":"Llama-3.1-8B","parent":null,"max_model_len":8192}]}`)
		case "/version":
			io.WriteString(w, `{"version":"0.32.0"}`)
		case "/health":
		default:
			http.NotFound(w, r)
		}
	}))}
	t.Cleanup(h.http.Close)
	listen := func(socketType string) net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		t.Cleanup(func() { l.Close(); <-done })
		go func() {
			defer close(done)
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				// One at a time: an agent has one connection to each.
				if conn.SetDeadline(time.Now().Add(20*time.Second)) == nil && shake(conn, socketType) == nil {
					harm(conn, h.connections.Add(1))
				}
				conn.Close()
			}
		}()
		return l
	}
	h.events, h.replay = listen("XPUB"), listen("ROUTER")
	return h
}

// shake is the server's side of a ZMTP 3.0 NULL handshake.
func shake(conn net.Conn, socketType string) error {
	greeting := make([]byte, 64)
	copy(greeting, "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL")
	if _, err := conn.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(conn, greeting); err != nil {
		return err
	}
	ready := append([]byte("\x05READY\x0bSocket-Type"), 0, 0, 0, byte(len(socketType)))
	ready = append(ready, socketType...)
	if _, err := conn.Write(append([]byte{4, byte(len(ready))}, ready...)); err != nil {
		return err
	}
	_, err := conn.Read(make([]byte, 512)) // the agent's READY, and its subscription perhaps
	return err
}

// frame is one ZMTP frame of a message.
func frame(more bool, body []byte) []byte {
	flags := byte(2)
	if more {
		flags |= 1
	}
	return append(binary.BigEndian.AppendUint64([]byte{flags}, uint64(len(body))), body...)
}

// event is an event message with a payload.
func event(seq uint64, payload []byte) []byte {
	out := frame(true, nil)
	out = append(out, frame(true, binary.BigEndian.AppendUint64(nil, seq))...)
	return append(out, frame(false, payload)...)
}

// bombs are payloads that ask for far more than they hold.
func bombs() map[string][]byte {
	huge := func(kind byte, n uint32) []byte { return binary.BigEndian.AppendUint32([]byte{kind}, n) }
	batch := func(events ...byte) []byte { // [ts, events]
		return append([]byte{0x92, 0xcb, 0x41, 0xd9, 0, 0, 0, 0, 0, 0}, events...)
	}
	return map[string][]byte{
		"arrays in arrays":           bytes.Repeat([]byte{0x91}, 2<<20),
		"maps in maps":               bytes.Repeat([]byte{0x81, 0xa1, 'x'}, 1<<20),
		"an array of 2^32-1":         huge(0xdd, math.MaxUint32),
		"a map of 2^32-1":            huge(0xdf, math.MaxUint32),
		"a text of 2^32-1":           huge(0xdb, math.MaxUint32),
		"bytes of 2^32-1":            huge(0xc6, math.MaxUint32),
		"an extension of 2^32-1":     append(huge(0xc9, math.MaxUint32), 1),
		"2^32-1 events":              batch(huge(0xdd, math.MaxUint32)...),
		"2^32-1 hashes":              batch(append([]byte{0x91, 0x96, 0xab, 'B', 'l', 'o', 'c', 'k', 'S', 't', 'o', 'r', 'e', 'd'}, huge(0xdd, math.MaxUint32)...)...),
		"an event of nested arrays":  batch(append([]byte{0x91}, bytes.Repeat([]byte{0x91}, 2<<20)...)...),
		"blocks of 2^32-1 tokens":    batch([]byte("\x91\x96\xabBlockStored\x91\x01\xc0\xdd\xff\xff\xff\xff\x01\x02")...),
		"a block size of 2^63":       batch([]byte("\x91\x96\xabBlockStored\x91\x01\xc0\x92\x01\x02\xcf\x80\x00\x00\x00\x00\x00\x00\x00\xc0")...),
		"nothing":                    nil,
		"a million events that lack": batch(append(huge(0xdd, 1<<20), bytes.Repeat([]byte{0x90}, 1<<20)...)...),
	}
}

// beside runs a hostile engine in the place of the second one and checks that
// the first one's worker, placements and memory do not notice.
func beside(t *testing.T, harm func(conn net.Conn, n int64), harms int64) {
	t.Helper()
	r := start(t, 2, 1, emulator.Options{BlockTokens: 16})
	a, w := ask{tokens: tokens(4, 1000), exclude: []string{WorkerName(1, 0)}}, WorkerName(0, 0)
	r.serve(0, a)
	r.settled(w, a, 1000, 16)
	if err := r.StopAgent(1); err != nil {
		t.Fatal(err)
	}
	before := heap()
	h := startHostile(t, harm)
	cfg := r.AgentConfig(1)
	cfg.Engines = []agent.EngineConfig{{Name: EngineName, Kind: "vllm", URL: h.http.URL, KVEvents: "tcp://" + h.events.Addr().String(), KVReplay: "tcp://" + h.replay.Addr().String()}}
	other, err := agent.New(agent.Options{Logger: r.opt.Logger, Config: cfg, Version: "test", Process: 0xbad, DeltaEvery: 50 * time.Millisecond, PageTimeout: r.opt.PageTimeout})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := other.Stop(t.Context()); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	b := r.background(0, 0)
	r.eventually("the harm does not go on", func() string {
		if n := h.connections.Load(); n < harms {
			return fmt.Sprintf("%d connections of %d", n, harms)
		}
		return ""
	})
	b.undisturbed(t)
	boundedHeap(t, before)
	if x := r.worker(0, w); notLive(x) != "" {
		t.Errorf("the good worker is %s", notLive(x))
	}
	if got := r.expects(0, w, a); got != 992 {
		t.Errorf("%d tokens expected of the good worker", got)
	}
	if got := r.expectsNow(0, WorkerName(1, 0), a); got > 0 {
		t.Errorf("%d tokens expected of the hostile worker", got)
	}
	resp := r.worker(0, WorkerName(1, 0))
	if resp == nil {
		t.Fatal("the hostile worker is not shown")
	}
	if resp.GetView() == "live" {
		t.Errorf("the view of the hostile worker is called %s", resp.GetView())
	}
}

// TestHostileEngine runs one at a time: each is allowed to cost memory.
func TestHostileEngine(t *testing.T) { // not beside others: it watches the memory of the process
	mebibyte := make([]byte, 1<<20)
	t.Run("frames of 1 GiB", func(t *testing.T) {
		beside(t, func(conn net.Conn, _ int64) {
			header := binary.BigEndian.AppendUint64([]byte{2}, 1<<30)
			for _, err := conn.Write(header); err == nil; _, err = conn.Write(mebibyte) {
				continue
			}
		}, 4)
	})
	t.Run("messages without end", func(t *testing.T) {
		part := frame(true, mebibyte)
		beside(t, func(conn net.Conn, _ int64) {
			for range 1 << 10 {
				if _, err := conn.Write(part); err != nil {
					return
				}
			}
		}, 4)
	})
	t.Run("msgpack bombs", func(t *testing.T) {
		list := bombs()
		beside(t, func(conn net.Conn, _ int64) {
			seq := uint64(0)
			for range 3 {
				for _, payload := range list {
					if _, err := conn.Write(event(seq, payload)); err != nil {
						return
					}
					seq++
				}
			}
		}, 4)
	})
}
