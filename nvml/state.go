package nvml

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"waypost/systemd/daemon"
)

const (
	// keepAtMost is how often the state file is written at most.
	keepAtMost = time.Second
	// maxStateBytes is more than a state file can have.
	maxStateBytes = 1 << 20
)

// keptState is what outlives a restart of the program, but not one of the host:
// a boot resets the GPUs.
type keptState struct {
	BootID string    `json:"bootId"`
	GPUs   []keptGPU `json:"gpus"`
}

type keptGPU struct {
	Index    int       `json:"index"`
	UUID     string    `json:"uuid"`
	Name     string    `json:"name,omitempty"`
	PCIBusID string    `json:"pciBusId,omitempty"`
	Xids     []keptXid `json:"xids"`
}

type keptXid struct {
	Xid   uint32 `json:"xid"`
	Count uint64 `json:"count"`
	// SinceBootSec is when the newest was seen.
	SinceBootSec float64 `json:"sinceBootSec"`
	Acknowledged bool    `json:"acknowledged,omitempty"`
}

// kept is what must be kept of the book at now, when the system is up for as
// long as given.
func (b *book) kept(now time.Time, uptime time.Duration) []keptGPU {
	gpus := []keptGPU{}
	keep := func(g *GPU, xids []xidRecord) {
		k := keptGPU{Index: g.Index, UUID: g.UUID, Name: g.Name, PCIBusID: g.PCIBusID}
		for _, x := range xids {
			k.Xids = append(k.Xids, keptXid{x.xid, x.count, (uptime - now.Sub(x.at)).Seconds(), x.acked})
		}
		if len(k.Xids) > 0 {
			gpus = append(gpus, k)
		}
	}
	for _, d := range b.devices {
		keep(&d.gpu, d.xids)
	}
	for uuid, xids := range b.restored { // not seen since the restart
		keep(&GPU{UUID: uuid}, xids)
	}
	slices.SortFunc(gpus, func(a, b keptGPU) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID)) })
	return gpus
}

// restore takes in what was kept. A GPU with an error that nobody has dealt with
// is known from then on, so that one which is not listed any more counts as lost.
func (b *book) restore(gpus []keptGPU, now time.Time, uptime time.Duration) {
	for _, k := range gpus[:min(len(gpus), maxGPUs)] {
		if k.UUID == "" || len(k.UUID) > maxTextBytes || k.Index < 0 || k.Index > maxIndex {
			continue
		}
		var xids []xidRecord
		open := false
		for _, x := range k.Xids[:min(len(k.Xids), maxXidNumbers)] {
			if !(x.SinceBootSec >= 0 && x.SinceBootSec <= uptime.Seconds()) || x.Count == 0 {
				continue
			}
			at := now.Add(-uptime + time.Duration(x.SinceBootSec*float64(time.Second)))
			xids = append(xids, xidRecord{xid: x.Xid, count: x.Count, at: at, acked: x.Acknowledged})
			open = open || !x.Acknowledged
		}
		if !open {
			if b.restored == nil {
				b.restored = map[string][]xidRecord{}
			}
			b.restored[k.UUID] = xids
			continue
		}
		if b.devices == nil {
			b.devices = map[string]*seen{}
		}
		b.devices[k.UUID] = &seen{
			gpu:  GPU{Index: k.Index, UUID: k.UUID, Name: cut(k.Name), PCIBusID: cut(k.PCIBusID)},
			xids: xids, movedAt: now,
		}
	}
}

// restore reads the state file. One of another boot, or that cannot be read,
// counts for nothing.
func (c *Client) restore() {
	state, err := readState(c.options.StateFile)
	uptime, boot := c.uptime(), c.boot()
	switch {
	case errors.Is(err, os.ErrNotExist):
		return
	case err != nil:
		c.options.Logger.Warn("kept GPU errors cannot be read", "file", c.options.StateFile, "error", err)
		return
	case boot == "" || uptime <= 0 || state.BootID != boot:
		return
	}
	c.mu.Lock()
	c.book.restore(state.GPUs, time.Now(), uptime)
	c.mu.Unlock()
}

func readState(path string) (state keptState, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return state, err
	}
	if info.Size() > maxStateBytes {
		return state, fmt.Errorf("%d bytes are more than %d", info.Size(), maxStateBytes)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return state, err
	}
	return state, json.Unmarshal(text, &state)
}

// keepSoon has the state file written.
func (c *Client) keepSoon() {
	select {
	case c.keep <- struct{}{}:
	default:
	}
}

// keepState writes the state file when it differs, until ctx ends.
func (c *Client) keepState(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			c.writeState()
			return
		case <-c.keep:
			c.writeState()
		}
		select {
		case <-ctx.Done():
		case <-time.After(keepAtMost):
		}
	}
}

func (c *Client) writeState() {
	uptime, boot := c.uptime(), c.boot()
	c.mu.Lock()
	changed := c.book.changed
	c.book.changed = false
	state := keptState{BootID: boot, GPUs: c.book.kept(time.Now(), uptime)}
	c.mu.Unlock()
	if !changed || boot == "" || uptime <= 0 {
		return
	}
	if err := writeState(c.options.StateFile, &state); err != nil {
		c.options.Logger.Warn("GPU errors cannot be kept; the next change tries again", "file", c.options.StateFile, "error", err)
		c.mu.Lock()
		c.book.changed = true
		c.mu.Unlock()
	}
}

func writeState(file string, state *keptState) error {
	text, err := json.Marshal(state)
	if err != nil {
		return err
	}
	return daemon.ReplaceFile(file, append(text, '\n'))
}
