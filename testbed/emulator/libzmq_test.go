package emulator

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// python finds an interpreter that has the binding of the real libzmq.
func python(t *testing.T) string {
	t.Helper()
	name := os.Getenv("WAYPOST_PYTHON")
	if name == "" {
		name = "python3"
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("no Python to test against libzmq: %v (set WAYPOST_PYTHON)", err)
	}
	if out, err := exec.Command(path, "-c", "import zmq").CombinedOutput(); err != nil {
		t.Skipf("%s has no zmq module, so libzmq is not tested: %v: %.200s (set WAYPOST_PYTHON)", path, err, out)
	}
	return path
}

// peer runs zmqpeer.py and reads its lines.
type pythonPeer struct {
	t     *testing.T
	lines *bufio.Scanner
	cmd   *exec.Cmd
}

func runPeer(t *testing.T, args ...string) *pythonPeer {
	t.Helper()
	cmd := exec.Command(python(t), append([]string{"testdata/zmqpeer.py"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &pythonPeer{t, bufio.NewScanner(out), cmd}
}

func (p *pythonPeer) line() []string {
	p.t.Helper()
	if !p.lines.Scan() {
		p.t.Fatalf("the peer ended: %v", p.lines.Err())
	}
	return strings.Fields(p.lines.Text())
}

// message is a line's frames, which must be of a kind.
func (p *pythonPeer) message(kind string) [][]byte {
	p.t.Helper()
	words := p.line()
	if words[0] != kind {
		p.t.Fatalf("line %v: want %s", words, kind)
	}
	var frames [][]byte
	for _, w := range words[1:] {
		b, err := hex.DecodeString(strings.TrimPrefix(w, "-"))
		if err != nil {
			p.t.Fatal(err)
		}
		frames = append(frames, b)
	}
	return frames
}

func TestLibzmqSubscribesAndReplays(t *testing.T) {
	python(t)
	e, c := start(t, small()), client(t)
	const count = 20
	p := runPeer(t, "connect", e.EventsEndpoint(), e.ReplayEndpoint(), fmt.Sprint(count))
	eventually(t, "libzmq has subscribed", func() bool { return e.Subscribers(0) == 1 })
	var live [][][]byte
	for i := range count {
		complete(t, c, e, ids(i*2000, 40+32*i), 1)
		live = append(live, p.message("live"))
	}
	for i, want := range live {
		got := p.message("replay")
		if len(got) != 4 || !slices.EqualFunc(got[1:], want, slices.Equal) {
			t.Errorf("replayed message %d has frames %x, live %x", i, got, want)
		}
		if b := decodeBatch(t, want[0], want[1], want[2]); b.seq != uint64(i) {
			t.Errorf("message %d has sequence %d", i, b.seq)
		}
	}
	if end := p.message("replay"); len(end) != 4 || len(end[1]) != 0 || len(end[3]) != 0 {
		t.Errorf("end marker %x", end)
	}
	if words := p.line(); words[1] != "0" {
		t.Errorf("the subscription broke %s times: heartbeats are not answered", words[1])
	}
}

func TestLibzmqListens(t *testing.T) {
	python(t)
	p := runPeer(t, "bind", "2")
	o := small()
	o.EventsDial = "127.0.0.1:" + p.line()[1]
	e, c := start(t, o), client(t)
	eventually(t, "libzmq has subscribed", func() bool { return e.Subscribers(0) == 1 })
	for i := range 2 {
		complete(t, c, e, ids(i*1000, 40), 1)
		m := p.message("live")
		if b := decodeBatch(t, m[0], m[1], m[2]); b.seq != uint64(i) || b.topic != "kv@test" {
			t.Errorf("batch %d: %+v", i, b)
		}
	}
}
