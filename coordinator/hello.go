package coordinator

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"waypost/coordinator/prefixindex"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// prefixFormats are the versions of the prefix frame format understood here.
var prefixFormats = summary.OwnTerms("").Reads

// agree checks what must agree before a word of the stream is believed.
func (h *lanes) agree(hello *waypostv1.AgentHello) error {
	return summary.Agree(
		summary.Terms{Side: "host " + hello.GetHost(), Writes: hello.GetPrefixFormat(), KeyIDs: hello.GetPrefixKeyIds()},
		summary.OwnTerms("coordinator "+h.c.name, h.c.prefixKey.ID()),
	)
}

// bounded is a worker with a measured boundary.
type bounded struct{ worker, pool, boundary string }

// boundaryFaults says of each worker whose boundary is not that of most workers
// of its pool what differs. A boundary that is not known differs from none.
func boundaryFaults(workers []bounded) map[string]error {
	count := map[string]map[string]int{}
	for _, w := range workers {
		if w.boundary == "" || w.pool == "" {
			continue
		}
		if count[w.pool] == nil {
			count[w.pool] = map[string]int{}
		}
		count[w.pool][w.boundary]++
	}
	out := map[string]error{}
	for _, w := range workers {
		of := count[w.pool]
		if w.boundary == "" || len(of) < 2 {
			continue
		}
		most := slices.MaxFunc(slices.Collect(maps.Keys(of)), func(a, b string) int {
			return cmp.Or(cmp.Compare(of[a], of[b]), cmp.Compare(b, a))
		})
		if err := summary.AgreeBoundary("worker "+w.worker, w.boundary, "pool "+w.pool, most); err != nil {
			out[w.worker] = err
		}
	}
	return out
}

// checkBoundaries takes the prefix credit of workers that turn text into other
// blocks than their pool, and gives it back when they agree again.
func (c *Coordinator) checkBoundaries(now time.Time) {
	if !c.helloNews.Swap(false) {
		return
	}
	infos := c.fleet.Workers(now)
	list := make([]bounded, 0, len(infos))
	for i := range infos {
		list = append(list, bounded{infos[i].Name, infos[i].Pool, infos[i].Facts.Boundary})
	}
	faults := boundaryFaults(list)
	was := c.boundaries.Swap(&faults)
	for i := range infos {
		w := &infos[i]
		err, before := faults[w.Name], error(nil)
		if was != nil {
			before = (*was)[w.Name]
		}
		if err != nil || before != nil {
			c.index.SetVerified(prefixindex.WorkerID(w.ID), err == nil)
		}
		if err != nil && (before == nil || before.Error() != err.Error()) {
			c.log.Warn("boundary differs", "event", "boundary_differs", "worker", w.Name, "pool", w.Pool, "error", err, "action", "no prefix credit")
		}
	}
}

// boundaryFault is why a worker earns no prefix credit in its pool; empty: it does.
func (c *Coordinator) boundaryFault(worker string) string {
	if faults := c.boundaries.Load(); faults != nil && (*faults)[worker] != nil {
		return (*faults)[worker].Error()
	}
	return ""
}
