package vllm

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// fakeEngine is an engine on real sockets: HTTP, an event publisher and a
// replay socket per rank. Its life can end and begin anew on the same ports.
type fakeEngine struct {
	t     testing.TB
	mu    sync.Mutex
	http  *httptest.Server
	url   string
	start float64 // process_start_time_seconds
	model string
	ranks []*fakeRank
	// hold answers /metrics, "" normally.
	metrics func(w http.ResponseWriter)
	asleep  bool
	extra   map[string]string // path -> answer
}

func newFakeEngine(t testing.TB, ranks int) *fakeEngine {
	f := &fakeEngine{t: t, start: 1000, model: "tiny", extra: map[string]string{}}
	for range ranks {
		f.ranks = append(f.ranks, newFakeRank(t))
	}
	f.serve("127.0.0.1:0")
	t.Cleanup(func() {
		f.stopHTTP()
		for _, r := range f.ranks {
			r.close()
		}
	})
	return f
}

func (f *fakeEngine) serve(address string) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		f.t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(f.handle))
	s.Listener.Close()
	s.Listener = ln
	s.Start()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.http, f.url = s, s.URL
}

// stopHTTP ends the API server only, as a kill of its process does.
func (f *fakeEngine) stopHTTP() {
	f.mu.Lock()
	s := f.http
	f.http = nil
	f.mu.Unlock()
	if s != nil {
		s.CloseClientConnections()
		s.Close()
	}
}

func (f *fakeEngine) serveAgain() {
	f.serve(strings.TrimPrefix(f.url, "http://"))
}

func (f *fakeEngine) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeEngine) handle(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	extra, hasExtra := f.extra[r.URL.Path]
	metrics, asleep, start, model := f.metrics, f.asleep, f.start, f.model
	f.mu.Unlock()
	switch {
	case hasExtra:
		io.WriteString(w, extra)
	case r.URL.Path == "/metrics" && metrics != nil:
		metrics(w)
	case r.URL.Path == "/metrics":
		fmt.Fprintf(w, "process_start_time_seconds %v\n", start)
		for i := range f.ranks {
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
		for i, rank := range f.ranks {
			parts = append(parts, fmt.Sprintf(`"%d":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}`, i, rank.pubPort(), rank.routerPort()))
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
		r.restart()
	}
}

// fakeRank is one publisher: a PUB socket and a ROUTER for replay.
type fakeRank struct {
	t          testing.TB
	mu         sync.Mutex
	pub, route net.Listener
	conns      map[net.Conn]bool // of PUB: subscribed?
	all        map[net.Conn]bool
	next       uint64
	ring       [][]byte // payloads
	first      uint64   // number of ring[0]
	size       int
	mute       bool // replay does not answer
	asked      []uint64
	wake       *sync.Cond
	wg         sync.WaitGroup
}

func newFakeRank(t testing.TB) *fakeRank {
	r := &fakeRank{t: t, conns: map[net.Conn]bool{}, all: map[net.Conn]bool{}, size: 10000}
	r.wake = sync.NewCond(&r.mu)
	var err error
	if r.pub, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	if r.route, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	r.accept(r.pub, "PUB", r.subscriber)
	r.accept(r.route, "ROUTER", r.replayer)
	return r
}

func (r *fakeRank) pubPort() int    { return r.pub.Addr().(*net.TCPAddr).Port }
func (r *fakeRank) routerPort() int { return r.route.Addr().(*net.TCPAddr).Port }

func (r *fakeRank) accept(ln net.Listener, kind string, serve func(net.Conn, *bufio.Reader)) {
	r.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.all[c] = true
			r.mu.Unlock()
			r.wg.Go(func() {
				defer func() {
					c.Close()
					r.mu.Lock()
					delete(r.all, c)
					delete(r.conns, c)
					r.mu.Unlock()
				}()
				in := bufio.NewReader(c)
				if zmtpGreet(c, in, kind) == nil {
					serve(c, in)
				}
			})
		}
	})
}

func (r *fakeRank) close() {
	r.pub.Close()
	r.route.Close()
	r.cut()
	r.wg.Wait()
}

// cut drops every connection.
func (r *fakeRank) cut() {
	r.mu.Lock()
	for c := range r.all {
		c.Close()
	}
	r.mu.Unlock()
}

func (r *fakeRank) restart() {
	r.mu.Lock()
	r.next, r.first, r.ring = 0, 0, nil
	r.mu.Unlock()
	r.cut()
}

func (r *fakeRank) subscriber(c net.Conn, in *bufio.Reader) {
	for {
		frames, err := zmtpRead(in)
		if err != nil {
			return
		}
		if len(frames) == 1 && len(frames[0]) > 0 && frames[0][0] == 1 {
			r.mu.Lock()
			r.conns[c] = true
			r.wake.Broadcast()
			r.mu.Unlock()
		}
	}
}

// awaitSubscriber waits until somebody is subscribed.
func (r *fakeRank) awaitSubscriber() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.conns) == 0 {
		r.wake.Wait()
	}
}

// awaitAsked waits until replays were asked for so many times.
func (r *fakeRank) awaitAsked(times int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.asked) < times {
		r.wake.Wait()
	}
}

func (r *fakeRank) replayer(c net.Conn, in *bufio.Reader) {
	for {
		frames, err := zmtpRead(in)
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[0]) != 0 || len(frames[1]) != 8 {
			continue // never answered
		}
		from := binary.BigEndian.Uint64(frames[1])
		r.mu.Lock()
		r.asked = append(r.asked, from)
		r.wake.Broadcast()
		var out bytes.Buffer
		for i, payload := range r.ring {
			if seq := r.first + uint64(i); seq >= from {
				zmtpWrite(&out, nil, []byte("kv@test"), binary.BigEndian.AppendUint64(nil, seq), payload)
			}
		}
		mute := r.mute
		r.mu.Unlock()
		if mute {
			continue
		}
		zmtpWrite(&out, nil, nil, bytes.Repeat([]byte{0xff}, 8), nil)
		if _, err := c.Write(out.Bytes()); err != nil {
			return
		}
	}
}

// publish publishes a batch of events; lost ones get a number and a place in
// the ring but reach nobody.
func (r *fakeRank) publish(lost bool, events ...any) {
	payload, err := msgp.AppendIntf(nil, []any{1000.5 + float64(r.next), events, 0})
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var out bytes.Buffer
	zmtpWrite(&out, []byte("kv@test"), binary.BigEndian.AppendUint64(nil, r.next), payload)
	r.next++
	r.ring = append(r.ring, payload)
	if len(r.ring) > r.size {
		r.ring = r.ring[1:]
		r.first++
	}
	if lost {
		return
	}
	for c := range r.conns {
		c.Write(out.Bytes())
	}
}

// stored is a store of blocks of two tokens; block h holds tokens 10h, 10h+1.
func stored(parent int, hashes ...int) any {
	var hs, tokens []any
	for _, h := range hashes {
		hs, tokens = append(hs, h), append(tokens, 10*h, 10*h+1)
	}
	e := map[string]any{
		"type": "BlockStored", "block_hashes": hs, "parent_block_hash": nil, "token_ids": tokens, "block_size": 2,
		"medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention",
	}
	if parent != 0 {
		e["parent_block_hash"] = parent
	}
	return e
}

func removed(hash int) any {
	return map[string]any{"type": "BlockRemoved", "block_hashes": []any{hash}, "medium": "GPU", "group_idx": 0}
}

func cleared() any { return map[string]any{"type": "AllBlocksCleared"} }

// zmtpGreet is the server's half of the handshake.
func zmtpGreet(c net.Conn, in *bufio.Reader, kind string) error {
	greeting := make([]byte, 64)
	copy(greeting, "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL")
	if _, err := c.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(in, make([]byte, 64)); err != nil {
		return err
	}
	body := append([]byte("\x05READY\x0bSocket-Type"), 0, 0, 0, byte(len(kind)))
	body = append(body, kind...)
	if _, err := c.Write(append([]byte{4, byte(len(body))}, body...)); err != nil {
		return err
	}
	_, _, err := zmtpFrame(in) // the client's READY
	return err
}

func zmtpFrame(in *bufio.Reader) (flags byte, body []byte, err error) {
	if flags, err = in.ReadByte(); err != nil {
		return 0, nil, err
	}
	size := make([]byte, 1)
	if flags&2 != 0 {
		size = make([]byte, 8)
	}
	if _, err := io.ReadFull(in, size); err != nil {
		return 0, nil, err
	}
	n := uint64(0)
	for _, b := range size {
		n = n<<8 | uint64(b)
	}
	body = make([]byte, n)
	_, err = io.ReadFull(in, body)
	return flags, body, err
}

func zmtpRead(in *bufio.Reader) (frames [][]byte, err error) {
	for {
		flags, body, err := zmtpFrame(in)
		if err != nil {
			return nil, err
		}
		if flags&4 != 0 {
			continue
		}
		frames = append(frames, body)
		if flags&1 == 0 {
			return frames, nil
		}
	}
}

func zmtpWrite(out *bytes.Buffer, frames ...[]byte) {
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = 1
		}
		if len(f) > 255 {
			out.WriteByte(flags | 2)
			out.Write(binary.BigEndian.AppendUint64(nil, uint64(len(f))))
		} else {
			out.WriteByte(flags)
			out.WriteByte(byte(len(f)))
		}
		out.Write(f)
	}
}
