package coordinator

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
)

// tenantShares is what tenants were placed lately, by this coordinator.
type tenantShares struct {
	mu sync.Mutex
	by map[string]*placement.Shares // by pool
}

// judgeTenant says on a request what its tenant may and has had.
func (c *Coordinator) judgeTenant(now time.Time, r *placement.Request, file *registry.Fleet) {
	tenant := r.Tenant
	if tenant == "" {
		tenant = registry.DefaultTenant
	}
	r.TenantBarred, r.TenantOver, r.TenantFull = "", "", ""
	if pool, ok := file.Pool(r.Pool); ok {
		r.TenantBarred = tenantBarred(pool, tenant)
	}
	if limit, ok := file.Tenant(tenant).MaxInflightTokens.Get(); ok {
		open := c.fleet.TenantTokens(tenant)
		if tenant == registry.DefaultTenant {
			open += c.fleet.TenantTokens("") // requests that name none are the default tenant's, too
		}
		if open+int64(r.PromptTokens) > limit {
			r.TenantFull = fmt.Sprintf("tenant %s has %d prompt tokens under way, max_inflight_tokens is %d", tenant, open, limit)
		}
	}
	t := &c.tenantShares
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.by[r.Pool]; s != nil {
		r.TenantOver = s.Over(c.transfers.Ms(now), tenant, func(name string) int { return file.Tenant(name).Share.Value })
	}
}

// tenantBarred says why a tenant may not use a pool; empty: it may.
func tenantBarred(pool *registry.Pool, tenant string) string {
	if tenant == "" {
		tenant = registry.DefaultTenant
	}
	if pool.AdmitsTenant(tenant) {
		return ""
	}
	return fmt.Sprintf("tenant %s may not use pool %s", tenant, pool.Name)
}

// hasPool says whether the fleet has a pool: names are of models that agents tell,
// and what is kept by pool must not outlive them for ever.
func (c *Coordinator) hasPool(name string) bool {
	_, err := c.fleet.PoolName(name)
	return err == nil
}

// placedFor counts a placement for its tenant.
func (c *Coordinator) placedFor(now time.Time, r *placement.Request, uncachedTokens int) {
	tenant := r.Tenant
	if tenant == "" {
		tenant = registry.DefaultTenant
	}
	t := &c.tenantShares
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by == nil {
		t.by = map[string]*placement.Shares{}
	}
	s := t.by[r.Pool]
	if s == nil {
		maps.DeleteFunc(t.by, func(pool string, _ *placement.Shares) bool { return !c.hasPool(pool) })
		s = &placement.Shares{}
		t.by[r.Pool] = s
	}
	s.Placed(c.transfers.Ms(now), tenant, uncachedTokens)
}

// otherTenants labels the tenants that the fleet file does not name: callers
// choose those names, so they must not become series.
const otherTenants = "other"

// tenantLabel is a tenant in the series.
func (c *Coordinator) tenantLabel(tenant string) string {
	if tenant == "" || tenant == registry.DefaultTenant {
		return registry.DefaultTenant
	}
	for _, t := range c.fleetFile.Load().Tenants {
		if t.Name == tenant {
			return tenant
		}
	}
	return otherTenants
}

// headroomMs is the wait at a pool's best worker up to which the pool has
// headroom: the time that its first token may take, else the policy's.
func headroomMs(policy *placement.Policy, pool *registry.Pool) float64 {
	if pool != nil {
		if ttft, ok := pool.TTFT.Get(); ok {
			return ms(ttft)
		}
	}
	return policy.HeadroomMs
}

// headroom is the part of a pool's headroom that a wait at its best worker
// leaves, 0 to 1.
func (c *Coordinator) headroom(pool string, waitMs float64) float64 {
	file, _ := c.fleetFile.Load().Pool(pool)
	limit := headroomMs(c.policy.Load(), file)
	if !(limit > 0) {
		return 0
	}
	return min(1, max(0, 1-waitMs/limit))
}
