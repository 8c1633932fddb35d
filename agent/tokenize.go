package agent

import (
	"sync"
	"time"
)

// Limits of what coordinators may have an engine tokenise: about a tenth of a
// core, at 1.7 ms for 1,000 tokens of four bytes, and a burst of some long
// prompts.
const (
	tokenizeBytesPerSec = 240 << 10
	tokenizeBurstBytes  = 4 << 20
)

// allowance bounds the bytes of text that engines are asked about.
type allowance struct {
	mu    sync.Mutex
	bytes float64
	at    time.Time
}

// take reports whether a text of so many bytes may be asked about now.
func (a *allowance) take(now time.Time, bytes int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.at.IsZero() {
		a.bytes = tokenizeBurstBytes
	} else {
		a.bytes = min(a.bytes+now.Sub(a.at).Seconds()*tokenizeBytesPerSec, tokenizeBurstBytes)
	}
	a.at = now
	if float64(bytes) > a.bytes {
		return false
	}
	a.bytes -= float64(bytes)
	return true
}
