package agent

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"waypost/agent/discover"
	"waypost/agent/host"
	"waypost/nvml"
)

const (
	// keepLost is how long an engine that was found and is gone stays listed, so
	// that its next life is the same worker.
	keepLost = 10 * time.Minute
	// maxRanks bounds the ranks of one life of the agent: numbers are not used
	// twice.
	maxRanks = 1 << 16
)

// discovery watches the engines that are found among this host's processes.
type discovery struct {
	a       *Agent
	scanner *discover.Scanner
	wake    chan struct{}

	// looking is held while one looks.
	looking sync.Mutex

	mu  sync.Mutex
	cfg DiscoverConfig
	// result is of the latest scan, failed why it could not be made; at is when, 0:
	// there was none.
	result discover.Result
	failed error
	at     time.Time
	// refused are engines that were to be watched and cannot be, by name, with the
	// reason.
	refused map[string]string
	// shares are what this host carries of engines over several hosts; looked says
	// that it was looked for.
	shares []share
	looked bool
	// strangers are servers of no known kind whose processes use GPUs.
	strangers []stranger
}

func newDiscovery(a *Agent) *discovery {
	return &discovery{a: a, scanner: discover.New(discover.Options{Proc: a.opt.Proc}), wake: make(chan struct{}, 1), cfg: a.cfg.Discover, refused: map[string]string{}}
}

// settings are those in force.
func (d *discovery) settings() DiscoverConfig {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cfg
}

// reload takes changed settings over.
func (d *discovery) reload(cfg DiscoverConfig) {
	d.mu.Lock()
	d.cfg = cfg
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// run looks again and again until the agent ends.
func (d *discovery) run() {
	for {
		t := time.NewTimer(d.settings().Every.D())
		select {
		case <-d.a.ctx.Done():
			t.Stop()
			return
		case <-t.C:
		case <-d.wake:
			t.Stop()
		}
		d.look(time.Now())
	}
}

// look scans the processes and follows what changed. A scan reads everything
// anew: what one missed, the next one finds.
func (d *discovery) look(now time.Time) {
	d.looking.Lock()
	defer d.looking.Unlock()
	cfg := d.settings()
	if !cfg.Enabled {
		d.mu.Lock()
		d.result, d.failed, d.at = discover.Result{}, nil, time.Time{}
		d.mu.Unlock()
		d.follow(nil, now)
		d.takeShares(nil, false)
		return
	}
	result, err := d.scanner.Scan()
	d.mu.Lock()
	news := (err == nil) != (d.failed == nil)
	d.failed, d.at = err, now
	if err == nil {
		d.result = result
	}
	d.mu.Unlock()
	if err != nil {
		if news {
			d.a.log.Warn("engines are not looked for", "error", err)
		}
		return
	}
	d.follow(result.Engines, now)
	d.takeShares(d.sharesOf(result.Engines, d.scanner.Boot()), true)
}

// follow has the engines that are there watched, and those that are gone no more.
func (d *discovery) follow(engines []discover.Engine, now time.Time) {
	present := map[*watched]bool{}
	refused := map[string]string{}
	var fresh []*discover.Engine
	for i := range engines {
		e := &engines[i]
		w, unwanted := d.a.watchedAt(e), d.unwanted(e)
		if !served(e, w) {
			continue
		}
		switch {
		case w != nil && !present[w] && !w.configured && unwanted == "" && !w.reads(e):
			// Its next life publishes elsewhere, or publishes at last.
			d.a.forget(w)
			fresh = append(fresh, e)
		case w != nil && !present[w] && (w.configured || unwanted == ""):
			present[w] = true
			d.found(w, e)
		case w == nil && unwanted == "":
			fresh = append(fresh, e)
		}
	}
	for _, w := range d.a.watching() {
		if !present[w] {
			d.gone(w, now)
		}
	}
	for _, e := range fresh {
		if why := d.add(e); why != "" {
			refused[e.Name()] = why
		}
	}
	d.mu.Lock()
	d.refused = refused
	d.mu.Unlock()
	d.mapGPUs()
}

// served says whether an engine takes requests at a place that this host reaches;
// w is the watched engine there, nil: there is none.
func served(e *discover.Engine, w *watched) bool {
	_, published := e.Published()
	return (e.Place == discover.Here || published || w != nil) && (e.Group == nil || e.Group.Front)
}

// reads says whether events are read where an engine's flags have it publish them.
func (w *watched) reads(e *discover.Engine) bool {
	live, replay := e.Events()
	return w.target.Events == live && w.target.Replay == replay
}

// unwanted says why an engine that is found is not served unasked; empty: it is.
func (d *discovery) unwanted(e *discover.Engine) string {
	if _, published := e.Published(); published {
		return "it is in another network namespace, and reached only through a published port"
	}
	return d.distrusted(e)
}

// distrusted says why nothing is made of a process that is found; empty: it is.
func (d *discovery) distrusted(e *discover.Engine) string {
	switch {
	case slices.Contains(d.settings().Ignore, e.Name()):
		return "discover.ignore in agent.toml names it"
	case !e.Trusted:
		return fmt.Sprintf("user %d runs it, who is neither root nor a system user", e.UID)
	}
	return ""
}

// watchedAt is the engine that is watched at the place of one that was found;
// nil: there is none.
func (a *Agent) watchedAt(e *discover.Engine) *watched {
	for _, w := range a.watching() {
		u, err := url.Parse(w.target.URL)
		if err != nil || w.target.Kind != e.Kind && w.target.Kind != "generic" {
			continue
		}
		if e.Place == discover.Elsewhere {
			if w.configured && a.reaches(u, e) {
				return w
			}
			continue
		}
		if portOf(u) != fmt.Sprint(e.Port) {
			continue
		}
		if !w.configured {
			if w.target.URL == e.URL() {
				return w
			}
			continue
		}
		if e.Address.IsUnspecified() && a.isOwn(u.Hostname()) || sameHost(u.Hostname(), e.Address.String()) {
			return w
		}
	}
	return nil
}

// reaches says whether a URL leads to an engine in another network namespace:
// through a port of this host's that is forwarded, or at an address of the
// engine's own.
func (a *Agent) reaches(u *url.URL, e *discover.Engine) bool {
	if at, published := e.Published(); published && portOf(u) == fmt.Sprint(at.Port()) && a.isOwn(u.Hostname()) {
		return true
	}
	at, err := netip.ParseAddrPort(net.JoinHostPort(u.Hostname(), portOf(u)))
	return err == nil && e.ReachedAt(at)
}

// isOwn says whether an address is this host's: loopback, or where others reach
// it.
func (a *Agent) isOwn(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback() || sameHost(host, a.hostAddress()) || host == a.name
}

func sameHost(a, b string) bool {
	x, y := net.ParseIP(a), net.ParseIP(b)
	return x != nil && x.Equal(y) || a == "localhost" && y != nil && y.IsLoopback()
}

func portOf(u *url.URL) string {
	if p := u.Port(); p != "" {
		return p
	}
	return map[string]string{"http": "80", "https": "443"}[u.Scheme]
}

// found notes that a watched engine's process is there.
func (d *discovery) found(w *watched, e *discover.Engine) {
	w.mu.Lock()
	before := w.found
	w.found, w.lostAt, w.foundModel = e, time.Time{}, e.Model
	w.mu.Unlock()
	if before == nil {
		d.a.log.Info("engine found", "event", "engine_found", "engine", w.target.Name, "kind", e.Kind, "pid", e.PID, "url", w.target.URL)
	}
	if !w.configured && d.a.ctx.Err() == nil && before == nil {
		w.start(d.a.ctx, &d.a.tasks)
	}
}

// gone notes that the process of a watched engine is not there. One that is
// configured is asked on: it may run where this host does not see it.
func (d *discovery) gone(w *watched, now time.Time) {
	w.mu.Lock()
	before := w.found
	w.found = nil
	if before != nil {
		w.lostAt = now
	}
	lostAt := w.lostAt
	w.mu.Unlock()
	if before != nil {
		d.a.log.Warn("engine lost", "event", "engine_lost", "engine", w.target.Name, "pid", before.PID, "cause", "its process is gone or listens no more")
	}
	if w.configured {
		return
	}
	if before != nil {
		w.stop()
		w.Health(false, fmt.Sprintf("process %d exited or listens no more", before.PID))
	}
	if cfg := d.settings(); !cfg.Enabled || slices.Contains(cfg.Ignore, w.target.Name) || now.Sub(lostAt) >= keepLost {
		d.a.forget(w)
	}
}

// add watches an engine that was found; why says why it cannot be. One that has
// moved to another port takes the place of its former self.
func (d *discovery) add(e *discover.Engine) (why string) {
	name := e.Name()
	for _, w := range d.a.watching() {
		if w.target.Name == name && w.process() != nil {
			return fmt.Sprintf("the name %s is taken by %s: give it a name of its own", name, w.target.URL)
		}
		if w.target.Name == name && w.configured {
			return fmt.Sprintf("the name %s is that of an engine in agent.toml at %s: give one of them another name", name, w.target.URL)
		}
	}
	live, replay := e.Events()
	cfg := EngineConfig{Name: name, Kind: Kind(e.Kind), URL: e.URL(), KVEvents: live, KVReplay: replay, SelfTest: d.settings().SelfTest}
	w, err := d.a.watch(cfg)
	if err != nil {
		return err.Error()
	}
	var moved []string
	for _, old := range d.a.watching() {
		was := old.target.Name == name || e.Model != "" && old.model() == e.Model && old.target.Kind == e.Kind
		if !old.configured && old.process() == nil && was {
			moved = append(moved, old.target.Name)
			d.a.forget(old)
			if old.target.Name != name {
				break
			}
		}
	}
	w.found, w.foundModel = e, e.Model
	d.a.mu.Lock()
	full := len(d.a.index) >= maxRanks
	if !full {
		d.a.engines = append(d.a.engines, w)
	}
	d.a.mu.Unlock()
	if full {
		return "too many engines came and went: restart the agent"
	}
	attrs := []any{"event", "engine_found", "engine", name, "kind", e.Kind, "pid", e.PID, "url", cfg.URL}
	if len(moved) > 0 {
		attrs = append(attrs, "formerly", strings.Join(moved, ","))
	}
	d.a.log.Info("engine found", attrs...)
	if d.a.started.Load() {
		w.start(d.a.ctx, &d.a.tasks)
		d.a.helloChanged()
	}
	return ""
}

// model is the model as the command line of its process named it.
func (w *watched) model() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.foundModel
}

// forget stops watching an engine.
func (a *Agent) forget(w *watched) {
	w.stop()
	mine := map[uint32]bool{}
	for _, r := range w.all() {
		mine[r.index] = true
	}
	a.mu.Lock()
	a.engines = slices.DeleteFunc(a.engines, func(other *watched) bool { return other == w })
	for i := range a.index {
		if mine[uint32(i)] {
			a.index[i] = nil
		}
	}
	a.mu.Unlock()
	a.shareMemory()
	a.helloChanged()
}

// mapGPUs finds the GPUs of each engine, by the processes on them.
func (d *discovery) mapGPUs() {
	reader := d.a.gpus.client()
	if reader == nil {
		return
	}
	view := reader.View()
	if d.a.takeGPUs(view.Devices, d.scanner.Parent) {
		d.a.helloChanged()
	}
	d.lookForStrangers(view.Devices)
}

// takeGPUs notes the GPUs of each engine whose process is known, and reports
// whether any has others than before. What the driver does not tell stays as it
// was.
func (a *Agent) takeGPUs(devices []nvml.Device, parents host.Parents) (changed bool) {
	if len(devices) == 0 {
		return false
	}
	engines := a.watching()
	var pids []int
	for _, w := range engines {
		if e := w.process(); e != nil {
			pids = append(append(pids, e.PID), e.Helpers...)
		}
	}
	m := host.MapGPUs(pids, devices, parents)
	for _, w := range engines {
		e := w.process()
		if e == nil {
			continue
		}
		uuids := slices.Clone(m.UUIDs[e.PID])
		for _, pid := range e.Helpers {
			uuids = append(uuids, m.UUIDs[pid]...)
		}
		if len(e.Helpers) > 0 {
			slices.Sort(uuids)
			uuids = slices.Compact(uuids)
		}
		w.mu.Lock()
		if (len(uuids) > 0 || m.Complete) && !slices.Equal(uuids, w.gpus) {
			w.gpus, changed = uuids, true
		}
		w.mu.Unlock()
	}
	return changed
}
