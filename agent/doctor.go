package agent

import (
	"context"
	"fmt"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"waypost/agent/discover"
	"waypost/agent/engine"
	"waypost/gossip/doctor"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// checks looks at everything that this host knows of itself.
func (a *Agent) checks(now time.Time) *doctor.List {
	l := &doctor.List{}
	a.checkDiscovery(l)
	for _, w := range a.watching() {
		a.checkEngine(l, w)
	}
	a.checkGPUs(l)
	l.Mesh(a.name, a.opt.Version, a.mesh.Members())
	a.checkLanes(l)
	if a.identity != nil {
		l.Certificate(a.name, a.identity.NotAfter(), now)
	}
	facts, _, _ := a.host.Facts()
	var free *float64
	if facts.DiskFreeBytes != nil {
		v := float64(*facts.DiskFreeBytes)
		free = &v
	}
	l.Disk(a.name, a.cfg.StateDir, free)
	return l
}

// subject is the name of an engine of this host.
func (a *Agent) subject(engineName string) string { return a.name + "/" + engineName }

// checkDiscovery tells of the engines that were found and are not served.
func (a *Agent) checkDiscovery(l *doctor.List) {
	d := a.discovery
	d.mu.Lock()
	result, failed, refused, looked := d.result, d.failed, d.refused, d.failed == nil && !d.at.IsZero()
	d.mu.Unlock()
	if failed != nil {
		l.Bad(discover.CheckReachable, a.name, "engines are not looked for", failed.Error(), "list engines as [[engine]] in agent.toml")
	}
	const seeAll = "systemctl edit waypost-agent\n[Service]\nAmbientCapabilities=CAP_SYS_PTRACE"
	if result.Hidden {
		l.Bad(discover.CheckReachable, a.name, "processes of other users are hidden from the agent, and engines among them are not found",
			"/proc is mounted with hidepid, or the unit has ProtectProc", seeAll+"\nor list engines as [[engine]] in agent.toml and set discover.enabled = false")
	}
	if result.Limited != "" {
		l.Add(discover.CheckReachable, doctor.OK, a.name, result.Limited, "", seeAll)
	}
	if result.Over > 0 {
		l.Bad(discover.CheckReachable, a.name, fmt.Sprintf("%d processes or engines are over the bounds and were left out", result.Over), "", "list the engines as [[engine]] in agent.toml")
	}
	a.checkStrangers(l)
	if looked && !result.Hidden && len(result.Engines) == 0 && len(a.watching()) == 0 {
		l.Add(discover.CheckReachable, doctor.Unknown, a.name, "no engine was found on this host", "no process here is started as vLLM, SGLang, TensorRT-LLM or llama.cpp are",
			"start one, or name it in agent.toml\n[[engine]]\nkind = \"generic\"\nurl = \"http://ADDRESS:PORT\"")
	}
	// One that agent.toml names and that is not among this host's processes may be
	// the one in another namespace.
	elsewhere := map[string]int{}
	for _, w := range a.watching() {
		if w.configured && w.process() == nil {
			elsewhere[w.target.Kind]++
		}
	}
	for i := range result.Engines {
		e := &result.Engines[i]
		found := fmt.Sprintf("found pid %d (%s)", e.PID, e.Title)
		subject := a.subject(e.Name())
		switch {
		case e.Orphan:
			l.Bad(discover.CheckReachable, a.name, fmt.Sprintf("%s, a part whose engine is gone; it holds ports %s", found, ports(e.Ports)),
				"the next engine cannot use them, and its GPU memory stays taken", fmt.Sprintf("kill %d", e.PID))
		case e.Group != nil && !e.Group.Front:
			share := fmt.Sprintf("%s, %s of the engine at %s, which is served at its front host", found, e.Group.Part(), e.Group.Meeting)
			if why := d.distrusted(e); why != "" {
				l.Add(discover.CheckReachable, doctor.OK, a.name, share+"; not told to coordinators: "+why, "a fault of its GPUs is then not known at the engine's front", "run it as a system user or in a container")
				break
			}
			l.Good(discover.CheckReachable, a.name, share)
		case e.Place == discover.Elsewhere && a.watchedAt(e) == nil:
			if elsewhere[e.Kind] > 0 {
				elsewhere[e.Kind]--
				continue
			}
			if at, published := e.Published(); published {
				a.checkPublished(l, subject, found, e, at)
				continue
			}
			l.Bad(discover.CheckReachable, subject, fmt.Sprintf("%s in another network namespace, port %d not reachable from the host; publish it or set [[engine]] url", found, e.Port),
				"", fmt.Sprintf("[[engine]]\nkind = %q\nurl = \"http://ADDRESS:%d\"", e.Kind, e.Port))
		case e.Place == discover.Nowhere:
			l.Add(discover.CheckReachable, doctor.Unknown, subject, found+", which listens nowhere yet", "it starts, or its port is not known", "")
		case a.watchedAt(e) != nil:
		case d.unwanted(e) != "":
			l.Add(discover.CheckReachable, doctor.OK, subject, found+", not served: "+d.unwanted(e), "", e.Allow())
		case refused[e.Name()] != "":
			l.Bad(discover.CheckReachable, subject, found+", not served: "+refused[e.Name()], "", "[[engine]]\nname = \"NAME\"\n"+strings.TrimPrefix(e.Allow(), "[[engine]]\n"))
		}
	}
}

// checkPublished tells of an engine in a container that this host reaches through
// a port of its own.
func (a *Agent) checkPublished(l *doctor.List, subject, found string, e *discover.Engine, at netip.AddrPort) {
	fix, missing := e.AllowPublished(at)
	cause := ""
	if len(missing) > 0 {
		cause = fmt.Sprintf("its events are not read without publishing port %s as well", ports(missing))
	}
	l.Bad(discover.CheckReachable, subject, fmt.Sprintf("%s in another network namespace, its port %d is published at %s; set [[engine]] url", found, e.Port, at), cause, fix)
}

func ports(list []int) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(list), " ", ", "), "[]")
}

// checkEngine tells what its flags, its answers and its stream show of a watched
// engine. What is seen goes before what its flags say.
func (a *Agent) checkEngine(l *doctor.List, w *watched) {
	subject, live := a.subject(w.target.Name), w.live()
	if !live.up {
		l.Bad(discover.CheckReachable, subject, w.target.URL+" does not serve", live.reason, "")
	} else {
		l.Good(discover.CheckReachable, subject, fmt.Sprintf("%s serves %s, version %s", w.target.URL, live.facts.Model, orUnknown(live.facts.Version)))
	}
	if u, err := url.Parse(w.advertise); err == nil && a.hostAddress() != "" && sameHost("localhost", u.Hostname()) {
		l.Bad(discover.CheckReachable, subject, w.advertise+" is told to callers on other hosts, who cannot reach it", "advertise_url is a loopback address", "advertise_url = \"http://"+a.hostAddress()+":"+portOf(u)+"\"")
	}
	told := map[string]bool{}
	if e := w.process(); e != nil {
		for _, advice := range e.Advise(discover.Known{Version: live.facts.Version, HasKey: w.target.APIKey != "", Local: a.hostAddress() == ""}) {
			if live.up && live.shows(advice.Check) {
				continue // it was seen to work
			}
			if advice.State == discover.Problem {
				told[advice.Check] = true
			}
			if advice.State != discover.OK || !live.up || !live.contradicts(advice.Check) {
				l.Add(advice.Check, string(advice.State), subject, advice.What, advice.Cause, advice.Fix)
			}
		}
	}
	if live.up {
		live.check(l, subject, w.target.Kind, told)
		checkTokenizer(l, subject, w.prober.able(live.facts.Capabilities).Has(engine.TokenizesText), w.prober)
	}
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}

// engineState is what is seen of an engine now.
type engineState struct {
	up       bool
	reason   string
	facts    engine.Facts
	coverage engine.Coverage // the least of its ranks
	hint     string
	ranks    int
}

// live is what is seen of the engine now: of the rank that shows least.
func (w *watched) live() (s engineState) {
	order := map[engine.Coverage]int{engine.CoverageNone: 0, engine.CoveragePartial: 1, engine.CoverageFull: 2}
	for i, r := range w.all() {
		r.mu.Lock()
		if i == 0 {
			s = engineState{up: r.up && r.known, reason: r.reason, facts: r.facts, coverage: r.coverage, hint: r.hint}
		} else if order[r.coverage] < order[s.coverage] {
			s.coverage, s.hint = r.coverage, fmt.Sprintf("rank %d: %s", r.number, r.hint)
		}
		s.ranks++
		r.mu.Unlock()
	}
	if s.ranks == 0 {
		s.reason = "not reached yet"
	}
	return s
}

// shows says whether what a check asks for was seen to work.
func (s *engineState) shows(check string) bool {
	return (check == discover.CheckEvents || check == discover.CheckReplay) && s.coverage == engine.CoverageFull
}

// contradicts says whether the stream shows less than the flags promise.
func (s *engineState) contradicts(check string) bool {
	return (check == discover.CheckEvents || check == discover.CheckReplay) && s.coverage != engine.CoverageFull && s.hint != ""
}

// check tells what the answers and the stream of an engine show; told are the
// checks that its flags explain already.
func (s *engineState) check(l *doctor.List, subject, kind string, told map[string]bool) {
	if kind == "vllm" || kind == "sglang" || kind == "trtllm" {
		s.checkStream(l, subject, told)
		if s.facts.BlockTokens == 0 && !told[discover.CheckBlockSize] {
			l.Bad(discover.CheckBlockSize, subject, "the engine does not tell the size of its blocks", "its page of counters is off or has no configuration", "start it without --disable-log-stats")
		} else if s.facts.BlockTokens > 0 {
			l.Good(discover.CheckBlockSize, subject, fmt.Sprintf("%d tokens per block, as the engine says", s.facts.BlockTokens))
		}
	}
}

// checkTokenizer tells whether an engine tells token ids, by the answers to the
// probes of its boundary.
func checkTokenizer(l *doctor.List, subject string, able bool, p *prober) {
	const check = "tokenizer-probe"
	const taught = "requests given as text find their tokens by what callers and answers teach"
	answered, refused, why := p.tellsIDs()
	switch {
	case !able && why == nil:
		l.Add(check, doctor.Unknown, subject, "the engine tells no token ids", taught, "")
	case !able:
		l.Add(check, doctor.Unknown, subject, "the engine tells no token ids: "+why.Error(), taught, "")
	case answered == 0 && why == nil:
		l.Add(check, doctor.Unknown, subject, "the engine was not asked for token ids yet", "", "")
	case answered == 0:
		l.Bad(check, subject, "the engine does not answer when it is asked for token ids: "+why.Error(), taught, "see the engine's log, and waypost boundary")
	case refused > 0:
		l.Add(check, doctor.OK, subject, fmt.Sprintf("the engine tells token ids; of the probes of its boundary it refused %d: %v", refused, why), "what it refuses is not compared with other workers", "")
	default:
		l.Good(check, subject, "the engine tells token ids")
	}
}

func (s *engineState) checkStream(l *doctor.List, subject string, told map[string]bool) {
	switch {
	case s.coverage == engine.CoverageFull:
		l.Good(discover.CheckEvents, subject, "cache view live")
		l.Good(discover.CheckReplay, subject, "replay reaches back to the start")
	case told[discover.CheckEvents] || s.hint == "":
	case s.coverage == engine.CoverageNone:
		l.Bad(discover.CheckEvents, subject, "no event of the engine's cache arrives", s.hint, fixIn(s.hint))
	case strings.Contains(s.hint, "replay") || strings.Contains(s.hint, "buffer_steps"):
		if !told[discover.CheckReplay] {
			l.Bad(discover.CheckReplay, subject, "cache view partial", s.hint, fixIn(s.hint))
		}
	default:
		l.Add(discover.CheckEvents, doctor.Unknown, subject, "cache view partial", s.hint, "")
	}
}

// fixIn is the part of a hint that tells what to do.
func fixIn(hint string) string {
	if _, fix, ok := strings.Cut(hint, ": "); ok {
		return fix
	}
	return hint
}

// checkLanes tells the state of the way to each coordinator, and of its clock.
func (a *Agent) checkLanes(l *doctor.List) {
	all := a.dialer.Status()
	if len(all) == 0 {
		l.Bad("lane", a.name, "no coordinator is known", "neither cluster.coordinators nor the mesh names one", "[cluster]\ncoordinators = [\"HOST:7711\"]")
	}
	for _, s := range all {
		name := orUnknown(s.Coordinator)
		switch s.State {
		case lane.StateUp, lane.StateAlias:
			l.Good("lane", a.name, fmt.Sprintf("lane to %s at %s is %s", name, s.Address, s.State))
		case lane.StateConnecting:
			l.Add("lane", doctor.Unknown, a.name, fmt.Sprintf("lane to %s at %s is being dialled", name, s.Address), s.Error, "")
		default:
			l.Bad("lane", a.name, fmt.Sprintf("lane to %s at %s is %s", name, s.Address, s.State), s.Error, "waypost doctor --ports")
		}
	}
	for coordinator, ahead := range a.lanes.clocks() {
		l.Clock(a.name, coordinator, ahead)
	}
}

// Doctor answers from what this host knows.
func (s *localServer) Doctor(ctx context.Context, req *waypostv1.DoctorRequest) (*waypostv1.DoctorResponse, error) {
	a := s.a
	if host := req.GetHost(); host != "" && host != a.name {
		return nil, status.Errorf(codes.Unavailable, "this is the agent of %s; ask a coordinator about %s with --addr", a.name, host)
	}
	a.discovery.look(time.Now())
	l := a.checks(time.Now())
	if req.GetPorts() {
		l.Ports(ctx, a.name, append(doctor.Targets(a.mesh.Members()), a.dialled()...))
	}
	return &waypostv1.DoctorResponse{Checks: l.Sorted(), AnsweredBy: &a.name}, nil
}

// dialled are the addresses at which coordinators are dialled and the mesh does
// not name them.
func (a *Agent) dialled() (out []doctor.Target) {
	known := map[string]bool{}
	for _, t := range doctor.Targets(a.mesh.Members()) {
		known[t.Address] = true
	}
	for _, s := range a.dialer.Status() {
		if !known[s.Address] {
			out = append(out, doctor.Target{Name: orUnknown(s.Coordinator), Use: "lanes", Address: s.Address})
		}
	}
	return out
}
