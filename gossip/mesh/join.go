package mesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	joinDialTimeout = 3 * time.Second
	joinParallel    = 8
	joinPerRound    = 32
	joinShown       = 3 // addresses whose error is shown
	// While alone the pause grows to 15 s, so that a member that was cut off is
	// back within 30 s. Otherwise a member that got lost within the last hour is
	// tried about twice a minute, and anyone every few minutes.
	joinLeast    = 500 * time.Millisecond
	joinMost     = 15 * time.Second
	rejoinLost   = 30 * time.Second
	rejoinAll    = 3 * time.Minute
	lostRecently = time.Hour
)

// joinLoop tries for ever to make the mesh whole.
func (m *Mesh) joinLoop() {
	remembered := m.rememberedPeers()
	rng := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	pause := joinLeast
	var saidAt time.Time
	for {
		targets, seeds := m.joinTargets(remembered, rng)
		reached, err := m.joinAll(targets, seeds)
		m.mu.Lock()
		m.join.Reached = reached
		m.join.Error = ""
		if err != nil {
			m.join.Error = err.Error()
		}
		status := m.join
		m.mu.Unlock()
		if err == nil && len(targets) > 0 {
			m.joinAgain(targets)
		}
		if err != nil && status.Alone && len(targets) > 0 && time.Since(saidAt) > logEvery {
			saidAt = time.Now()
			m.log.Warn("mesh: "+status.String(), "error", err)
		}
		if pause = m.joinWait(pause, rng); m.joinCtx.Err() != nil {
			return
		}
	}
}

// joinWait waits until the next try and returns the next pause while alone. A
// member that gets lost meanwhile makes the wait shorter, never longer.
func (m *Mesh) joinWait(pause time.Duration, rng *rand.Rand) (next time.Duration) {
	jitter := func(d time.Duration) time.Time { return time.Now().Add(d/2 + time.Duration(rng.Int64N(int64(d/2)+1))) }
	wait, next := m.joinPause(pause)
	due := jitter(wait)
	for {
		timer := time.NewTimer(time.Until(due))
		select {
		case <-timer.C:
			return next
		case <-m.someoneLost:
			timer.Stop()
			var sooner time.Duration
			sooner, next = m.joinPause(joinLeast)
			if at := jitter(sooner); at.Before(due) {
				due = at
			}
		case <-m.joinCtx.Done():
			timer.Stop()
			return next
		}
	}
}

// joinAgain repeats an exchange with those who are still not alive here. When two
// members hold each other for dead, the first exchange only makes both deny it;
// the second carries the denials.
func (m *Mesh) joinAgain(targets []string) {
	select {
	case <-time.After(joinLeast):
	case <-m.joinCtx.Done():
		return
	}
	alive := map[string]bool{}
	for _, x := range m.Members() {
		if x.Status == StatusAlive || x.Status == StatusSuspect || x.Status == StatusConflict {
			alive[x.Address] = true
		}
	}
	again := slices.DeleteFunc(slices.Clone(targets), func(a string) bool { return alive[a] })
	_, _ = m.joinAll(again, 0)
}

// joinPause returns the pause to the next try and the next pause while alone.
func (m *Mesh) joinPause(pause time.Duration) (wait, next time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	others, lost := false, false
	for _, e := range m.table.entries {
		if !e.Self {
			others = others || e.alive()
			lost = lost || e.Status == StatusLost && time.Since(e.Since) < lostRecently
		}
	}
	switch {
	case !others:
		return pause, min(2*pause, joinMost)
	case lost:
		return rejoinLost, joinLeast
	default:
		return rejoinAll, joinLeast
	}
}

func (m *Mesh) rememberedPeers() []peer {
	if m.opts.PeersFile == "" {
		return nil
	}
	peers, err := readPeers(m.opts.PeersFile)
	if err != nil {
		m.log.Warn("remembered peers cannot be read and are forgotten", "file", m.opts.PeersFile, "error", err)
	}
	return peers
}

// joinTargets returns the addresses to try now; the first ones are seeds.
func (m *Mesh) joinTargets(remembered []peer, rng *rand.Rand) (targets []string, seeds int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	alive := map[string]bool{m.address: true}
	alone := true
	var known []string
	for _, e := range m.table.entries {
		switch {
		case e.alive():
			alive[e.Address] = true
			alone = alone && e.Self
		case e.Status == StatusLost:
			known = append(known, e.Address)
		}
	}
	for _, p := range remembered {
		known = append(known, p.Address)
	}
	add := func(from []string, limit int) {
		for _, i := range rng.Perm(len(from)) {
			if a := from[i]; limit > 0 && !alive[a] && !slices.Contains(targets, a) {
				targets = append(targets, a)
				limit--
			}
		}
	}
	if alone {
		add(m.opts.Join, joinPerRound)
		seeds = len(targets)
		add(known, joinPerRound-seeds)
		return targets, seeds
	}
	// One seed and one lost member per round are enough to find another half.
	add(m.opts.Join, 1)
	seeds = len(targets)
	add(known, 1)
	return targets, seeds
}

// joinAll tries addresses side by side. It returns how many of the first ones,
// the seeds, answered, and the errors if nobody did.
func (m *Mesh) joinAll(targets []string, seeds int) (reached int, err error) {
	var wg sync.WaitGroup
	var seedsReached, anyReached atomic.Int64
	errs := make([]error, len(targets))
	slots := make(chan struct{}, joinParallel)
	for i, a := range targets {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if errs[i] = m.joinOne(m.joinCtx, a); errs[i] == nil {
				anyReached.Add(1)
				if i < seeds {
					seedsReached.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if anyReached.Load() > 0 {
		return int(seedsReached.Load()), nil
	}
	if len(errs) == 0 {
		return 0, nil
	}
	var text []string
	for i, e := range errs {
		if i == joinShown {
			text = append(text, fmt.Sprintf("and %d more", len(errs)-i))
			break
		}
		text = append(text, e.Error())
	}
	return 0, errors.New(strings.Join(text, "; "))
}

var joinNumber atomic.Uint64

// joinOne exchanges state with the member at an address. The connection is
// dialled first, so that the merge gate is held only while someone answers.
func (m *Mesh) joinOne(ctx context.Context, address string) error {
	d := net.Dialer{Timeout: joinDialTimeout}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("%s: %w", address, err)
	}
	name := fmt.Sprintf(".join-%d", joinNumber.Add(1))
	m.transport.offer(name, c)
	defer m.transport.withdraw(name)
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	m.transport.gate.RLock()
	defer m.transport.gate.RUnlock()
	if _, err := m.list.Join([]string{name + "/" + c.RemoteAddr().String()}); err != nil {
		return fmt.Errorf("%s: %w", address, m.explainJoin(err))
	}
	return nil
}

// explainJoin says what a failed exchange most likely means.
func (m *Mesh) explainJoin(err error) error {
	text := err.Error()
	switch {
	case strings.Contains(text, "no installed keys could decrypt"), strings.Contains(text, "is not encrypted"), strings.Contains(text, "encryption is not configured"):
		return fmt.Errorf("refused: it uses another gossip key than ours (%s): compare mesh.key_file", m.currentMeta().KeyID)
	case strings.HasSuffix(strings.TrimSpace(text), io.EOF.Error()), strings.Contains(text, "connection reset"):
		return fmt.Errorf("closed the connection without an answer: another fleet than %q, or not a mesh port", m.opts.Fleet)
	}
	if _, inner, ok := strings.Cut(text, "* failed to join "); ok {
		text = strings.TrimSpace(inner)
	}
	return errors.New(text)
}

// savePeers remembers the members. Having lost everyone is no reason to forget them.
func (m *Mesh) savePeers() {
	if m.opts.PeersFile == "" {
		return
	}
	m.mu.Lock()
	peers := m.table.peers()
	m.mu.Unlock()
	if len(peers) == 0 {
		return
	}
	if old, err := readPeers(m.opts.PeersFile); err == nil && slices.Equal(old, peers) {
		return
	}
	if err := writePeers(m.opts.PeersFile, peers); err != nil {
		m.counts.drop("peers_file")
		m.log.Debug("peers cannot be remembered", "file", m.opts.PeersFile, "error", err)
	}
}
