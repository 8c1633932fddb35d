package registry

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// attribute is one value of a fleet file as people read it.
type attribute struct {
	name, text string
	// exact tells apart what reads the same; empty: the text does.
	exact  string
	source Source
	// identity says that an added section is not described by it.
	identity bool
}

// Diff says what a new fleet file changes, one line each: "~ policy …", then
// "+", "-" or "~" for zones, racks, links, groups, pools and tenants, by name. A link
// is never new or gone, because there is always some path: a line for it
// compares what is in force between its ends before and after. What only becomes
// explicit changes nothing and gives no line.
func Diff(old, new *Fleet) []string {
	var out []string
	if c := changes(policyAttributes(&old.Policy), policyAttributes(&new.Policy)); c != "" {
		out = append(out, "~ policy  "+c)
	}
	out = append(out, diffSection("zone", old.Zones, new.Zones, func(z *Zone) (string, []attribute) {
		return z.Name, []attribute{listAttribute("hosts", joinTexts(z.Hosts)), listAttribute("networks", joinTexts(z.Networks))}
	})...)
	out = append(out, diffSection("rack", old.Racks, new.Racks, func(r *Rack) (string, []attribute) {
		return r.Name, []attribute{{name: "zone", text: r.Zone, source: Declared}, listAttribute("hosts", joinTexts(r.Hosts))}
	})...)
	out = append(out, diffLinks(old, new)...)
	out = append(out, diffSection("group", old.Groups, new.Groups, func(g *Group) (string, []attribute) {
		return g.Name, []attribute{listAttribute("hosts", joinTexts(g.Hosts))}
	})...)
	out = append(out, diffSection("pool", old.Pools, new.Pools, poolAttributes)...)
	return append(out, diffSection("tenant", old.Tenants, new.Tenants, tenantAttributes)...)
}

func policyAttributes(p *Policy) []attribute {
	text := func(name string, s Sourced[[]string]) attribute {
		return attribute{name: "gpu." + name, text: strings.Join(s.Value, " "), source: s.Source}
	}
	return []attribute{
		{name: "objective", text: string(p.Objective.Value), source: p.Objective.Source},
		{name: "own_delay_limit", text: p.OwnDelayLimit.Value.String(), source: p.OwnDelayLimit.Source},
		{name: "if_infeasible", text: string(p.IfInfeasible.Value), source: p.IfInfeasible.Source},
		durationAttribute("unplaceable_after.agent_silent", p.AgentSilentFor),
		durationAttribute("unplaceable_after.no_progress", p.NoProgressFor),
		text("exclude", p.GPU.Exclude), text("price", p.GPU.Price), text("ignore", p.GPU.Ignore),
	}
}

func poolAttributes(p *Pool) (string, []attribute) {
	return p.Name, []attribute{
		{name: "model", text: p.Model, source: Declared, identity: true},
		{name: "workers", text: joinTexts(p.Workers.Value), source: p.Workers.Source},
		{name: "tenants", text: joinTexts(p.Tenants.Value), source: p.Tenants.Source},
		{name: "stay_in", text: string(p.StayIn.Value), source: p.StayIn.Source},
		durationAttribute("max_transfer", p.MaxTransfer),
		durationAttribute("slo.ttft", p.TTFT),
		durationAttribute("slo.itl", p.ITL),
	}
}

func tenantAttributes(t *Tenant) (string, []attribute) {
	return t.Name, []attribute{
		{name: "share", text: strconv.Itoa(t.Share.Value), source: t.Share.Source},
		{name: "max_inflight_tokens", text: strconv.FormatInt(t.MaxInflightTokens.Value, 10), source: t.MaxInflightTokens.Source},
		listAttribute("cache_salts", joinTexts(t.CacheSalts)),
		listAttribute("api_key_sha256", joinTexts(shortKeys(t.APIKeySHA256))),
		listAttribute("networks", joinTexts(t.Networks)),
	}
}

// shortKey is a digest cut down to what tells it from others.
type shortKey string

func (k shortKey) String() string { return string(k[:8]) + "…" }

func shortKeys(digests []string) []shortKey {
	out := make([]shortKey, len(digests))
	for i, d := range digests {
		out[i] = shortKey(d)
	}
	return out
}

func listAttribute(name, text string) attribute {
	if text == "" {
		return attribute{name: name, source: NotSet}
	}
	return attribute{name: name, text: text, source: Declared}
}

func durationAttribute(name string, d Sourced[time.Duration]) attribute {
	return attribute{name: name, text: formatDuration(d.Value), source: d.Source}
}

func pathAttributes(p Path) []attribute {
	return []attribute{
		{
			name: "bandwidth", text: formatBandwidth(p.BandwidthBytesPerSec.Value),
			exact:  strconv.FormatUint(p.BandwidthBytesPerSec.Value, 10) + " B/s",
			source: p.BandwidthBytesPerSec.Source,
		},
		durationAttribute("latency", p.Latency),
		{name: "transfer", text: string(p.Transfer.Value), source: p.Transfer.Source},
		durationAttribute("place_surcharge", p.PlaceSurcharge),
	}
}

// changes lists the attributes that differ, empty if none does.
func changes(old, new []attribute) string {
	var out []string
	for i, n := range new {
		o := old[i]
		from, to := o.value(), n.value()
		if from == to && o.exact != n.exact {
			from, to = o.exact, n.exact
		}
		if from == to {
			continue
		}
		if o.source != n.source && o.source != NotSet && n.source != NotSet {
			from, to = string(o.source)+" "+from, string(n.source)+" "+to
		}
		out = append(out, n.name+" "+from+" → "+to)
	}
	return strings.Join(out, ", ")
}

func (a attribute) value() string {
	if a.source == NotSet {
		return "none"
	}
	return a.text
}

// diffSection compares two lists of named sections.
func diffSection[T any](word string, old, new []T, describe func(*T) (string, []attribute)) []string {
	type entry struct {
		name       string
		old, new   []attribute
		inOld, now bool
	}
	entries := map[string]*entry{}
	at := func(name string) *entry {
		if entries[name] == nil {
			entries[name] = &entry{name: name}
		}
		return entries[name]
	}
	for i := range old {
		name, attributes := describe(&old[i])
		e := at(name)
		e.old, e.inOld = attributes, true
	}
	for i := range new {
		name, attributes := describe(&new[i])
		e := at(name)
		e.new, e.now = attributes, true
	}
	var out []string
	for _, name := range sortedKeys(entries) {
		switch e := entries[name]; {
		case !e.now:
			out = append(out, fmt.Sprintf("- %s  %s", word, name))
		case !e.inOld:
			out = append(out, strings.TrimRight(fmt.Sprintf("+ %s  %s  %s", word, name, declared(e.new)), " "))
		default:
			if c := changes(e.old, e.new); c != "" {
				out = append(out, fmt.Sprintf("~ %s  %s  %s", word, name, c))
			}
		}
	}
	return out
}

// declared lists what a new section says beyond its identity.
func declared(attributes []attribute) string {
	var out []string
	for _, a := range attributes {
		if a.source == Declared && !a.identity {
			out = append(out, a.name+" "+a.text)
		}
	}
	return strings.Join(out, ", ")
}

func diffLinks(old, new *Fleet) []string {
	ends := map[scopePair][2]Scope{}
	for _, f := range []*Fleet{old, new} {
		for i := range f.Links {
			ends[pairOf(f.Links[i].Between[0], f.Links[i].Between[1])] = f.Links[i].Between
		}
	}
	type line struct{ name, text string }
	var lines []line
	for _, between := range ends {
		before := pathAttributes(old.PathBetween(old.placeOf(between[0]), old.placeOf(between[1])))
		after := pathAttributes(new.PathBetween(new.placeOf(between[0]), new.placeOf(between[1])))
		if c := changes(before, after); c != "" {
			name := between[0].String() + " ↔ " + between[1].String()
			lines = append(lines, line{name, fmt.Sprintf("~ link  %s   %s", name, c)})
		}
	}
	slices.SortFunc(lines, func(a, b line) int { return cmp.Compare(a.name, b.name) })
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = l.text
	}
	return out
}

// placeOf is where the hosts of one end of a link stand.
func (f *Fleet) placeOf(s Scope) Place {
	switch {
	case s.Kind == ScopeHost:
		return f.HostPlace(s.Name)
	case len(f.Racks)+len(f.Zones) == 0:
		return Place{Zone: DefaultZone, Source: Assumed}
	case s.Kind == ScopeZone:
		return Place{Zone: s.Name, Source: Declared}
	}
	for _, r := range f.Racks {
		if r.Name == s.Name {
			return Place{Rack: r.Name, Zone: r.Zone, Source: Declared}
		}
	}
	return Place{Source: NotSet}
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
