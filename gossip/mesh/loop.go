package mesh

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	// eventQueue bounds what the callbacks may be ahead of the list.
	eventQueue = 1024
	// The whole state is read once per probe interval, in which suspicion begins
	// and which it outlasts several times. readPer is the growth per member, as
	// encoding the state takes about 2 µs for each.
	readPer     = 5 * time.Millisecond
	readGap     = 100 * time.Millisecond
	houseEvery  = time.Second
	peersEvery  = 5 * time.Second
	maxLogBatch = 32
	// sketchOrphanKept is how long a sketch may wait for its origin to be listed.
	sketchOrphanKept = 10 * time.Second
)

type eventKind int

const (
	eventJoined eventKind = iota
	eventUpdated
	eventEnded
	eventConflict
	eventAnswered
	eventRefused
	eventUDPLost
)

// event is a copy of what a callback was told.
type event struct {
	kind  eventKind
	node  node
	other string // address of a conflict's second, reason of a refusal
	rtt   time.Duration
}

// note queues an event; it never blocks.
func (m *Mesh) note(e event) {
	select {
	case m.events <- e:
	default:
		m.overflow.Store(true)
		m.counts.drop("event_overflow")
	}
}

func (m *Mesh) noteRefused(reason, host string) {
	m.counts.drop(reason)
	if host != "" && (reason == "key" || reason == "label") {
		m.note(event{kind: eventRefused, node: node{name: host}, other: reason})
	}
}

func (m *Mesh) noteUDPLost(member string) {
	m.note(event{kind: eventUDPLost, node: node{name: member}})
}

// loop owns the member list.
func (m *Mesh) loop() {
	read := time.NewTimer(readGap)
	defer read.Stop()
	house := time.NewTicker(houseEvery)
	defer house.Stop()
	var savedAt, readAt time.Time
	for {
		due := false
		select {
		case e := <-m.events:
			due = m.take(e)
		case <-read.C:
			due = true
		case <-house.C:
			m.keepHouse()
			if m.opts.PeersFile != "" && time.Since(savedAt) > peersEvery {
				savedAt = time.Now()
				m.savePeers()
			}
		case <-m.ctx.Done():
			return
		}
		if due = m.overflow.Swap(false) || due; due {
			pause := readGap
			if time.Since(readAt) >= readGap && m.readState() {
				readAt, pause = time.Now(), m.readPause()
			}
			read.Reset(pause)
		}
		m.publish()
	}
}

func (m *Mesh) readPause() time.Duration {
	pause := max(m.readEvery, time.Duration(m.alive.Load())*readPer)
	return pause - time.Duration(rand.Int64N(int64(pause/4)))
}

// take brings the list up to date with an event and those that follow at once.
// It reports whether the whole state should be read for what events do not tell.
func (m *Mesh) take(e event) (soon bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for range eventQueue {
		switch e.kind {
		case eventJoined:
			m.table.joined(e.node, now)
		case eventUpdated:
			m.table.updated(e.node)
		case eventEnded:
			soon = true // the event does not say whether it is lost or has left
		case eventConflict:
			m.table.conflict(e.node.name, e.other, now)
		case eventAnswered:
			m.table.answered(e.node.name, e.rtt)
		case eventRefused:
			m.table.refuse(e.node.name, e.other, now)
		case eventUDPLost:
			m.table.udpLost(e.node.name, now)
		}
		select {
		case e = <-m.events:
		default:
			return soon
		}
	}
	return soon
}

func (m *Mesh) readState() bool {
	nodes, ok := m.selfRead()
	if !ok {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.table.reconcile(nodes, time.Now())
	return true
}

func (m *Mesh) keepHouse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	m.table.expire(now)
	m.sketches.keep(func(name string, life uint32, came time.Time) bool {
		present, _, ok := m.table.life(name)
		if !ok || present != life {
			return now.Sub(came) < sketchOrphanKept
		}
		return m.table.entries[name].Status != StatusLeft
	})
}

// publish logs and tells what changed.
func (m *Mesh) publish() {
	m.mu.Lock()
	changed := m.table.changed
	m.table.changed = false
	log := m.table.takeLog()
	var members []Member
	alive := 0
	if changed {
		members = m.table.members()
		for _, e := range m.table.entries {
			if e.alive() {
				alive++
			}
		}
		m.alive.Store(int64(alive))
		if m.join.Alone != (alive <= 1) {
			m.join.Alone, m.join.Since = alive <= 1, time.Now()
		}
	}
	m.mu.Unlock()
	if slices.ContainsFunc(log, func(t transition) bool { return t.member.Status == StatusLost }) {
		select {
		case m.someoneLost <- struct{}{}:
		default:
		}
	}
	for i, t := range log {
		if i == maxLogBatch {
			m.log.Info("more members changed", "count", len(log)-i)
			break
		}
		m.logTransition(t)
	}
	if changed && m.opts.OnChange != nil {
		m.opts.OnChange(members)
	}
}

func (m *Mesh) logTransition(t transition) {
	if t.member.Self {
		return
	}
	attrs := []any{"member", t.member.Name, "address", t.member.Address, "role", string(t.member.Meta.Role)}
	switch t.member.Status {
	case StatusAlive:
		if t.from == "" || t.from == StatusLost || t.from == StatusLeft {
			m.log.Info("member joined", append(attrs, "event", "host_joined")...)
		} else {
			m.log.Info("member is well again", append(attrs, "was", string(t.from))...)
		}
	case StatusSuspect:
		m.log.Warn("member does not answer", append(attrs, "event", "host_suspect")...)
	case StatusLost:
		m.log.Warn("member lost", append(attrs, "event", "host_lost")...)
	case StatusLeft:
		m.log.Info("member left", append(attrs, "event", "host_left", "note", t.member.Note)...)
	case StatusConflict:
		m.log.Warn("two members under one name, the first is kept", append(attrs, "event", "host_conflict", "other", t.member.Other)...)
	case StatusRefused:
		m.log.Warn("gossip refused", "event", "key_refused", "from", t.member.Address, "reason", t.member.Other,
			"fix", fmt.Sprintf("compare mesh.key_file and the fleet's name there with those here (key %s, fleet %s)", m.currentMeta().KeyID, m.opts.Fleet))
	}
}

// delegate is what memberlist calls. Event and alive callbacks run under its lock.
type delegate struct{ m *Mesh }

var (
	_ memberlist.Delegate         = (*delegate)(nil)
	_ memberlist.EventDelegate    = (*delegate)(nil)
	_ memberlist.ConflictDelegate = (*delegate)(nil)
	_ memberlist.AliveDelegate    = (*delegate)(nil)
	_ memberlist.PingDelegate     = (*delegate)(nil)
)

// NodeMeta implements memberlist.Delegate.
func (d *delegate) NodeMeta(int) []byte { return d.m.currentMeta().encode() }

// NotifyMsg implements memberlist.Delegate.
func (d *delegate) NotifyMsg(b []byte) {
	f, err := decodeSketch(b)
	if err != nil {
		d.m.counts.drop("malformed")
		return
	}
	if f.name == d.m.opts.Name {
		if f.life == d.m.life {
			d.m.echoes.heard(f.seq, time.Now())
		}
		return
	}
	if d.m.takeSketch(f, 0) {
		// Passing it on only when it is news makes it reach everyone and end.
		d.m.queue.QueueBroadcast(sketchBroadcast{f.name, f.encode()})
	}
}

func (m *Mesh) takeSketch(f sketchFrame, age time.Duration) (news bool) {
	if f.name == m.opts.Name {
		return false
	}
	m.mu.Lock()
	present, _, known := m.table.life(f.name)
	m.mu.Unlock()
	return m.sketches.take(f, age, present, known, time.Now())
}

// GetBroadcasts implements memberlist.Delegate.
func (d *delegate) GetBroadcasts(overhead, limit int) [][]byte {
	return d.m.queue.GetBroadcasts(overhead, limit)
}

// LocalState implements memberlist.Delegate.
func (d *delegate) LocalState(join bool) []byte {
	if d.m.merge.inProgress() {
		return nil // the self-read is about members
	}
	if join {
		return d.m.sketches.state(maxStateBytes, time.Now())
	}
	return d.m.sketches.state(maxExchangeBytes, time.Now())
}

// MergeRemoteState implements memberlist.Delegate.
func (d *delegate) MergeRemoteState(b []byte, _ bool) {
	// What is news here is hardly news to others: it is not passed on.
	if err := unpackState(b, func(f sketchFrame, age time.Duration) { d.m.takeSketch(f, age) }); err != nil {
		d.m.counts.drop("malformed")
	}
}

// NotifyJoin implements memberlist.EventDelegate.
func (d *delegate) NotifyJoin(n *memberlist.Node) {
	d.m.note(event{kind: eventJoined, node: nodeOf(n)})
}

// NotifyLeave implements memberlist.EventDelegate.
func (d *delegate) NotifyLeave(n *memberlist.Node) {
	d.m.note(event{kind: eventEnded, node: nodeOf(n)})
}

// NotifyUpdate implements memberlist.EventDelegate.
func (d *delegate) NotifyUpdate(n *memberlist.Node) {
	d.m.note(event{kind: eventUpdated, node: nodeOf(n)})
}

// NotifyConflict implements memberlist.ConflictDelegate.
func (d *delegate) NotifyConflict(existing, other *memberlist.Node) {
	d.m.note(event{kind: eventConflict, node: nodeOf(existing), other: hostPort(other.Addr, other.Port)})
}

// NotifyAlive implements memberlist.AliveDelegate. It refuses names that cannot
// be, members beyond the bound, and a life that said goodbye: others may still
// tell of it after the library has forgotten the goodbye.
func (d *delegate) NotifyAlive(n *memberlist.Node) error {
	if n.Name == d.m.opts.Name {
		return nil
	}
	if n.Name == "" || len(n.Name) > maxNameBytes {
		return fmt.Errorf("name of %d bytes", len(n.Name))
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	e := d.m.table.entries[n.Name]
	if e == nil {
		if int(d.m.alive.Load()) >= d.m.opts.MaxMembers {
			return fmt.Errorf("there are %d members already", d.m.opts.MaxMembers)
		}
		return nil
	}
	if e.Status == StatusLeft && e.replacedBy == "" && !e.badMeta {
		if meta, err := decodeMeta(n.Meta); err == nil && meta.Life == e.Meta.Life {
			return fmt.Errorf("%s has left", n.Name)
		}
	}
	return nil
}

// AckPayload implements memberlist.PingDelegate.
func (d *delegate) AckPayload() []byte { return nil }

// NotifyPingComplete implements memberlist.PingDelegate.
func (d *delegate) NotifyPingComplete(n *memberlist.Node, rtt time.Duration, _ []byte) {
	d.m.note(event{kind: eventAnswered, node: node{name: n.Name}, rtt: rtt})
}
