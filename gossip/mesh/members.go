package mesh

import (
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Status is the state of a member as this process sees it.
type Status string

// The states.
const (
	StatusAlive    Status = "alive"
	StatusSuspect  Status = "suspect"  // does not answer; lost unless it denies in time
	StatusLost     Status = "lost"     // declared dead
	StatusLeft     Status = "left"     // said goodbye
	StatusConflict Status = "conflict" // alive, and another one claims its name
	StatusRefused  Status = "refused"  // speaks with a wrong key or to another fleet
)

// Member is one member of the mesh.
type Member struct {
	Name    string // its address for a refused one, whose name is not known
	Address string // host:port of its gossip socket
	Meta    Meta
	Status  Status
	Since   time.Time // of the status, by this process's clock
	// RTT is the round trip of the last probe that was answered; 0: none yet.
	RTT time.Duration
	// Other is the address of the second one of a conflict, and "key" or "label"
	// of a refusal.
	Other string
	// Note is what is special: "UDP lost, TCP answers", "replaced by gpu-33".
	Note string
	Self bool
}

const (
	lostKept     = 24 * time.Hour   // a member that is lost or left is listed so long
	conflictKept = 5 * time.Minute  // a conflict is shown so long after its last sign
	refusedKept  = 10 * time.Minute // so is a refusal
	udpLostKept  = 30 * time.Second
	maxRefused   = 64
)

// node is what memberlist tells of a member.
type node struct {
	name string
	addr string // host:port
	meta []byte
	// raw state of the library, where it is known
	state Status
}

// entry is a listed member with what the list must remember of it.
type entry struct {
	Member
	conflictAt time.Time
	udpLostAt  time.Time
	replacedBy string
	badMeta    bool
}

// transition is a change of status, for the log.
type transition struct {
	member Member
	from   Status
}

// table is the member list. It is not safe for concurrent use; times are arguments.
type table struct {
	self    string
	limit   int
	entries map[string]*entry
	refused map[string]*entry // by host
	dropped int               // entries given up for the bound
	changed bool
	log     []transition
}

func newTable(self string, limit int) *table {
	return &table{self: self, limit: limit, entries: map[string]*entry{}, refused: map[string]*entry{}}
}

// joined takes in that a member is alive.
func (t *table) joined(n node, now time.Time) {
	e := t.entries[n.name]
	if e == nil {
		if e = t.add(n.name, now); e == nil {
			return
		}
	}
	t.describe(e, n)
	e.replacedBy = ""
	t.retireNamesakes(e, now)
	t.set(e, StatusAlive, now)
}

// updated takes in a new description.
func (t *table) updated(n node) {
	if e := t.entries[n.name]; e != nil {
		t.describe(e, n)
	}
}

// conflict takes in that another member claims the name of a living one.
func (t *table) conflict(name, other string, now time.Time) {
	e := t.entries[name]
	if e == nil {
		return
	}
	e.conflictAt = now
	if e.Other != other {
		e.Other = other
		t.changed = true
	}
	t.set(e, e.Status, now)
}

// answered takes in the round trip of a probe.
func (t *table) answered(name string, rtt time.Duration) {
	if e := t.entries[name]; e != nil {
		e.RTT = rtt
		e.udpLostAt = time.Time{}
	}
}

// udpLost takes in that a member answered over TCP only.
func (t *table) udpLost(name string, now time.Time) {
	if e := t.entries[name]; e != nil {
		e.udpLostAt = now
	}
}

// refuse takes in that something from a host was thrown away.
func (t *table) refuse(host, reason string, now time.Time) {
	e := t.refused[host]
	if e == nil {
		if len(t.refused) >= maxRefused {
			t.dropped++
			return
		}
		e = &entry{Member: Member{Name: host, Address: host, Status: StatusRefused, Since: now, Other: reason}}
		t.refused[host] = e
		t.changed = true
		t.log = append(t.log, transition{member: e.Member})
	}
	e.conflictAt = now // of the last sign
	e.Other = reason
}

// reconcile makes the list agree with the library's whole state.
func (t *table) reconcile(nodes []node, now time.Time) {
	listed := make(map[string]bool, len(nodes))
	for _, n := range nodes {
		listed[n.name] = true
		e := t.entries[n.name]
		switch {
		case e == nil && n.state == StatusAlive:
			t.joined(n, now)
		case e == nil:
			// Died before it was ever seen alive: nothing to show.
		case e.replacedBy != "" && n.state != StatusLeft:
			// The library learns later that the old name is gone.
		default:
			t.describe(e, n)
			t.set(e, n.state, now)
		}
	}
	for name, e := range t.entries {
		if !listed[name] && e.alive() { // the library has forgotten it
			t.set(e, StatusLost, now)
		}
	}
}

// expire drops what has been shown long enough.
func (t *table) expire(now time.Time) {
	for name, e := range t.entries {
		if !e.alive() && now.Sub(e.Since) > lostKept {
			delete(t.entries, name)
			t.changed = true
			continue
		}
		t.set(e, e.raw(), now) // a conflict or a note may have ended
	}
	for host, e := range t.refused {
		if now.Sub(e.conflictAt) > refusedKept {
			delete(t.refused, host)
			t.changed = true
		}
	}
}

func (e *entry) alive() bool {
	return e.Status == StatusAlive || e.Status == StatusSuspect || e.Status == StatusConflict
}

// raw is the status without conflict.
func (e *entry) raw() Status {
	if e.Status == StatusConflict {
		return StatusAlive
	}
	return e.Status
}

func (t *table) add(name string, now time.Time) *entry {
	if len(t.entries) >= t.limit && !t.dropOldestGone() {
		t.dropped++
		return nil
	}
	e := &entry{Member: Member{Name: name, Since: now, Self: name == t.self}}
	t.entries[name] = e
	t.changed = true
	return e
}

// dropOldestGone makes room by the entry that has been gone longest.
func (t *table) dropOldestGone() bool {
	var oldest *entry
	for _, e := range t.entries {
		if !e.alive() && (oldest == nil || e.Since.Before(oldest.Since)) {
			oldest = e
		}
	}
	if oldest == nil {
		return false
	}
	delete(t.entries, oldest.Name)
	t.dropped++
	return true
}

func (t *table) describe(e *entry, n node) {
	meta, err := decodeMeta(n.meta)
	if err != nil {
		if !e.badMeta {
			t.changed = true
		}
		e.badMeta = true
	} else if e.badMeta || e.Meta != meta {
		e.Meta, e.badMeta, t.changed = meta, false, true
	}
	if n.addr != "" && e.Address != n.addr {
		if n.addr == e.Other { // the second one has the name now: it was a restart
			e.conflictAt, e.Other = time.Time{}, ""
		}
		e.Address, t.changed = n.addr, true
	}
}

// retireNamesakes ends entries with another name at the address of a member that
// has just come up: a host was renamed.
func (t *table) retireNamesakes(e *entry, now time.Time) {
	for _, other := range t.entries {
		if other != e && other.Address == e.Address && other.replacedBy == "" && !other.Self {
			other.replacedBy = e.Name
			t.set(other, StatusLeft, now)
		}
	}
}

// set changes the status shown.
func (t *table) set(e *entry, s Status, now time.Time) {
	if s == StatusConflict {
		s = StatusAlive
	}
	inConflict := !e.conflictAt.IsZero() && now.Sub(e.conflictAt) <= conflictKept
	switch {
	case (s == StatusAlive || s == StatusSuspect) && inConflict:
		s = StatusConflict
	case !inConflict:
		e.conflictAt, e.Other = time.Time{}, ""
	}
	note := ""
	switch {
	case e.replacedBy != "":
		note = "replaced by " + e.replacedBy
	case e.badMeta:
		note = "its description cannot be read: another version?"
	case !e.udpLostAt.IsZero() && now.Sub(e.udpLostAt) <= udpLostKept:
		note = "UDP lost, TCP answers"
	}
	if note != e.Note {
		e.Note, t.changed = note, true
	}
	if s != e.Status {
		from := e.Status
		e.Status, e.Since, t.changed = s, now, true
		t.log = append(t.log, transition{e.Member, from})
	}
}

// life returns the life of a listed member.
func (t *table) life(name string) (life uint32, alive, ok bool) {
	e := t.entries[name]
	if e == nil || e.badMeta {
		return 0, false, false
	}
	return e.Meta.Life, e.alive(), true
}

// takeLog returns the transitions since the last call.
func (t *table) takeLog() []transition {
	log := t.log
	t.log = nil
	return log
}

// members returns a copy of the list, by name.
func (t *table) members() []Member {
	out := make([]Member, 0, len(t.entries)+len(t.refused))
	for _, e := range t.entries {
		out = append(out, e.Member)
	}
	for _, e := range t.refused {
		out = append(out, e.Member)
	}
	slices.SortFunc(out, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// peers returns the members worth trying after a restart, coordinators first.
func (t *table) peers() []peer {
	var out []peer
	for _, e := range t.entries {
		if !e.Self && e.Status != StatusLeft {
			out = append(out, peer{e.Name, e.Address, e.Meta.Role})
		}
	}
	slices.SortFunc(out, func(a, b peer) int {
		if a.Role != b.Role {
			if a.Role == RoleCoordinator {
				return -1
			}
			if b.Role == RoleCoordinator {
				return 1
			}
		}
		return strings.Compare(a.Name, b.Name)
	})
	return out[:min(len(out), maxPeers)]
}

// hostPort renders an address of the library.
func hostPort(ip []byte, port uint16) string {
	addr, ok := netip.AddrFromSlice(ip)
	if !ok {
		return ""
	}
	return netip.AddrPortFrom(addr.Unmap(), port).String()
}
