package mesh

import (
	"errors"
	"sync"

	"github.com/hashicorp/memberlist"
)

const (
	// selfReadName is the name under which the mesh joins itself. No member can
	// have it: names begin with a letter or digit.
	selfReadName = ".self-read"
	// selfReadMark is in every log line of a self-read, which are not worth logging.
	selfReadMark = "self-read"
)

var errSelfRead = errors.New(selfReadMark)

// selfRead reads memberlist's whole state, suspicion and leaves included; see
// the package comment. ok is false when a join of another member is being merged
// at this moment, or the library failed: ask again later.
func (m *Mesh) selfRead() (nodes []node, ok bool) {
	if !m.transport.gate.TryLock() {
		return nil, false
	}
	defer m.transport.gate.Unlock()
	m.merge.begin()
	// The address is not dialled; the name leads to the echo.
	_, _ = m.list.Join([]string{selfReadName + "/127.0.0.1:1"})
	return m.merge.finish()
}

// mergeGate is memberlist's merge callback.
type mergeGate struct {
	mu      sync.Mutex
	reading bool
	nodes   []node
	read    bool
}

var _ memberlist.MergeDelegate = (*mergeGate)(nil)

func (g *mergeGate) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reading, g.read, g.nodes = true, false, nil
}

func (g *mergeGate) finish() ([]node, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reading = false
	return g.nodes, g.read
}

// inProgress says whether the state asked for is for the self-read.
func (g *mergeGate) inProgress() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.reading
}

// NotifyMerge implements memberlist.MergeDelegate. During a self-read the gate
// of the transport keeps all others away, so the call is the self-read's.
func (g *mergeGate) NotifyMerge(peers []*memberlist.Node) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.reading {
		return nil
	}
	g.nodes = make([]node, len(peers))
	for i, p := range peers {
		g.nodes[i] = nodeOf(p)
		switch p.State {
		case memberlist.StateAlive:
			g.nodes[i].state = StatusAlive
		case memberlist.StateSuspect:
			g.nodes[i].state = StatusSuspect
		case memberlist.StateLeft:
			g.nodes[i].state = StatusLeft
		default:
			g.nodes[i].state = StatusLost
		}
	}
	g.read = true
	return errSelfRead
}

// nodeOf copies what memberlist passes by reference.
func nodeOf(n *memberlist.Node) node {
	return node{name: n.Name, addr: hostPort(n.Addr, n.Port), meta: append([]byte(nil), n.Meta...)}
}
