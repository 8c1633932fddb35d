package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Cordon is an operator's wish that something gets no new placements. It holds
// until it is taken back, also while it names nothing.
type Cordon struct {
	// Selector is host, host/engine, host/engine/rank or a GPU UUID.
	Selector string `json:"selector"`
	By       string `json:"by"`
	// AtMs is when its proposer made it, Unix ms.
	AtMs   int64  `json:"at_ms"`
	Reason string `json:"reason"`
	Drain  bool   `json:"drain,omitempty"`
	// GPUUUIDs and Model are those of the named engine or worker when the
	// cordon was set; empty if unknown.
	GPUUUIDs []string `json:"gpu_uuids,omitempty"`
	Model    string   `json:"model,omitempty"`
}

// At is when the cordon was set by its proposer's clock.
func (c Cordon) At() time.Time { return time.UnixMilli(c.AtMs).UTC() }

// SelectorKind says what a selector names.
type SelectorKind string

// The kinds of selectors.
const (
	SelectsHost   SelectorKind = "host"
	SelectsEngine SelectorKind = "engine"
	SelectsWorker SelectorKind = "worker"
	SelectsGPU    SelectorKind = "gpu"
)

// Selector is a parsed selector.
type Selector struct {
	Kind SelectorKind
	// Host, Engine and Rank as far as the kind has them.
	Host, Engine string
	Rank         int
	// GPU is the UUID, digits in lower case.
	GPU string
}

// ParseSelector reads host, host/engine, host/engine/rank or a GPU UUID.
// Errors wrap ErrInvalid.
func ParseSelector(s string) (Selector, error) {
	if isGPUUUID(s) {
		return Selector{Kind: SelectsGPU, GPU: normalUUID(s)}, nil
	}
	parts := strings.Split(s, "/")
	if len(parts) > 3 {
		return Selector{}, invalid("selector", "%q has %d parts; it is host, host/engine, host/engine/rank or a GPU UUID", clip(s, 100), len(parts))
	}
	for i, what := range []string{"host", "engine"} {
		if i < len(parts) {
			if err := checkName("selector", parts[i]); err != nil {
				return Selector{}, fmt.Errorf("%w (its %s)", err, what)
			}
		}
	}
	sel := Selector{Kind: SelectsHost, Host: parts[0]}
	if len(parts) > 1 {
		sel.Kind, sel.Engine = SelectsEngine, parts[1]
	}
	if len(parts) > 2 {
		rank, err := strconv.Atoi(parts[2])
		if err != nil || rank < 0 || strconv.Itoa(rank) != parts[2] {
			return Selector{}, invalid("selector", "%q: rank %q is not a number such as 0", clip(s, 100), clip(parts[2], 20))
		}
		sel.Kind, sel.Rank = SelectsWorker, rank
	}
	return sel, nil
}

// String is the selector in its one normal form.
func (s Selector) String() string {
	switch s.Kind {
	case SelectsGPU:
		return s.GPU
	case SelectsWorker:
		return s.Host + "/" + s.Engine + "/" + strconv.Itoa(s.Rank)
	case SelectsEngine:
		return s.Host + "/" + s.Engine
	}
	return s.Host
}

// isGPUUUID tells a GPU or MIG UUID from a host name: the library's prefix in
// capitals and at least eight hexadecimal digits.
func isGPUUUID(s string) bool {
	rest, gpu := strings.CutPrefix(s, "GPU-")
	if !gpu {
		var mig bool
		if rest, mig = strings.CutPrefix(s, "MIG-"); !mig {
			return false
		}
	}
	digits := 0
	for _, r := range rest {
		switch {
		case r >= '0' && r <= '9', r >= 'a' && r <= 'f', r >= 'A' && r <= 'F':
			digits++
		case r != '-':
			return false
		}
	}
	return digits >= 8 && len(rest) <= 64
}

func normalUUID(s string) string {
	if digits := strings.ToLower(s[4:]); digits != s[4:] {
		return s[:4] + digits
	}
	return s
}

func normalUUIDs(in []string) []string {
	if len(in) == 0 {
		return nil
	}
	out := make([]string, len(in))
	for i, u := range in {
		out[i] = normalUUID(u)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// checkName refuses what nameFault finds fault with.
func checkName(field, s string) error {
	if fault := nameFault(s); fault != "" {
		return invalid(field, "%s", fault)
	}
	return nil
}

// nameFault says what keeps s from being a name: 1 to 128 letters, digits,
// dots, dashes and underscores, beginning with a letter or digit.
func nameFault(s string) string {
	if len(s) == 0 || len(s) > maxNameBytes {
		return fmt.Sprintf("a name has 1 to %d characters, %q has %d", maxNameBytes, clip(s, 40), len(s))
	}
	for i, r := range s {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !alnum && (i == 0 || r != '.' && r != '-' && r != '_') {
			return fmt.Sprintf("%q holds %q; a name is letters, digits, dots, dashes and underscores and begins with a letter or digit", clip(s, 40), r)
		}
	}
	return ""
}

// checkAddress refuses what is not host:port.
func checkAddress(field, s string) error {
	i := strings.LastIndexByte(s, ':')
	if i <= 0 {
		return invalid(field, "%q is not host:port", clip(s, 100))
	}
	if port, err := strconv.ParseUint(s[i+1:], 10, 16); err != nil || port == 0 {
		return invalid(field, "%q: %q is not a port from 1 to 65535", clip(s, 100), clip(s[i+1:], 10))
	}
	host, bracketed := strings.CutPrefix(s[:i], "[")
	if bracketed {
		inner, closed := strings.CutSuffix(host, "]")
		if addr, err := netip.ParseAddr(inner); err != nil || !addr.Is6() || !closed {
			return invalid(field, "%q is not [IPv6 address]:port", clip(s, 100))
		}
		return nil
	}
	return checkName(field, host)
}

// cordonSet is an immutable set of cordons by selector.
type cordonSet struct {
	sorted []Cordon
	// byGPU lists, per GPU recorded with an engine or a worker, the indexes of
	// the cordons that recorded it.
	byGPU map[string][]int
}

func (c cordonSet) len() int { return len(c.sorted) }

func (c cordonSet) find(selector string) (int, bool) {
	return slices.BinarySearchFunc(c.sorted, selector, func(e Cordon, s string) int { return strings.Compare(e.Selector, s) })
}

func (c cordonSet) get(selector string) (Cordon, bool) {
	if i, ok := c.find(selector); ok {
		return c.sorted[i], true
	}
	return Cordon{}, false
}

func (c cordonSet) with(cordon Cordon) cordonSet {
	sorted := slices.Clone(c.sorted)
	if i, ok := c.find(cordon.Selector); ok {
		sorted[i] = cordon
	} else {
		sorted = slices.Insert(sorted, i, cordon)
	}
	return newCordonSet(sorted)
}

func (c cordonSet) without(selector string) cordonSet {
	sorted := slices.Clone(c.sorted)
	if i, ok := c.find(selector); ok {
		sorted = slices.Delete(sorted, i, i+1)
	}
	return newCordonSet(sorted)
}

func newCordonSet(sorted []Cordon) cordonSet {
	set := cordonSet{sorted: sorted}
	for i, c := range sorted {
		for _, u := range c.GPUUUIDs {
			if set.byGPU == nil {
				set.byGPU = map[string][]int{}
			}
			set.byGPU[u] = append(set.byGPU[u], i)
		}
	}
	return set
}

// Cordons are the cordons in force by selector.
func (s *State) Cordons() []Cordon { return slices.Clone(s.cordons.sorted) }

// CordonsFor are the cordons that name a worker (host/engine/rank), its engine,
// its host or one of its GPUs, by selector; nil if there are none. A cordon of
// an engine or a worker also names the worker on the same host that serves the
// same model on a GPU recorded with the cordon, so that a changed port does not
// end it; two engines of one model that share a GPU are therefore cordoned
// together. model and gpuUUIDs may be empty when unknown.
func (s *State) CordonsFor(worker, model string, gpuUUIDs []string) []Cordon {
	if s.cordons.len() == 0 {
		return nil
	}
	var hits []int
	add := func(selector string) {
		if i, ok := s.cordons.find(selector); ok {
			hits = append(hits, i)
		}
	}
	host, rest, hasEngine := strings.Cut(worker, "/")
	add(host)
	if hasEngine {
		engine, _, hasRank := strings.Cut(rest, "/")
		add(worker[:len(host)+1+len(engine)])
		if hasRank {
			add(worker)
		}
	}
	for _, u := range gpuUUIDs {
		if !isGPUUUID(u) {
			continue
		}
		u = normalUUID(u)
		add(u)
		for _, i := range s.cordons.byGPU[u] {
			c := s.cordons.sorted[i]
			if on, _, _ := strings.Cut(c.Selector, "/"); on == host && c.Model != "" && c.Model == model {
				hits = append(hits, i)
			}
		}
	}
	slices.Sort(hits)
	hits = slices.Compact(hits)
	var out []Cordon
	for _, i := range hits {
		out = append(out, s.cordons.sorted[i])
	}
	return out
}
