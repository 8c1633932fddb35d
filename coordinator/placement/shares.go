package placement

import (
	"fmt"
	"math"
)

// Shares measures how much prefill tenants get placed, in uncached tokens, with
// a time constant of ten seconds. The zero value is ready. It is not safe for
// concurrent use. Times are ms on the caller's clock.
type Shares struct {
	tenants map[string]*tenantUse
}

type tenantUse struct {
	tokens float64
	atMs   float64
}

// Constants of Shares.
const (
	shareTimeMs = 10_000
	// shareSlack is how far above its share a tenant may be before it counts
	// as over: bursts are no breach.
	shareSlack = 1.1
	// activeTokens is the use from which a tenant takes part in the division.
	activeTokens = 1
	maxTenants   = 4096
)

func (t *tenantUse) at(nowMs float64) float64 {
	return t.tokens * math.Exp(-max(nowMs-t.atMs, 0)/shareTimeMs)
}

// Placed counts the uncached tokens of one placement.
func (s *Shares) Placed(nowMs float64, tenant string, uncachedTokens int) {
	if s.tenants == nil {
		s.tenants = map[string]*tenantUse{}
	}
	t := s.tenants[tenant]
	if t == nil {
		if len(s.tenants) >= maxTenants {
			s.forgetLeast(nowMs)
		}
		t = &tenantUse{}
		s.tenants[tenant] = t
	}
	t.tokens, t.atMs = t.at(nowMs)+float64(max(uncachedTokens, 0)), max(nowMs, t.atMs)
}

func (s *Shares) forgetLeast(nowMs float64) {
	least, name := math.Inf(1), ""
	for n, t := range s.tenants {
		if use := t.at(nowMs); use < least || use == least && n < name {
			least, name = use, n
		}
	}
	delete(s.tenants, name)
}

// Over says in words that a tenant has more than its weight's part of what the
// tenants at work were placed, or nothing if it has not. Alone it may have all.
func (s *Shares) Over(nowMs float64, tenant string, weight func(tenant string) int) string {
	own := s.tenants[tenant]
	if own == nil {
		return ""
	}
	total, weights, active := 0.0, 0.0, 0
	for name, t := range s.tenants {
		use := t.at(nowMs)
		if use < activeTokens {
			delete(s.tenants, name)
			continue
		}
		total, weights, active = total+use, weights+float64(max(weight(name), 1)), active+1
	}
	if active < 2 || s.tenants[tenant] == nil {
		return ""
	}
	has, due := own.at(nowMs)/total, float64(max(weight(tenant), 1))/weights
	if has <= due*shareSlack {
		return ""
	}
	return fmt.Sprintf("tenant %s has %.0f%% of the prefill lately, its share is %.0f%%", tenant, 100*has, 100*due)
}
