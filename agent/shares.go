package agent

import (
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"
	"google.golang.org/protobuf/proto"

	"waypost/agent/discover"
	waypostv1 "waypost/proto/waypost/v1"
)

// maxShares bounds the shares of engines over several hosts that are told.
const maxShares = 64

// share is what this host carries of an engine that spans hosts.
type share struct {
	// name is the engine's where this host serves it, else one of its own.
	name string
	// front says that this host serves it.
	front  bool
	engine *discover.Engine
	// process marks the life of its process.
	process uint64
}

// sharesOf are the shares among engines that were found, in their order: those of
// processes that would be served unasked, and those of engines that are watched.
// boot names the life of the host's kernel.
func (d *discovery) sharesOf(engines []discover.Engine, boot string) []share {
	var out []share
	for i := range engines {
		e := &engines[i]
		if e.Group == nil || e.Orphan || len(out) == maxShares {
			continue
		}
		s := share{name: shareName(e), front: e.Group.Front, engine: e}
		if s.front {
			w := d.a.watchedAt(e)
			if w == nil {
				continue // no requests are sent to it
			}
			s.name = w.target.Name
		} else if d.distrusted(e) != "" {
			continue
		}
		// Only both together name a life: pids are used again.
		s.process = xxh3.HashString(fmt.Sprintf("%s %s %d %d", d.a.name, boot, e.PID, e.Started)) | 1
		out = append(out, s)
	}
	return out
}

// shareName is what this host calls a share of an engine that another one serves.
func shareName(e *discover.Engine) string {
	return fmt.Sprintf("%s(%s)@%s", e.Kind, e.Group.Part(), e.Group.Meeting)
}

// takeShares keeps the shares of the newest scan and has them told if they are
// others than before.
func (d *discovery) takeShares(shares []share, looked bool) {
	same := func(a, b share) bool {
		return a.process == b.process && a.name == b.name && *a.engine.Group == *b.engine.Group
	}
	d.mu.Lock()
	changed := looked != d.looked || !slices.EqualFunc(shares, d.shares, same)
	d.shares, d.looked = shares, looked
	d.mu.Unlock()
	if !changed {
		return
	}
	for i := range shares {
		if s := &shares[i]; !s.front {
			d.a.log.Info("share of an engine on several hosts", "share", s.name, "pid", s.engine.PID, "meeting", s.engine.Group.Meeting)
		}
	}
	select {
	case d.a.truth.judged <- struct{}{}: // which GPUs they use is to be found out
	default:
	}
	d.a.helloChanged()
}

// sharesNow are the shares of the newest scan; looked says that there was one.
func (d *discovery) sharesNow() (shares []share, looked bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.shares, d.looked
}

// carried are the processes that listen on no port of this host's by which they
// could be found, with the engine or share of each: those of shares that another
// host serves, of engines in other network namespaces, and helpers of engines.
func (a *Agent) carried() map[int]string {
	out := map[int]string{}
	for _, w := range a.watching() {
		e := w.process()
		if e == nil {
			continue
		}
		if e.Place == discover.Elsewhere {
			out[e.PID] = w.target.Name
		}
		for _, pid := range e.Helpers {
			out[pid] = w.target.Name
		}
	}
	shares, _ := a.discovery.sharesNow()
	for i := range shares {
		if s := &shares[i]; !s.front {
			out[s.engine.PID] = s.name
			for _, pid := range s.engine.Helpers {
				out[pid] = s.name
			}
		}
	}
	return out
}

// sharesHello is what the hello tells of shares; nil: nobody looks for them.
func (a *Agent) sharesHello() *waypostv1.GroupShares {
	shares, looked := a.discovery.sharesNow()
	if !looked {
		return nil
	}
	out := &waypostv1.GroupShares{}
	for i := range shares {
		s := &shares[i]
		g := s.engine.Group
		m := &waypostv1.GroupShare{
			Process: &s.process, Kind: &s.engine.Kind, Meeting: &g.Meeting, Node: proto.Uint32(uint32(g.Node)), Nodes: proto.Uint32(uint32(g.Nodes)),
			FirstRank: proto.Uint32(uint32(g.FirstRank)), LocalRanks: proto.Uint32(uint32(g.LocalRanks)), Ranks: proto.Uint32(uint32(g.Ranks)),
			GpuUuids: a.truth.gpusOf(s.name),
		}
		if s.front {
			m.Engine = &s.name
		}
		if g.Uncounted {
			// An older coordinator refuses shares without numbers among the others.
			out.Uncounted = append(out.Uncounted, m)
			continue
		}
		out.Shares = append(out.Shares, m)
	}
	return out
}

// sharesLoad is what a report tells of the GPUs of shares.
func (a *Agent) sharesLoad(verdict func(engine string) string) []*waypostv1.ShareLoad {
	shares, _ := a.discovery.sharesNow()
	out := make([]*waypostv1.ShareLoad, 0, len(shares))
	for i := range shares {
		out = append(out, &waypostv1.ShareLoad{Process: &shares[i].process, GpuVerdict: proto.String(verdict(shares[i].name))})
	}
	return out
}
