package emulator

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
	"go.uber.org/goleak"

	"waypost/testbed/emulator/core"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 2 * time.Minute

// small is an engine like the recorded one, without waiting.
func small() Options {
	return Options{
		Model: "tiny", BlockTokens: 32, PoolBlocks: 100, MaxModelTokens: 2048, StepTokens: 2048, MaxRunning: 16,
		StepTime: core.Llama8BH100, Speed: 1000, Topic: "kv@test",
	}
}

func start(t *testing.T, o Options) *Engine {
	t.Helper()
	e, err := Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// client has its own connections, closed at the end of the test.
func client(t *testing.T) *http.Client {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: patience}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

type reply struct {
	status int
	body   string
}

func send(t *testing.T, c *http.Client, method, url string, body any, header ...string) reply {
	t.Helper()
	r, err := try(c, method, url, body, header...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func try(c *http.Client, method, url string, body any, header ...string) (reply, error) {
	var in io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		in = strings.NewReader(b)
	default:
		j, err := json.Marshal(b)
		if err != nil {
			return reply{}, err
		}
		in = bytes.NewReader(j)
	}
	req, err := http.NewRequest(method, url, in)
	if err != nil {
		return reply{}, err
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, string(b)}, err
}

type object = map[string]any

func (r reply) json(t *testing.T) object {
	t.Helper()
	var v object
	if err := json.Unmarshal([]byte(r.body), &v); err != nil {
		t.Fatalf("%v in %q", err, r.body)
	}
	return v
}

// at walks into decoded JSON: names for objects, numbers for lists.
func at(t *testing.T, v any, path ...any) any {
	t.Helper()
	for _, p := range path {
		switch k := p.(type) {
		case string:
			o, ok := v.(object)
			if !ok {
				t.Fatalf("no object for %q of %v in %v", k, path, v)
			}
			v = o[k]
		case int:
			l, ok := v.([]any)
			if !ok || k >= len(l) {
				t.Fatalf("no item %d of %v in %v", k, path, v)
			}
			v = l[k]
		}
	}
	return v
}

func cachedTokens(t *testing.T, v any) float64 {
	t.Helper()
	n, ok := at(t, v, "usage", "prompt_tokens_details", "cached_tokens").(float64)
	if !ok {
		t.Fatalf("no cached tokens in %v", v)
	}
	return n
}

// complete sends token ids and returns the answer.
func complete(t *testing.T, c *http.Client, e *Engine, prompt []uint32, maxTokens int, header ...string) object {
	t.Helper()
	r := send(t, c, "POST", e.URL()+"/v1/completions", object{"model": "tiny", "prompt": prompt, "max_tokens": maxTokens, "ignore_eos": true}, header...)
	if r.status != 200 {
		t.Fatalf("status %d: %s", r.status, r.body)
	}
	return r.json(t)
}

func ids(from, n int) []uint32 {
	p := make([]uint32, n)
	for i := range p {
		p[i] = uint32(from + i)
	}
	return p
}

// zmq is a minimal ZMTP client, enough to see what a peer of libzmq sees.
type zmq struct {
	t *testing.T
	c net.Conn
	r *bufio.Reader
}

func dialZMQ(t *testing.T, endpoint, socketType string) *zmq {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	return shake(t, c, socketType)
}

func shake(t *testing.T, c net.Conn, socketType string) *zmq {
	t.Helper()
	t.Cleanup(func() { c.Close() })
	z := &zmq{t, c, bufio.NewReader(c)}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	greeting := make([]byte, 64)
	copy(greeting, []byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0})
	copy(greeting[12:], "NULL")
	z.write(greeting)
	ready := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00"), byte(len(socketType)))
	ready = append(ready, socketType...)
	z.write(append([]byte{4, byte(len(ready))}, ready...))
	if _, err := io.ReadFull(z.r, greeting); err != nil {
		t.Fatal(err)
	}
	if flags, _ := z.frame(); flags != 4 {
		t.Fatalf("frame flags %d: want the command READY", flags)
	}
	return z
}

// subscribe connects to a rank's publisher and waits until it is heard.
func subscribe(t *testing.T, e *Engine, rank int) *zmq {
	t.Helper()
	before := e.Subscribers(rank)
	z := dialZMQ(t, rankEndpoint(t, e.EventsEndpoint(), rank), "SUB")
	z.write([]byte{0, 1, 1})
	eventually(t, "subscribed", func() bool { return e.Subscribers(rank) > before })
	return z
}

func rankEndpoint(t *testing.T, endpoint string, rank int) string {
	t.Helper()
	host, port, err := splitAddress(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	return "tcp://" + net.JoinHostPort(host, itoa(port+rank))
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func (z *zmq) write(b []byte) {
	z.t.Helper()
	if _, err := z.c.Write(b); err != nil {
		z.t.Fatal(err)
	}
}

func (z *zmq) frame() (flags byte, body []byte) {
	z.t.Helper()
	head := make([]byte, 2)
	if _, err := io.ReadFull(z.r, head); err != nil {
		z.t.Fatalf("no frame: %v", err)
	}
	size := uint64(head[1])
	if head[0]&2 != 0 {
		long := append(head[1:], make([]byte, 7)...)
		if _, err := io.ReadFull(z.r, long[1:]); err != nil {
			z.t.Fatal(err)
		}
		size = binary.BigEndian.Uint64(long)
	}
	body = make([]byte, size)
	if _, err := io.ReadFull(z.r, body); err != nil {
		z.t.Fatal(err)
	}
	return head[0], body
}

func (z *zmq) message() [][]byte {
	z.t.Helper()
	var m [][]byte
	for {
		flags, body := z.frame()
		m = append(m, body)
		if flags&1 == 0 {
			return m
		}
	}
}

// batch is a received event batch.
type batch struct {
	topic   string
	seq     uint64
	payload []byte
	// kinds are the events' types.
	kinds []string
	// events are maps, or lists if the engine sends arrays.
	events []any
	rank   any
}

func (z *zmq) batch() batch {
	z.t.Helper()
	m := z.message()
	if len(m) != 3 {
		z.t.Fatalf("%d frames: want topic, sequence, payload", len(m))
	}
	return decodeBatch(z.t, m[0], m[1], m[2])
}

func decodeBatch(t *testing.T, topic, seq, payload []byte) batch {
	t.Helper()
	v, _, err := msgp.ReadIntfBytes(payload)
	if err != nil {
		t.Fatal(err)
	}
	list := v.([]any)
	b := batch{topic: string(topic), seq: binary.BigEndian.Uint64(seq), payload: payload, events: list[1].([]any), rank: list[2]}
	for _, e := range b.events {
		switch e := e.(type) {
		case map[string]any:
			b.kinds = append(b.kinds, e["type"].(string))
		case []any:
			b.kinds = append(b.kinds, e[0].(string))
		}
	}
	return b
}

// replayed asks a rank for its batches from a number on.
func replayed(t *testing.T, e *Engine, rank int, from uint64) []batch {
	t.Helper()
	z := dialZMQ(t, rankEndpoint(t, e.ReplayEndpoint(), rank), "DEALER")
	defer z.c.Close()
	z.write(binary.BigEndian.AppendUint64([]byte{1, 0, 0, 8}, from))
	var out []batch
	for {
		m := z.message()
		seq := m[len(m)-2]
		if bytes.Equal(seq, bytes.Repeat([]byte{0xff}, 8)) {
			return out
		}
		if len(m) != 4 && len(m) != 3 || len(m[0]) != 0 {
			t.Fatalf("replay message of %d frames", len(m))
		}
		out = append(out, decodeBatch(t, m[len(m)-3], seq, m[len(m)-1]))
	}
}
