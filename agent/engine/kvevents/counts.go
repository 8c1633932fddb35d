package kvevents

// What a stream counts.
const (
	CountGaps         = "gaps"               // jumps of the number
	CountMissing      = "missingBatches"     // batches jumped over
	CountLost         = "lostBatches"        // of those, the ones nobody has any more
	CountTail         = "tailBatches"        // batches only a probe brought
	CountDuplicates   = "duplicateBatches"   //
	CountRestarts     = "restarts"           //
	CountReplays      = "replays"            // replays asked for
	CountReplayFailed = "replaysFailed"      // without an answer or its end
	CountInconsistent = "replayInconsistent" // replay behind the live stream
	CountHeldDropped  = "heldBatchesDropped" // no room to hold while replaying
	CountMalformed    = "malformedMessages"  // frames or payload unreadable
	CountDamaged      = "damagedEvents"      //
	CountUnknown      = "unknownEvents"      //
	CountWrongRank    = "wrongRankBatches"   // of another rank of the engine
	CountForeign      = "foreignMessages"    // of a second publisher on a socket that listens
	CountClears       = "repeatedClears"     // clears right behind a clear
	CountSilences     = "silences"           // work without an event
	CountUnknownTier  = "unknownTierBlocks"  // stored in memory that is not told
)

// countJump counts the batches that a live one jumps over, also while others wait for
// a replay. What a replay brought before is not missing; how far one that builds a
// view has come says nothing of where the live ones are.
func (s *Stream) countJump(seq uint64) {
	from, known := s.liveNext, s.liveNext > 0
	if s.started && !s.unverified && (known || s.mode == modeLive) {
		from, known = max(from, s.next), true
	}
	if known && seq > from {
		s.fx.Counted(CountGaps, 1)
		s.fx.Counted(CountMissing, int(min(seq-from, 1<<31)))
	}
}

// countLost counts batches that nobody has any more, each once: a view that is built
// anew finds the same ones missing.
func (s *Stream) countLost(from, to uint64) {
	if from = max(from, s.lostTo); to > from {
		s.fx.Counted(CountLost, int(min(to-from, 1<<31)))
		s.lostTo = to
	}
}

// before is a number, or that of the first live batch that waits if it comes earlier.
func (s *Stream) before(seq uint64) uint64 {
	if len(s.held) > 0 {
		return min(seq, s.held[0].Seq)
	}
	return seq
}
