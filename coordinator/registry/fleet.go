package registry

import (
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Source says where a value comes from.
type Source string

// The sources of values.
const (
	// Declared in the fleet file.
	Declared Source = "declared"
	// Assumed because the file does not say.
	Assumed Source = "assumed"
	// NotSet: there is no such limit, or nothing is known.
	NotSet Source = "none"
)

// Sourced is a value and where it comes from.
type Sourced[T any] struct {
	Value  T
	Source Source
}

// Get returns the value, and false if none is set.
func (s Sourced[T]) Get() (T, bool) { return s.Value, s.Source != NotSet && s.Source != "" }

// Fleet is a fleet file with every default filled in. It is read only.
type Fleet struct {
	Policy Policy
	// In the order of the file.
	Zones   []Zone
	Racks   []Rack
	Links   []Link
	Groups  []Group
	Pools   []Pool
	Tenants []Tenant

	linkIndex map[scopePair]int
}

// Policy is how placements weigh things and what takes a worker out.
type Policy struct {
	Objective Sourced[Objective]
	// OwnDelayLimit bounds what consideration for others may cost a request.
	OwnDelayLimit Sourced[DelayLimit]
	IfInfeasible  Sourced[IfInfeasible]
	// AgentSilentFor is how long a host may be silent before its workers are
	// not placed on.
	AgentSilentFor Sourced[time.Duration]
	// NoProgressFor is how long an engine with work may stand still.
	NoProgressFor Sourced[time.Duration]
	GPU           GPUPolicy
}

// Objective is a named preference between own and others' delay.
type Objective string

// The objectives.
const (
	ObjectiveFirstToken Objective = "first-token"
	ObjectiveBalanced   Objective = "balanced"
	ObjectiveThroughput Objective = "throughput"
)

// Theta is the weight of one ms of token gap against one ms of first token.
func (o Objective) Theta() float64 {
	switch o {
	case ObjectiveFirstToken:
		return 1
	case ObjectiveThroughput:
		return 20
	}
	return 5
}

// IfInfeasible is what to answer when no budget can be met and the request does
// not say.
type IfInfeasible string

// The answers.
const (
	BestEffort IfInfeasible = "best-effort"
	Reject     IfInfeasible = "reject"
	RetryAfter IfInfeasible = "retry-after"
)

// GPUPolicy lists conditions of a GPU by what they do to its workers. An entry
// is "xid:48,63" or the name of a condition. No condition is in two lists: one
// that is declared in a list is not in the assumed value of another.
type GPUPolicy struct {
	Exclude Sourced[[]string]
	Price   Sourced[[]string]
	Ignore  Sourced[[]string]
}

// Zone is a part of the fleet that is far from the others.
type Zone struct {
	Name string
	// Hosts that are in the zone without a rack.
	Hosts []Pattern
	// Networks are the addresses of its hosts and callers.
	Networks []netip.Prefix
}

// Rack is a group of hosts behind one switch.
type Rack struct {
	Name  string
	Zone  string
	Hosts []Pattern
}

// ScopeKind says what one end of a link is.
type ScopeKind string

// The kinds of link ends, from the widest.
const (
	ScopeZone ScopeKind = "zone"
	ScopeRack ScopeKind = "rack"
	ScopeHost ScopeKind = "host"
)

// Scope is one end of a link.
type Scope struct {
	Kind ScopeKind
	Name string
}

// String is "rack a1".
func (s Scope) String() string { return string(s.Kind) + " " + s.Name }

// TransferRule says whether saved KV may cross a link.
type TransferRule string

// The transfer rules.
const (
	TransferAllow TransferRule = "allow"
	TransferNever TransferRule = "never"
)

// Link is what joins two scopes, the same in both directions. A link of a scope
// with itself joins different hosts inside it; one of a host with itself joins
// the workers of that host.
type Link struct {
	Between [2]Scope
	// BandwidthBytesPerSec is the line rate.
	BandwidthBytesPerSec Sourced[uint64]
	// Latency is one way.
	Latency  Sourced[time.Duration]
	Transfer Sourced[TransferRule]
	// PlaceSurcharge is what crossing costs in the comparison of workers, on
	// top of the round trip.
	PlaceSurcharge Sourced[time.Duration]

	name string
}

// StayIn says how far from its caller or prefix a pool's request may go.
type StayIn string

// The limits.
const (
	StayInNone StayIn = "none"
	StayInZone StayIn = "zone"
	StayInRack StayIn = "rack"
)

// Pool is a set of workers that may serve the same requests.
type Pool struct {
	Name string
	// Model is the served model a worker must have.
	Model string
	// Source is Assumed for the pool of a model that no file names.
	Source Source
	// Workers that may join, by name.
	Workers Sourced[[]WorkerPattern]
	// Tenants that may use it.
	Tenants Sourced[[]Pattern]
	StayIn  Sourced[StayIn]
	// MaxTransfer bounds the time that what is asked of a source of saved KV may take.
	MaxTransfer Sourced[time.Duration]
	// TTFT is the time to first token the pool is meant to keep.
	TTFT Sourced[time.Duration]
	// ITL is the time between tokens the pool is meant to keep.
	ITL Sourced[time.Duration]
}

// AdmitsTenant says whether a tenant may use the pool.
func (p *Pool) AdmitsTenant(tenant string) bool {
	return matchAny(p.Tenants.Value, tenant)
}

// DefaultTenant is the tenant of requests that name none.
const DefaultTenant = "default"

// Tenant is who sends requests.
type Tenant struct {
	Name string
	// Share is the weight under contention, in uncached prefill tokens, from 1.
	Share Sourced[int]
	// MaxInflightTokens bounds prompt tokens under way.
	MaxInflightTokens Sourced[int64]
	// CacheSalts are the tenant's own salts. With any, its requests carry one of
	// them and nobody else's do, so that it sees reuse only inside its own.
	CacheSalts []Pattern
	// APIKeySHA256 are digests of gateway keys, 64 hex digits each.
	APIKeySHA256 []string
	// Networks are the addresses of callers without a key.
	Networks []netip.Prefix
}

// Tenant returns the tenant of a name. One that the file does not name has
// share 1 and no limit.
func (f *Fleet) Tenant(name string) Tenant {
	if name == "" {
		name = DefaultTenant
	}
	for _, t := range f.Tenants {
		if t.Name == name {
			return t
		}
	}
	return Tenant{Name: name, Share: Sourced[int]{1, Assumed}, MaxInflightTokens: Sourced[int64]{Source: NotSet}}
}

// SaltFault says why a request of a tenant may not carry a cache salt, empty:
// none; empty if it may.
func (f *Fleet) SaltFault(tenant, salt string) string {
	if tenant == "" {
		tenant = DefaultTenant
	}
	own := f.Tenant(tenant).CacheSalts
	if matchAny(own, salt) {
		return ""
	}
	if len(own) > 0 {
		return "tenant " + tenant + " has cache salts of its own and uses no others: " + joinTexts(own)
	}
	for _, t := range f.Tenants {
		if salt != "" && matchAny(t.CacheSalts, salt) {
			// Whose it is, is not the caller's to know.
			return "this cache salt belongs to another tenant"
		}
	}
	return ""
}

func matchAny(patterns []Pattern, name string) bool {
	return slices.ContainsFunc(patterns, func(p Pattern) bool { return p.Match(name) })
}

// Pool returns the declared pool of a name.
func (f *Fleet) Pool(name string) (*Pool, bool) {
	for i := range f.Pools {
		if f.Pools[i].Name == name {
			return &f.Pools[i], true
		}
	}
	return nil, false
}

// PoolOf returns the pool a worker (host/engine/rank) that serves model belongs
// to: the first of the file that names both. When the file has no pools, every
// model has one of its own, named like it. nil means none; WhyNoPool says why.
// Two workers of one pool still differ where their boundaries do.
func (f *Fleet) PoolOf(worker, model string) *Pool {
	if model == "" {
		return nil
	}
	if len(f.Pools) == 0 {
		p := assumedPool(model)
		return &p
	}
	for i := range f.Pools {
		if f.Pools[i].Model == model && f.Pools[i].admitsWorker(worker) {
			return &f.Pools[i]
		}
	}
	return nil
}

// WhyNoPool says in one sentence why PoolOf has no pool for a worker; empty if
// it has one.
func (f *Fleet) WhyNoPool(worker, model string) string {
	if f.PoolOf(worker, model) != nil {
		return ""
	}
	if model == "" {
		return "the served model is not known yet"
	}
	var models []string
	for i := range f.Pools {
		p := &f.Pools[i]
		if p.Model == model {
			return "pool " + p.Name + " serves " + model + " but its workers are " + joinTexts(p.Workers.Value)
		}
		models = append(models, p.Model)
	}
	slices.Sort(models)
	return "no pool serves " + model + "; pools are for " + strings.Join(slices.Compact(models), ", ")
}

func (p *Pool) admitsWorker(worker string) bool {
	return slices.ContainsFunc(p.Workers.Value, func(w WorkerPattern) bool { return w.Match(worker) })
}

func assumedPool(model string) Pool {
	p := poolDefaults()
	p.Name, p.Model, p.Source = model, model, Assumed
	return p
}

func poolDefaults() Pool {
	all, err := ParsePattern("*")
	if err != nil {
		panic(err)
	}
	return Pool{
		Workers:     Sourced[[]WorkerPattern]{[]WorkerPattern{{text: "*", parts: []Pattern{all}}}, Assumed},
		Tenants:     Sourced[[]Pattern]{[]Pattern{all}, Assumed},
		StayIn:      Sourced[StayIn]{StayInNone, Assumed},
		MaxTransfer: Sourced[time.Duration]{Source: NotSet},
		TTFT:        Sourced[time.Duration]{Source: NotSet},
		ITL:         Sourced[time.Duration]{Source: NotSet},
	}
}

// EmptyFleet is the fleet without a file: one zone, assumed links, one pool per
// model, everyone admitted.
func EmptyFleet() *Fleet {
	f := &Fleet{Policy: Policy{
		Objective:      Sourced[Objective]{ObjectiveBalanced, Assumed},
		OwnDelayLimit:  Sourced[DelayLimit]{DelayLimit{Ratio: 0.5, Plus: 200 * time.Millisecond}, Assumed},
		IfInfeasible:   Sourced[IfInfeasible]{BestEffort, Assumed},
		AgentSilentFor: Sourced[time.Duration]{30 * time.Second, Assumed},
		NoProgressFor:  Sourced[time.Duration]{10 * time.Second, Assumed},
	}}
	f.Policy.GPU = defaultGPUPolicy()
	return f
}

func joinTexts[T interface{ String() string }](list []T) string {
	texts := make([]string, len(list))
	for i, t := range list {
		texts[i] = t.String()
	}
	return strings.Join(texts, " ")
}
