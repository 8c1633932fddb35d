package kvevents

import (
	"fmt"

	"waypost/agent/engine"
)

// The hints that go with partial or no coverage; %s is the setting.
const (
	hintCatchingUp   = "reading the engine's history of events"
	hintNoReplay     = "the engine replays no events: set replay_endpoint in %s"
	hintReplaySilent = "the engine's replay socket does not answer: check replay_endpoint in %s"
	hintReplayBehind = "the engine's replay is behind its own event stream"
	hintLate         = "earlier events are gone: raise buffer_steps in %s"
	hintGap          = "a gap in the events is being replayed"
	hintLossy        = "events were lost and could not be replayed: raise buffer_steps in %s"
	hintLossForGood  = "events were lost and the engine replays none: set replay_endpoint in %s"
	hintDisconnected = "the event stream is disconnected"
	hintNever        = "no event publisher answers at %s: check endpoint in %s"
	hintGone         = "the engine's HTTP server is gone"
	hintFormat       = "unknown event format: the agent may be older than the engine"
	hintWrongRank    = "events of rank %d arrive where those of rank %d belong: give each rank an endpoint of its own in %s"
	hintUnknownTier  = "tier unknown: the engine stores blocks in memory that it does not name, they earn no credit"
	hintSilent       = "no event came while the engine computed prompts: check %s"
)

// tell reports coverage when it changed.
func (s *Stream) tell() {
	c, hint := s.coverage()
	if c != s.told || hint != s.toldHint {
		s.told, s.toldHint = c, hint
		s.fx.Coverage(c, hint)
	}
}

func (s *Stream) coverage() (engine.Coverage, string) {
	const manyBad = 3
	set := func(hint string) string { return fmt.Sprintf(hint, s.o.Setting) }
	switch {
	case s.gone:
		return engine.CoverageNone, hintGone
	case s.badInARow >= manyBad:
		return engine.CoveragePartial, hintFormat
	case s.otherRank >= 0:
		return engine.CoverageNone, fmt.Sprintf(hintWrongRank, s.otherRank, s.o.Rank, s.o.Setting)
	case s.never:
		return engine.CoverageNone, fmt.Sprintf(hintNever, s.o.Endpoint, s.o.Setting)
	case s.mute && !s.heard:
		return engine.CoverageNone, fmt.Sprintf(hintSilent, s.o.Check)
	case s.disconnected:
		return engine.CoveragePartial, hintDisconnected
	case s.silent:
		return engine.CoveragePartial, set(hintReplaySilent)
	case s.o.Replay && s.mode != modeLive, s.unverified:
		return engine.CoveragePartial, s.catchingUp()
	case len(s.held) > 0:
		return engine.CoveragePartial, hintGap
	case s.lossy && !s.o.Replay:
		return engine.CoveragePartial, set(hintLossForGood)
	case s.lossy:
		return engine.CoveragePartial, set(hintLossy)
	case s.behind:
		return engine.CoveragePartial, hintReplayBehind
	case s.mute:
		return engine.CoveragePartial, fmt.Sprintf(hintSilent, s.o.Check)
	case !s.started, s.late && !s.o.Replay:
		return engine.CoveragePartial, set(hintNoReplay)
	case s.late:
		return engine.CoveragePartial, set(hintLate)
	case s.untold:
		return engine.CoveragePartial, hintUnknownTier
	case s.doubt != "":
		return engine.CoveragePartial, s.doubt
	}
	return engine.CoverageFull, ""
}

// catchingUp says how far the history was read: in steps, since each is told.
func (s *Stream) catchingUp() string {
	const step = 1000
	at := s.next / step * step
	if at == 0 || !s.started {
		return hintCatchingUp
	}
	if at != s.progressAt {
		s.progressAt, s.progress = at, fmt.Sprintf("%s: %d batches", hintCatchingUp, at)
		if len(s.held) > 0 && s.held[0].Seq > s.next {
			s.progress += fmt.Sprintf(", %d %%", 100*at/s.held[0].Seq)
		}
	}
	return s.progress
}
