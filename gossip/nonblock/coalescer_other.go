//go:build !linux

package nonblock

import (
	"context"
	"net"
	"sync"
)

// Coalescer leaves the connections of other systems than Linux to the runtime.
type Coalescer struct {
	mu     sync.Mutex
	on     bool // never
	timers map[*Timer]struct{}
}

// NewCoalescer checks the options.
func NewCoalescer(o CoalescerOptions) (*Coalescer, error) {
	_, err := o.withDefaults()
	return &Coalescer{timers: map[*Timer]struct{}{}}, err
}

// Conn returns c.
func (k *Coalescer) Conn(c net.Conn) net.Conn { return Conn(c) }

// ConnFirst returns c.
func (k *Coalescer) ConnFirst(c net.Conn) net.Conn { return Conn(c) }

func (k *Coalescer) with(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

// Run waits for the end of ctx.
func (k *Coalescer) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
