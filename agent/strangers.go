package agent

import (
	"fmt"
	"net/url"
	"slices"

	"waypost/agent/discover"
	"waypost/agent/host"
	"waypost/gossip/doctor"
	"waypost/nvml"
)

// maxStrangers bounds the servers of no known kind that are told of, maxUsers the
// processes on GPUs whose servers are looked for.
const (
	maxStrangers = 16
	maxUsers     = 128
)

// stranger is a server of no known kind whose processes use GPUs.
type stranger struct {
	server discover.Server
	// gpus are the indexes of the GPUs; bytes is what it holds on them, 0: not
	// known.
	gpus  []int
	bytes uint64
}

// lookForStrangers finds servers that use a GPU and are of no known kind: they
// may be engines that only an operator knows to be some.
func (d *discovery) lookForStrangers(devices []nvml.Device) {
	if !d.settings().Enabled {
		devices = nil
	}
	d.mu.Lock()
	var engines []int
	for i := range d.result.Engines {
		engines = append(append(engines, d.result.Engines[i].PID), d.result.Engines[i].Helpers...)
	}
	d.mu.Unlock()
	m := host.MapGPUs(engines, devices, d.scanner.Parent)
	found := map[int]*stranger{}
	var out []*stranger
	users := 0
	for i := range devices {
		for _, p := range m.Foreign[devices[i].UUID] {
			if users++; users > maxUsers {
				break
			}
			server, ok := d.scanner.ServerOf(int(p.PID))
			if !ok || d.a.asks(server.Address.Port()) {
				continue
			}
			s := found[server.PID]
			if s == nil {
				if len(out) == maxStrangers {
					continue
				}
				s = &stranger{server: server}
				found[server.PID] = s
				out = append(out, s)
			}
			if !slices.Contains(s.gpus, devices[i].Index) {
				s.gpus = append(s.gpus, devices[i].Index)
			}
			if p.MemoryBytes != nil {
				s.bytes += *p.MemoryBytes
			}
		}
	}
	list := make([]stranger, 0, len(out))
	for _, s := range out {
		list = append(list, *s)
	}
	d.mu.Lock()
	d.strangers = list
	d.mu.Unlock()
}

// asks says whether an engine at a port of this host is watched.
func (a *Agent) asks(port uint16) bool {
	return slices.ContainsFunc(a.watching(), func(w *watched) bool {
		u, err := url.Parse(w.target.URL)
		return err == nil && portOf(u) == fmt.Sprint(port) && a.isOwn(u.Hostname())
	})
}

// checkStrangers proposes servers of no known kind as generic engines.
func (a *Agent) checkStrangers(l *doctor.List) {
	d := a.discovery
	d.mu.Lock()
	list := d.strangers
	d.mu.Unlock()
	for i := range list {
		s := &list[i]
		if a.asks(s.server.Address.Port()) {
			continue
		}
		holds := "uses"
		if s.bytes > 0 {
			holds = fmt.Sprintf("holds %.1f GiB on", float64(s.bytes)/(1<<30))
		}
		what := fmt.Sprintf("found pid %d (%s), which %s GPU %s and listens at port %d: a server of no known kind, not served", s.server.PID, s.server.Program, holds, ports(s.gpus), s.server.Address.Port())
		if len(s.server.Others) > 0 {
			what += fmt.Sprintf("; it listens at %s as well", ports(s.server.Others))
		}
		l.Add(discover.CheckReachable, doctor.OK, a.name, what, "if it answers /v1/models and /v1/completions as OpenAI's API does, it can be served by load",
			fmt.Sprintf("[[engine]]\nkind = \"generic\"\nurl = %q", s.server.URL()))
	}
}
