package registry

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// fleetKeys are all keys of a fleet file, for suggestions.
var fleetKeys = []string{
	"version", "policy", "zone", "rack", "link", "group", "pool", "tenant",
	"policy.objective", "policy.own_delay_limit", "policy.if_infeasible", "policy.unplaceable_after", "policy.gpu",
	"policy.unplaceable_after.agent_silent", "policy.unplaceable_after.no_progress",
	"policy.gpu.exclude", "policy.gpu.price", "policy.gpu.ignore",
	"zone.name", "zone.hosts", "zone.networks", "rack.name", "rack.zone", "rack.hosts",
	"link.between", "link.bandwidth", "link.latency", "link.transfer", "link.place_surcharge",
	"group.name", "group.hosts",
	"pool.name", "pool.model", "pool.workers", "pool.tenants", "pool.stay_in", "pool.max_transfer", "pool.slo", "pool.slo.ttft", "pool.slo.itl",
	"tenant.name", "tenant.share", "tenant.max_inflight_tokens", "tenant.cache_salts", "tenant.api_key_sha256", "tenant.networks",
}

// ParseFleet reads a fleet file strictly. file names it in errors, which are a
// *FleetError. An empty text is the empty fleet.
func ParseFleet(file, text string) (*Fleet, error) { return parseFleet(file, text, false) }

// parseFleet is lenient about unknown keys if told so.
func parseFleet(file, text string, lenient bool) (*Fleet, error) {
	if len(text) > MaxFleetBytes {
		p := Problem{Detail: fmt.Sprintf("it has %d bytes, at most %d; name hosts by patterns such as gpu-[001-200]", len(text), MaxFleetBytes)}
		return nil, &FleetError{File: file, Problems: []Problem{p}}
	}
	doc, top, err := openDocument(file, text, lenient)
	if err != nil {
		return nil, err
	}
	if v, ok := top.get("version"); ok && v != int64(1) {
		top.problem("version", "it is %s; this version of waypost reads version 1", describe(v))
	}
	r := &reader{f: EmptyFleet(), zones: doc.namesOf("zone"), racks: doc.namesOf("rack"), tenants: doc.namesOf("tenant", DefaultTenant)}
	f := r.f
	f.Policy = readPolicy(top.table("policy"))
	f.Zones = readAll(top, "zone", r.zone, func(z Zone) string { return z.Name })
	f.Racks = readAll(top, "rack", r.rack, func(k Rack) string { return k.Name })
	f.Links = r.links(top)
	f.Groups = readAll(top, "group", r.group, func(g Group) string { return g.Name })
	f.Tenants = readAll(top, "tenant", r.tenant, func(t Tenant) string { return t.Name })
	f.Pools = readAll(top, "pool", r.pool, func(p Pool) string { return p.Name })
	top.done(fleetKeys)
	checkHostsOnce(top, f)
	checkTenantsApart(top, f)
	if err := doc.err(); err != nil {
		return nil, err
	}
	f.buildIndex()
	return f, nil
}

// reader reads sections that refer to each other.
type reader struct {
	f                     *Fleet
	zones, racks, tenants *names
}

// readAll reads an array of tables whose entries have unique names.
func readAll[T any](top *section, key string, read func(*section) T, name func(T) string) []T {
	var out []T
	first := map[string]int{}
	for _, s := range top.tables(key) {
		v := read(s)
		s.done(fleetKeys)
		if n := name(v); n != "" {
			if line, dup := first[n]; dup {
				s.problem("name", "%q is the name of the %s in line %d already", n, key, line)
			} else {
				first[n] = s.line
			}
		}
		out = append(out, v)
	}
	return out
}

func readPolicy(s *section) Policy {
	p := EmptyFleet().Policy
	choose(s, "objective", &p.Objective, ObjectiveFirstToken, ObjectiveBalanced, ObjectiveThroughput)
	choose(s, "if_infeasible", &p.IfInfeasible, BestEffort, Reject, RetryAfter)
	parse(s, "own_delay_limit", "50% + 200ms", &p.OwnDelayLimit, parseDelayLimit)
	after := s.table("unplaceable_after")
	parse(after, "agent_silent", "30s", &p.AgentSilentFor, parseSilence)
	parse(after, "no_progress", "10s", &p.NoProgressFor, parsePositive)
	after.done(fleetKeys)
	gpu := s.table("gpu")
	p.GPU = readGPUPolicy(gpu)
	gpu.done(fleetKeys)
	s.done(fleetKeys)
	return p
}

func (r *reader) zone(s *section) Zone {
	z := Zone{Name: readName(s), Hosts: readPatterns(s, "hosts", "gpu-0[1-3]"), Networks: readNetworks(s)}
	r.zones.add(z.Name)
	return z
}

func (r *reader) rack(s *section) Rack {
	k := Rack{Name: readName(s), Hosts: readPatterns(s, "hosts", "gpu-0[1-3]")}
	if zone, ok := s.needText("zone", "a", "a rack stands in a zone"); ok {
		k.Zone = zone
		if fault := r.zoneFault(zone); fault != "" {
			s.problem("zone", "%s", fault)
		}
	}
	r.racks.add(k.Name)
	return k
}

// zoneFault wants a proper name, and one of the declared zones if there are any.
func (r *reader) zoneFault(zone string) string {
	if fault := nameFault(zone); fault != "" || len(r.zones.list) == 0 {
		return fault
	}
	return r.zones.fault(zone)
}

func (r *reader) tenant(s *section) Tenant {
	t := Tenant{Name: readName(s), Share: Sourced[int]{1, Assumed}, MaxInflightTokens: Sourced[int64]{Source: NotSet}, Networks: readNetworks(s)}
	if n, ok := s.count("share", 1, 1_000_000); ok {
		t.Share = Sourced[int]{int(n), Declared}
	}
	if n, ok := s.count("max_inflight_tokens", 1, 1_000_000_000_000); ok {
		t.MaxInflightTokens = Sourced[int64]{n, Declared}
	}
	salts, given := s.texts("cache_salts", "team-a-*")
	for i, text := range salts {
		pattern, err := ParsePattern(text)
		if err != nil {
			s.problemAt("cache_salts", i, "%v", err)
			continue
		}
		t.CacheSalts = append(t.CacheSalts, pattern)
	}
	if given && len(salts) == 0 {
		s.problem("cache_salts", "it is empty; leave it out for a tenant without salts of its own")
	}
	keys, _ := s.texts("api_key_sha256", strings.Repeat("0", 64))
	for i, k := range keys {
		k = strings.ToLower(k)
		if raw, err := hex.DecodeString(k); err != nil || len(raw) != 32 {
			s.problemAt("api_key_sha256", i, "it is not 64 hexadecimal digits; make it with: printf %%s KEY | sha256sum")
			continue
		}
		t.APIKeySHA256 = append(t.APIKeySHA256, k)
	}
	r.tenants.add(t.Name)
	return t
}

func (r *reader) pool(s *section) Pool {
	p := poolDefaults()
	p.Name, p.Source = readName(s), Declared
	if model, ok := s.needText("model", "Qwen/Qwen3-32B", "a pool serves one model, named as its engines name it"); ok {
		p.Model = model
		if fault := textFault(model, true, maxReasonBytes); fault != "" {
			s.problem("model", "%s", fault)
		}
	}
	if texts, ok := s.texts("workers", "gpu-*/vllm-*"); ok {
		p.Workers = Sourced[[]WorkerPattern]{nil, Declared}
		for i, t := range texts {
			w, err := ParseWorkerPattern(t)
			if err != nil {
				s.problemAt("workers", i, "%v", err)
			}
			p.Workers.Value = append(p.Workers.Value, w)
		}
		if len(texts) == 0 {
			s.problem("workers", `it is empty, so nothing could join; leave it out, or say ["*"]`)
		}
	}
	r.poolTenants(s, &p)
	choose(s, "stay_in", &p.StayIn, StayInNone, StayInZone, StayInRack)
	parse(s, "max_transfer", "300ms", &p.MaxTransfer, parseDuration)
	slo := s.table("slo")
	parse(slo, "ttft", "2s", &p.TTFT, parsePositive)
	parse(slo, "itl", "80ms", &p.ITL, parsePositive)
	slo.done(fleetKeys)
	return p
}

func (r *reader) poolTenants(s *section, p *Pool) {
	texts, ok := s.texts("tenants", "*")
	if !ok {
		return
	}
	p.Tenants = Sourced[[]Pattern]{nil, Declared}
	for i, text := range texts {
		pattern, err := ParsePattern(text)
		if err != nil {
			s.problemAt("tenants", i, "%v", err)
			continue
		}
		if name, ok := pattern.literal(); ok {
			if fault := r.tenants.fault(name); fault != "" {
				s.problemAt("tenants", i, "%s", fault)
			}
		}
		p.Tenants.Value = append(p.Tenants.Value, pattern)
	}
	if len(texts) == 0 {
		s.problem("tenants", `it is empty, so nobody could use the pool; leave it out, or say ["*"]`)
	}
}

func (r *reader) links(top *section) []Link {
	var out []Link
	first := map[scopePair]int{}
	for _, s := range top.tables("link") {
		l, ok := r.link(s)
		s.done(fleetKeys)
		if !ok {
			continue
		}
		pair := pairOf(l.Between[0], l.Between[1])
		if line, dup := first[pair]; dup {
			s.problem("between", "%s ↔ %s is the link in line %d already", l.Between[0], l.Between[1], line)
			continue
		}
		first[pair] = s.line
		out = append(out, l)
	}
	return out
}

func (r *reader) link(s *section) (Link, bool) {
	var l Link
	ends, ok := s.texts("between", "rack:a1")
	switch _, there := s.values["between"]; {
	case !there:
		s.problem("between", `it is missing; it is two ends such as ["rack:a1", "zone:b"]`)
	case ok && len(ends) != 2:
		ok = false
		s.problem("between", `it has %d, want two ends such as ["rack:a1", "zone:b"]`, len(ends))
	case ok:
		for i, e := range ends {
			scope, fault := r.scope(e)
			if fault != "" {
				s.problemAt("between", i, "%s", fault)
				ok = false
			}
			l.Between[i] = scope
		}
	}
	assumed := r.f.assumedLink(l.Between)
	l.BandwidthBytesPerSec, l.Latency = assumed.BandwidthBytesPerSec, assumed.Latency
	l.Transfer, l.PlaceSurcharge = assumed.Transfer, assumed.PlaceSurcharge
	parse(s, "bandwidth", "100Gbit/s", &l.BandwidthBytesPerSec, parseBandwidth)
	parse(s, "latency", "20us", &l.Latency, parseDuration)
	choose(s, "transfer", &l.Transfer, TransferAllow, TransferNever)
	parse(s, "place_surcharge", "15ms", &l.PlaceSurcharge, parseDuration)
	return l, ok
}

// scope reads one end of a link, and what is wrong with it.
func (r *reader) scope(text string) (scope Scope, fault string) {
	kind, name, _ := strings.Cut(text, ":")
	scope = Scope{ScopeKind(kind), name}
	switch scope.Kind {
	case ScopeRack:
		return scope, r.racks.fault(name)
	case ScopeZone:
		return scope, r.zoneFault(name)
	case ScopeHost:
		return scope, nameFault(name)
	}
	return scope, fmt.Sprintf("%q is not rack:NAME, zone:NAME or host:NAME", clip(text, 60))
}

func readName(s *section) string {
	name, ok := s.needText("name", "a1", "it is how everything else refers to this")
	if !ok {
		return ""
	}
	if fault := nameFault(name); fault != "" {
		s.problem("name", "%s", fault)
		return ""
	}
	return name
}

func readPatterns(s *section, key, example string) []Pattern {
	texts, _ := s.texts(key, example)
	var out []Pattern
	for i, t := range texts {
		p, err := ParsePattern(t)
		if err != nil {
			s.problemAt(key, i, "%v", err)
			continue
		}
		out = append(out, p)
	}
	return out
}

func readNetworks(s *section) []netip.Prefix {
	texts, _ := s.texts("networks", "10.0.0.0/16")
	var out []netip.Prefix
	for i, t := range texts {
		p, err := netip.ParsePrefix(t)
		if err != nil || p != p.Masked() {
			s.problemAt("networks", i, "%q is not a network such as 10.0.0.0/16", clip(t, 60))
			continue
		}
		out = append(out, p)
	}
	return out
}

// choose reads one of the allowed words into v.
func choose[T ~string](s *section, key string, v *Sourced[T], allowed ...T) {
	text, ok := s.text(key, string(allowed[0]))
	if !ok {
		return
	}
	words := make([]string, len(allowed))
	for i, a := range allowed {
		words[i] = string(a)
		if text == words[i] {
			*v = Sourced[T]{a, Declared}
			return
		}
	}
	last := len(words) - 1
	s.problem(key, "%q is not %s or %s%s", clip(text, 60), strings.Join(words[:last], ", "), words[last], didYouMean(text, words))
}

// parse reads a text by its parser into v.
func parse[T any](s *section, key, example string, v *Sourced[T], parser func(string) (T, error)) {
	text, ok := s.text(key, example)
	if !ok {
		return
	}
	value, err := parser(text)
	if err != nil {
		s.problem(key, "%v", err)
		return
	}
	*v = Sourced[T]{value, Declared}
}

func parsePositive(s string) (time.Duration, error) {
	d, err := parseDuration(s)
	if err == nil && d == 0 {
		err = fmt.Errorf("%q is not above 0", clip(s, 40))
	}
	return d, err
}

// What a lane does of itself: a host that has something to say reports every
// reportEvery, and a lane that cannot write for writeStall is closed.
const (
	reportEvery = 200 * time.Millisecond
	writeStall  = 2 * time.Second
)

// parseSilence reads how long a host may be silent. Less than a lane may stall
// would take healthy hosts for silent ones.
func parseSilence(s string) (time.Duration, error) {
	d, err := parsePositive(s)
	if err == nil && d < writeStall {
		err = fmt.Errorf("%q is too short: hosts report every %s, and a lane may stall for %s; use at least %s", clip(s, 40), reportEvery, writeStall, writeStall)
	}
	return d, err
}

// checkHostsOnce reports a host that is written out in two places.
func checkHostsOnce(top *section, f *Fleet) {
	seen := map[string]string{}
	check := func(key string, i int, where string, hosts []Pattern) {
		s := &section{doc: top.doc, path: join(key, strconv.Itoa(i)), name: key, line: top.doc.lines[join(key, strconv.Itoa(i))]}
		for j, h := range hosts {
			if other, dup := seen[h.String()]; dup && other != where {
				s.problemAt("hosts", j, "%q is in %s already; a host has one place", h, other)
			}
			seen[h.String()] = where
		}
	}
	for i, r := range f.Racks {
		check("rack", i, "rack "+r.Name, r.Hosts)
	}
	for i, z := range f.Zones {
		check("zone", i, "zone "+z.Name, z.Hosts)
	}
}

// checkTenantsApart reports a key, network or salt that two tenants claim.
func checkTenantsApart(top *section, f *Fleet) {
	owner := map[string]string{}
	for i, t := range f.Tenants {
		s := &section{doc: top.doc, path: join("tenant", strconv.Itoa(i)), name: "tenant", line: top.doc.lines[join("tenant", strconv.Itoa(i))]}
		claim := func(key, what, value string) {
			if other, dup := owner[value]; dup && other != t.Name {
				s.problem(key, "%s belongs to tenant %q already", what, other)
			}
			owner[value] = t.Name
		}
		for _, k := range t.APIKeySHA256 {
			claim("api_key_sha256", "the key "+k[:8]+"…", k)
		}
		for _, p := range t.CacheSalts {
			claim("cache_salts", "the salt "+p.String(), "salt "+p.String())
		}
		for _, n := range t.Networks {
			claim("networks", n.String(), n.String())
		}
	}
}
