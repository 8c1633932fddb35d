package placement

import (
	"fmt"
	"math"
)

// HostTier is what it takes a worker's engine to read saved KV back from the
// memory of its host.
type HostTier struct {
	// BytesPerToken is the KV of one token, BytesPerMs what the way between host
	// and GPU carries; 0: unknown.
	BytesPerToken, BytesPerMs float64
	// Figure says where the bandwidth comes from.
	Figure Figure
	// Link is the GPU's link to the host as its driver tells it, "PCIe 5.0 x16";
	// empty: not known.
	Link string
	// Uncounted says why nothing in host memory is counted as reusable; empty: it is.
	Uncounted string
}

// maxLinkName and maxReason bound the name of a link and a reason, bytes.
const maxLinkName, maxReason = 32, 200

// Fault says what is out of range, by its wire name; empty: nothing is.
func (h *HostTier) Fault() string {
	switch {
	case !(h.BytesPerToken >= 0 && h.BytesPerToken <= maxBytesPerToken):
		return fmt.Sprintf("kvBytesPerToken: %v is not in 0 to %g", h.BytesPerToken, float64(maxBytesPerToken))
	case !(h.BytesPerMs >= 0 && h.BytesPerMs <= maxRate):
		return fmt.Sprintf("linkBytesPerSec: %v is not in 0 to %g", 1000*h.BytesPerMs, 1000*float64(maxRate))
	case len(h.Uncounted) > maxReason:
		return fmt.Sprintf("uncounted: has %d bytes, at most %d", len(h.Uncounted), maxReason)
	case len(h.Link) > maxLinkName:
		return fmt.Sprintf("link: has %d bytes, at most %d", len(h.Link), maxLinkName)
	}
	return ""
}

// readMs is the time to read tokens back; NaN: unknown.
func (h *HostTier) readMs(tokens int) float64 {
	if h == nil || !(h.BytesPerToken > 0) || !(h.BytesPerMs > 0) {
		return math.NaN()
	}
	return float64(tokens) * h.BytesPerToken / h.BytesPerMs
}

// load adds what reading back takes of that part of the reused tokens which is in
// host memory: at most the computing it saves, for a match must not make a worker
// worse than none or a shorter one, and all of that, as doubt, where the time is
// unknown. own is the offer behind all that is reused. It gives the load time and
// the doubt.
func (p *pricer) load(c *Candidate, t *Terms, own offer) (loadMs, doubtMs float64) {
	inGPU := reusableTokens(max(c.MatchedTokens-max(c.LowerTokens, 0), 0), p.promptTokens, c.BlockTokens)
	t.HostTokens = t.ReuseTokens - min(inGPU, t.ReuseTokens)
	if t.HostTokens == 0 {
		return 0, 0
	}
	saved := max(c.Worker.Steps.PrefillMs(inGPU, p.promptTokens-inGPU)-own.computeMs, 0)
	t.LoadMs = min(c.Host.readMs(t.HostTokens), saved)
	if math.IsNaN(t.LoadMs) {
		return 0, saved
	}
	return t.LoadMs, 0
}
