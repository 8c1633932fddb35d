package coordinator

import (
	"context"
	"fmt"
	"sync"
	"time"

	"waypost/coordinator/api"
	"waypost/coordinator/exchange"
)

// A host is heard while its lane brought a frame within heardWithin: reports
// come every 200 ms. What a peer said of its lanes holds as long, and a few of
// its messages more.
const (
	heardWithin = 5 * time.Second
	toldWithin  = heardWithin + 3*exchange.Every
)

// hearing compares the lanes of this coordinator with those of the others. When
// all fall silent, the hosts are to blame, and placements go on from claims and
// outcomes; when only the own ones do, the others decide better.
type hearing struct {
	mu    sync.Mutex
	peers map[*peerHears]struct{} // one per stream of a peer
}

// peerHears is what one peer told last.
type peerHears struct {
	name  string
	hosts int
	at    time.Time // zero: nothing yet
}

func newHearing() *hearing { return &hearing{peers: map[*peerHears]struct{}{}} }

// of is the place of a peer's stream; end gives it back.
func (h *hearing) of(name string) *peerHears {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := &peerHears{name: name}
	h.peers[p] = struct{}{}
	return p
}

func (h *hearing) end(p *peerHears) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.peers, p)
}

func (h *hearing) told(p *peerHears, hosts uint32, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p.hosts, p.at = int(hosts), at
}

// silent says why the own lanes are not to be trusted: a peer hears more than
// twice the hosts that are heard here. Empty: they are as good as the others'.
func (h *hearing) silent(now time.Time, heard int) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	best := &peerHears{}
	for p := range h.peers {
		if now.Sub(p.at) <= toldWithin && p.hosts > best.hosts {
			best = p
		}
	}
	if 2*heard >= best.hosts {
		return ""
	}
	return fmt.Sprintf("own lanes are silent: %d hosts are heard here, %d by %s; ask another coordinator", heard, best.hosts, best.name)
}

// peerName names the coordinator that calls, as its certificate does.
func peerName(ctx context.Context) string {
	if _, name, err := peerOf(ctx); err == nil {
		return name
	}
	return "another coordinator"
}

// heardHosts counts the hosts whose lane brought something lately.
func (h *lanes) heardHosts(now time.Time) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, hl := range h.hosts {
		if ns := hl.heardNs.Load(); ns > 0 && now.Sub(h.c.began)-time.Duration(ns) <= heardWithin {
			n++
		}
	}
	return n
}

// laneCheck is the readiness of the lanes.
func (c *Coordinator) laneCheck(now time.Time) api.Check {
	return api.Check{Name: "lanes", Problem: c.hearing.silent(now, c.lanes.heardHosts(now))}
}
