package coordinator

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/fleet"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/boundary"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

const (
	// boundariesEvery is how often boundaries are judged without news: outcomes
	// confirm or revoke what is declared.
	boundariesEvery = 10 * time.Second
	// boundariesPause is the least time between two judgements: agents tell
	// probe by probe.
	boundariesPause = 200 * time.Millisecond
)

// boundaries keep what is made of the workers' hashing boundaries.
type boundaries struct {
	// news says that a vector or a worker has changed.
	news chan struct{}
	// verdicts are the newest, by worker.
	verdicts atomic.Pointer[map[string]*boundary.Verdict]

	mu    sync.Mutex
	judge boundary.Judge
	// unverified are the slots whose streams the index does not believe.
	unverified map[fleet.WorkerID]bool
}

func newBoundaries() *boundaries {
	b := &boundaries{news: make(chan struct{}, 1), unverified: map[fleet.WorkerID]bool{}}
	b.verdicts.Store(&map[string]*boundary.Verdict{})
	return b
}

// changed has boundaries judged soon.
func (b *boundaries) changed() {
	select {
	case b.news <- struct{}{}:
	default:
	}
}

// of is what is made of a worker's boundary; nil: nothing yet.
func (b *boundaries) of(worker string) *boundary.Verdict { return (*b.verdicts.Load())[worker] }

// credited says that a worker is not known to turn text into other blocks than
// its pool.
func (b *boundaries) credited(worker string) bool {
	v := b.of(worker)
	return v == nil || v.Credit
}

// differing is the number of workers whose boundary is not their pool's.
func (b *boundaries) differing() (n int) {
	for _, v := range *b.verdicts.Load() {
		if v.Why != "" {
			n++
		}
	}
	return n
}

// judgeBoundaries judges boundaries when something changed, until the
// coordinator ends.
func (c *Coordinator) judgeBoundaries() {
	pause := time.NewTimer(0)
	defer pause.Stop()
	again := time.NewTimer(boundariesEvery)
	defer again.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-pause.C:
		}
		select {
		case <-c.ctx.Done():
			return
		case <-c.boundaries.news:
		case <-again.C:
		}
		every := boundariesEvery
		if c.checkBoundaries(time.Now()) {
			every = time.Second
		}
		again.Reset(every)
		pause.Reset(boundariesPause)
	}
}

// checkBoundaries takes the prefix credit of workers that turn text into other
// blocks than their pool, and gives it back when they agree again. It asks for
// new measurements and reports whether some are waited for.
func (c *Coordinator) checkBoundaries(now time.Time) (measuring bool) {
	b := c.boundaries
	b.mu.Lock()
	defer b.mu.Unlock()
	infos := c.fleet.Workers(now)
	workers := make([]boundary.Worker, 0, len(infos))
	for i := range infos {
		w := boundary.Worker{Name: infos[i].Name, Pool: infos[i].Pool, Vector: vectorOf(&infos[i].Facts)}
		w.Outcomes, w.FoundRatio = c.judges.found(now, w.Name, infos[i].Process)
		workers = append(workers, w)
	}
	verdicts, asks := b.judge.Judge(now, workers)
	was, is := *b.verdicts.Load(), make(map[string]*boundary.Verdict, len(verdicts))
	for i := range verdicts {
		v, w := &verdicts[i], &infos[i]
		is[v.Worker] = v
		measuring = measuring || v.State == boundary.StateMeasuring
		if v.Credit == b.unverified[w.ID] {
			c.index.SetVerified(prefixindex.WorkerID(w.ID), v.Credit)
		}
		if v.Credit {
			delete(b.unverified, w.ID)
		} else {
			b.unverified[w.ID] = true
		}
		if before := was[v.Worker]; v.Why != "" && (before == nil || before.Why != v.Why) {
			action := "no prefix credit"
			if v.Credit {
				action = "none: only requests with an adapter or a cache salt mean other blocks"
			}
			c.log.Warn("boundary differs", append([]any{"event", "boundary_differs", "worker", w.Name, "pool", w.Pool, "error", v.Why, "action", action}, differenceFields(v)...)...)
		}
	}
	b.verdicts.Store(&is)
	for _, a := range asks {
		host, index, ok := c.lanes.where(a.Worker)
		if !ok {
			continue
		}
		// One that is lost is asked for again.
		c.lanes.send(host, &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Boundary{Boundary: &waypostv1.BoundaryAsk{
			Index: &index, Part: proto.String(string(a.Part)), Probe: proto.Uint32(uint32(a.Number)),
		}}})
	}
	return measuring
}

// differenceFields are the fields of a log line about a difference.
func differenceFields(v *boundary.Verdict) (fields []any) {
	fields = append(fields, "part", string(v.Difference.Part))
	if v.Difference.Number > 0 {
		fields = append(fields, "probe", v.Difference.Number)
	}
	if v.Difference.Number > 0 && v.Difference.Token >= 0 {
		fields = append(fields, "first_difference", "token:"+strconv.Itoa(v.Difference.Token))
	}
	return fields
}

// vectorOf is the boundary that an agent tells. One that tells only a name
// declares it.
func vectorOf(f *fleet.Facts) *boundary.Vector {
	if f.Vector == nil && f.Boundary != "" {
		return &boundary.Vector{Declared: f.Boundary}
	}
	return f.Vector
}

// boundaryName names a worker's boundary in lists: what is declared in full, because
// the beginnings of two models' names may be alike, else the beginning of the
// fingerprint.
func boundaryName(f *fleet.Facts) string {
	if v := vectorOf(f); v != nil && v.Declared != "" {
		return v.Declared
	}
	return shortHash(f.Boundary)
}

// boundaryFault is why a worker's boundary is not its pool's, empty: it is;
// effect says what that costs.
func (c *Coordinator) boundaryFault(worker string) (fault, effect string) {
	v := c.boundaries.of(worker)
	switch {
	case v == nil || v.Why == "":
		return "", ""
	case v.Credit:
		return v.Why, "requests with an adapter or a cache salt find nothing there"
	}
	return v.Why, "its cache earns no credit; it is placed by load"
}

// found is how much of the reuse that was expected of a worker was found, over
// so many outcomes.
func (j *judges) found(now time.Time, name string, process uint64) (outcomes, ratio float64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	w := j.workers[name]
	if w == nil || w.process != process {
		return 0, 0
	}
	return w.accuracy.OutcomesAfter(&accuracyLimits, j.c.fleet.Ms(now)-w.accuracyMs), w.accuracy.FoundRatio
}

// boundariesOf are the boundaries of a host's engines by name. One that is out
// of bounds is left out and said so once per hello: the host still serves.
func (h *lanes) boundariesOf(s *lane.Session) map[string]*boundary.Vector {
	out := map[string]*boundary.Vector{}
	for i, m := range s.Hello().GetBoundaries() {
		if i >= maxEngineBoundaries {
			break
		}
		v, err := lane.VectorOf(m)
		if err != nil {
			h.c.metrics.badFrames.WithLabelValues("boundary").Inc()
			h.c.log.Debug("boundary of an engine refused", "host", s.Host(), "engine", m.GetEngine(), "error", err)
			continue
		}
		out[m.GetEngine()] = v
	}
	return out
}

// maxEngineBoundaries bounds the boundaries of one host.
const maxEngineBoundaries = 256

// GetBoundary implements the operator service.
func (o *operators) GetBoundary(_ context.Context, req *waypostv1.GetBoundaryRequest) (*waypostv1.GetBoundaryResponse, error) {
	c := o.c
	pools := map[string]*waypostv1.PoolBoundary{}
	for _, info := range c.fleet.Pools(time.Now()) {
		if req.Pool == nil || info.Name == req.GetPool() {
			pools[info.Name] = &waypostv1.PoolBoundary{Pool: &info.Name}
		}
	}
	if req.Pool != nil && len(pools) == 0 {
		return nil, api.NotFound("pool", "no pool of that name; see: waypost status")
	}
	for _, w := range c.fleet.Workers(time.Now()) {
		if p := pools[w.Pool]; p != nil {
			p.Workers = append(p.Workers, workerBoundary(&w, c.boundaries.of(w.Name)))
		}
	}
	out := &waypostv1.GetBoundaryResponse{}
	for _, p := range pools {
		slices.SortStableFunc(p.Workers, func(a, b *waypostv1.WorkerBoundary) int {
			return cmp.Compare(a.GetGroup()-1, b.GetGroup()-1) // unknown ones last
		})
		out.Pools = append(out.Pools, p)
	}
	slices.SortFunc(out.Pools, func(a, b *waypostv1.PoolBoundary) int { return cmp.Compare(a.GetPool(), b.GetPool()) })
	return out, nil
}

// workerBoundary is what is made of a worker's boundary, in the API's words.
func workerBoundary(w *fleet.WorkerInfo, v *boundary.Verdict) *waypostv1.WorkerBoundary {
	out := &waypostv1.WorkerBoundary{Worker: &w.Name, State: proto.String(string(boundary.StateUnknown)), Boundary: proto.String(boundaryName(&w.Facts)), Credited: proto.Bool(true)}
	if vector := vectorOf(&w.Facts); vector != nil {
		for _, set := range vector.Sets {
			out.Sets = append(out.Sets, uint32(set))
		}
		out.Probes, out.DateDependent = proto.Uint32(uint32(len(vector.Probes))), proto.Bool(vector.DateDependent())
	}
	if v == nil {
		return out
	}
	out.State, out.Credited, out.Why = proto.String(string(v.State)), &v.Credit, &v.Why
	if v.Group > 0 {
		out.Group = proto.Uint32(uint32(v.Group))
	}
	if v.Against != w.Name {
		out.Against = &v.Against
	}
	if d := v.Difference; d.Part != "" {
		out.Part = proto.String(string(d.Part))
		if d.Number > 0 {
			out.Probe = proto.Uint32(uint32(d.Number))
			if d.Token >= 0 {
				out.FirstDifference = proto.Uint32(uint32(d.Token))
			}
		}
	}
	return out
}
