package placement

import "waypost/gossip/accuracy"

// PriorTrust is the trust in a view of a kind before outcomes were compared
// with it.
func (p *Policy) PriorTrust(kind ViewKind) float64 {
	switch kind {
	case ViewLive, ViewWarming:
		return accuracy.PriorLive
	case ViewPartial:
		return p.PartialTrust
	case ViewStale:
		return p.StaleTrust
	}
	return p.InferredTrust
}
