package kvevents

import (
	"time"

	"waypost/agent/engine"
)

// ask starts a replay. Its answers carry the run's number, so that those of an
// earlier one are recognised.
func (s *Stream) ask(now time.Time, r run) {
	s.runs++
	r.id, r.heard, r.any, r.hole, r.strange = s.runs, now, false, false, false
	s.run, s.retryAt = r, time.Time{}
	s.fx.Counted(CountReplays, 1)
	s.fx.AskReplay(r.id, r.from)
}

// build asks for everything, to build a first view; at once, unless it did so
// just now, as when a connection comes and goes.
func (s *Stream) build(now time.Time) {
	s.mode = modeBuild
	if !s.lastBuild.IsZero() && now.Sub(s.lastBuild) < s.o.RetryMin {
		s.retryAt = now.Add(s.o.RetryMin)
		return
	}
	s.lastBuild = now
	s.ask(now, run{from: 0})
}

// rebuild asks for everything, to be built beside the view there is. That one
// stays until answers come.
func (s *Stream) rebuild(now time.Time) {
	s.ask(now, run{from: 0, rebuild: true})
}

// goOn asks for what follows the last known batch, and for that batch again:
// it shows whether the publisher is still the same.
func (s *Stream) goOn(now time.Time) {
	if s.next == 0 {
		s.ask(now, run{from: 0})
		return
	}
	s.ask(now, run{from: s.next - 1, checked: true})
}

// askAgain repeats a replay that failed, from where it broke off.
func (s *Stream) askAgain(now time.Time) {
	if s.again.rebuild && s.mode == modeLive {
		s.rebuild(now)
		return
	}
	s.goOn(now)
	s.run.accept = s.again.accept
}

// Replayed takes a batch of a replay, and says whether its answers are wanted
// any more.
func (s *Stream) Replayed(id uint64, m Message) (more bool) {
	if id != s.run.id || s.gone {
		return false
	}
	s.replayed(m)
	s.tell()
	return id == s.run.id
}

func (s *Stream) replayed(m Message) {
	if s.run.any && m.Seq <= s.run.last {
		// Answers that do not go on would never end.
		s.fx.Counted(CountMalformed, 1)
		s.ReplayFailed(s.run.id, m.Received)
		return
	}
	s.run.last = m.Seq
	m.Replayed = true
	s.run.heard = m.Received
	s.silent, s.failures = false, 0
	if s.sums.differs(m) {
		s.restart(m.Received, nil)
		return
	}
	if s.run.rebuild && s.mode == modeLive {
		s.fx.Rebuild(engine.ResetGap)
		if s.started && !s.unverified {
			// What the view that stands was waiting for is not in the history any more.
			s.countLost(s.next, s.before(m.Seq))
		}
		s.mode, s.started, s.next = modeRebuild, false, 0
		s.lossy, s.holed, s.unverified, s.rebuildAt = false, false, false, time.Time{}
	}
	if !s.run.any && s.run.checked && m.Seq > s.run.from && s.unverified {
		s.run.strange = true
	}
	s.run.any = true
	switch {
	case s.run.hole, s.run.strange:
	case !s.started:
		s.start(m)
		s.apply(m)
	case m.Seq < s.next:
	case m.Seq == s.next:
		if s.mode == modeLive && len(s.held) == 0 && !s.unverified {
			s.fx.Counted(CountTail, 1)
		}
		s.apply(m)
	case s.run.accept:
		s.run.accept = false
		s.goOnAt(m.Received, m.Seq)
		s.apply(m)
	default:
		s.run.hole = true
	}
}

// ReplayEnded takes the end marker of a replay.
func (s *Stream) ReplayEnded(id uint64, now time.Time) {
	if id != s.run.id || s.gone {
		return
	}
	r := s.run
	s.run = run{}
	s.silent, s.failures = false, 0
	switch {
	case r.strange:
		s.rebuild(now)
	case r.any:
		s.finish(now, r)
	case r.checked, r.rebuild && (s.next > 0 || len(s.held) > 0):
		s.nothingReplayed(now)
	default:
		s.started = true // nothing was published from next on
		s.finish(now, r)
	}
	s.tell()
}

// nothingReplayed judges a replay without even the last batch: the publisher
// has not got that far, so it is another one, unless that batch came over the
// connection that still stands.
func (s *Stream) nothingReplayed(now time.Time) {
	if s.unverified || s.conn != s.seqConn || s.disconnected {
		s.restart(now, nil)
		return
	}
	s.fx.Counted(CountInconsistent, 1)
	pause := s.probePause
	if s.skipHoles(now) {
		s.settle(now)
		s.behind, s.probePause = true, min(2*pause, 32*s.o.ProbeEvery)
	}
}

// finish takes what was held once a replay ended. Batches that are missing are
// asked for once more, since a publisher drops answers that leave too fast;
// then they are gone: a view being built goes on behind them, one that stands
// is built anew.
func (s *Stream) finish(now time.Time, r run) {
	restarts := s.restarts
	if !r.hole && s.drain() {
		s.settle(now)
		return
	}
	if s.restarts != restarts {
		return // draining found another process
	}
	if !s.holeTried || s.holeAt != s.next {
		s.holeTried, s.holeAt = true, s.next
		s.goOn(now)
		return
	}
	switch {
	case s.mode == modeLive:
		s.rebuild(now)
	case r.hole:
		s.goOn(now)
		s.run.accept = true
	default:
		s.goOnAt(now, s.held[0].Seq)
		s.finish(now, run{})
	}
}

// settle ends a replay after which nothing is missing.
func (s *Stream) settle(now time.Time) {
	s.lastProbe = now
	if s.mode == modeRebuild {
		s.fx.Rebuilt()
	}
	s.mode = modeLive
	s.behind, s.unverified, s.probePause = false, false, s.o.ProbeEvery
	if !s.lossy && !s.holed {
		s.rebuildPause = s.o.RebuildAfter
	}
}

// ReplayFailed tells that a replay broke off or was never answered.
func (s *Stream) ReplayFailed(id uint64, now time.Time) {
	if id != s.run.id || s.gone {
		return
	}
	r := s.run
	s.run = run{}
	s.fx.Counted(CountReplayFailed, 1)
	if s.failures++; s.failures < triesBeforeGoingOn {
		s.again, s.retryAt = r, now.Add(s.pause(s.failures-1))
		s.tell()
		return
	}
	if s.skipHoles(now) {
		building := s.mode != modeLive || r.rebuild
		if s.unverified {
			s.loses(now) // the view may be a former process's
		}
		s.settle(now)
		s.silent = true
		if building {
			s.rebuildAt = now.Add(s.o.RetryMax)
		}
	}
	s.tell()
}

// skipHoles applies everything held without what is missing between, unless
// that shows another process.
func (s *Stream) skipHoles(now time.Time) bool {
	restarts := s.restarts
	for !s.drain() {
		if s.restarts != restarts {
			return false
		}
		s.goOnAt(now, s.held[0].Seq)
	}
	return true
}
