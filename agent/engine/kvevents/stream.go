package kvevents

import (
	"bytes"
	"cmp"
	"slices"
	"time"

	"waypost/agent/engine"
)

// Effects is what a stream wants done. The calls are made from within the
// stream's methods, in order.
type Effects interface {
	// Apply wants the batch mirrored; the payload is valid during the call.
	Apply(m Message)
	// AskReplay wants every batch from a number on asked for. Answers are
	// given back with run; an earlier run is abandoned.
	AskReplay(run, from uint64)
	// Reset, Rebuild, Rebuilt, Coverage and Counted are as in engine.Sink.
	Reset(cause engine.ResetCause)
	Rebuild(cause engine.ResetCause)
	Rebuilt()
	Coverage(c engine.Coverage, hint string)
	Counted(what string, n int)
}

// StreamOptions configures a stream. Zero values are the defaults.
type StreamOptions struct {
	// Replay says whether there is a replay socket.
	Replay bool
	// ReplayTimeout is the silence after which a replay has failed. 5 s.
	ReplayTimeout time.Duration
	// ProbeEvery is the time between looks for batches lost at the tail, and
	// BusyProbeAfter the silence that prompts one while requests run. 15 s, 5 s.
	ProbeEvery, BusyProbeAfter time.Duration
	// MaxHeld and MaxHeldBytes bound the live batches held during a replay.
	// 20,000 and 64 MiB.
	MaxHeld, MaxHeldBytes int
	// RetryMin and RetryMax bound the pause before asking again. 1 s, 1 min.
	RetryMin, RetryMax time.Duration
	// RebuildAfter is the first pause before a lossy view is rebuilt from the
	// beginning; it doubles up to 32 times as long. 1 min.
	RebuildAfter time.Duration
	// Once says that a number comes once in a life of the publisher: one that
	// comes again is of another life, whatever it holds.
	Once bool
	// Rank is the rank it is of, as hints name it.
	Rank int
	// Endpoint and Setting are what hints call the event socket and the
	// engine's setting of events; Check is what to look at if nothing comes.
	Endpoint, Setting, Check string
}

func (o *StreamOptions) defaults() {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if o.Setting == "" {
		o.Setting = "the engine's setting of KV events"
	}
	set(&o.ReplayTimeout, 5*time.Second)
	set(&o.ProbeEvery, 15*time.Second)
	set(&o.BusyProbeAfter, 5*time.Second)
	set(&o.RetryMin, time.Second)
	set(&o.RetryMax, time.Minute)
	set(&o.RebuildAfter, time.Minute)
	if o.MaxHeld == 0 {
		o.MaxHeld = 20_000
	}
	if o.MaxHeldBytes == 0 {
		o.MaxHeldBytes = 64 << 20
	}
}

// triesBeforeGoingOn is how often a replay may fail before live batches are
// taken without it.
const triesBeforeGoingOn = 3

// mode is how far a stream's view has come.
type mode uint8

const (
	modeIdle    mode = iota // nothing is known yet
	modeBuild               // a first view is built from a replay; live batches wait
	modeRebuild             // a new view is built beside the old; live batches wait
	modeLive                // live batches are applied as they come
)

// Stream follows one publisher: it orders live and replayed batches, finds
// gaps, restarts and losses at the tail, and says how much of the cache the
// events show. It is pure: time is an argument, what it wants done it tells
// to Effects. It is not safe for concurrent use.
//
//	idle ── connected: replay from 0 ──► build ── end marker ──► live
//	                                       ▲                      │ ▲
//	                     restart (reset) ──┴──────────────────────┤ │ gap filled
//	                     gap: replay from it ─────────────────────┼─┘
//	                     not there any more: replay from 0 ──► rebuild ──► live
type Stream struct {
	o  StreamOptions
	fx Effects

	mode    mode
	next    uint64 // number of the batch to apply next
	started bool   // next is known
	sums    sums

	// The doubts that make coverage partial.
	late         bool // nothing is known of before the first batch of the view
	lateBlocks   int  // stored since then
	lossy        bool // batches or removals are missing for good
	holed        bool // the view begins behind batches that the replay left out
	disconnected bool
	unverified   bool // connected anew: the process may be another one
	silent       bool // replay does not answer
	behind       bool // replay contradicts the live stream
	never        bool // no connection was ever made
	mute         bool // the engine computes and tells of nothing
	heard        bool // a batch came in this life
	otherRank    int  // the rank whose batches come in place of ours; -1: none
	untold       bool // blocks were stored in memory that is not told
	doubt        string
	gone         bool // the engine does not serve
	badInARow    int
	pool         int

	conn, seqConn uint64 // of the event socket: now, and of the last live batch
	liveNext      uint64 // number behind the last live batch of this connection; 0: not known
	lostTo        uint64 // number up to which lost batches were counted
	run           run
	runs          uint64
	again         run // what to ask at retryAt
	retryAt       time.Time
	rebuildAt     time.Time // zero: none due
	failures      int
	holeAt        uint64 // where the last run found a hole
	holeTried     bool
	rebuildPause  time.Duration
	probePause    time.Duration
	lastLive      time.Time
	lastProbe     time.Time
	lastBuild     time.Time
	lastRestart   time.Time
	restarts      int
	hasty         int // restarts in quick succession

	held      []Message // live batches that wait, in order
	heldBytes int

	progressAt uint64
	progress   string

	told     engine.Coverage
	toldHint string
}

// run is one replay that was asked for.
type run struct {
	id      uint64 // 0: none
	from    uint64
	checked bool // the batch at from is known: it must come, and be the same
	rebuild bool // from the beginning, beside what is known
	accept  bool // a hole is final: go on behind it
	any     bool // an answer came
	last    uint64
	hole    bool // a batch is missing among the answers
	strange bool // the batch to be checked is gone: the process may be another
	heard   time.Time
}

// NewStream makes a stream that waits for Connected.
func NewStream(o StreamOptions, fx Effects) *Stream {
	o.defaults()
	return &Stream{o: o, fx: fx, disconnected: true, never: true, otherRank: -1, rebuildPause: o.RebuildAfter, probePause: o.ProbeEvery}
}

// SetPool tells the number of blocks the engine can hold: once as many were
// stored since a late start, nothing older than that can matter much.
func (s *Stream) SetPool(blocks int) { s.pool = blocks }

// LastRestart is when the stream last saw the engine restart.
func (s *Stream) LastRestart() time.Time { return s.lastRestart }

// Connected tells that the event socket is connected and subscribed.
func (s *Stream) Connected(now time.Time) {
	s.conn++
	s.liveNext = 0
	s.disconnected, s.never = false, false
	s.lastLive = now
	switch {
	case s.gone || !s.o.Replay:
	case s.mode == modeIdle:
		s.build(now)
	case s.mode == modeLive && s.started:
		// What waits came over the former connection; if it is of the same
		// process the replay brings it again.
		s.held, s.heldBytes = nil, 0
		s.unverified = true
		s.lastProbe = now
		s.goOn(now)
	default:
		// What was being read may be of a process that is no more.
		s.fx.Reset(engine.ResetGap)
		s.forget()
		s.build(now)
	}
	s.tell()
}

// Disconnected tells that the event socket lost its connection.
func (s *Stream) Disconnected(time.Time) {
	s.disconnected = true
	s.tell()
}

// Live takes a message of the event socket.
func (s *Stream) Live(m Message) {
	if s.gone {
		return
	}
	s.lastLive, s.seqConn = m.Received, s.conn
	s.countJump(m.Seq)
	switch {
	case s.mode == modeBuild, s.mode == modeRebuild, s.run.rebuild, s.unverified, len(s.held) > 0:
		s.hold(m)
	case !s.started:
		s.mode = modeLive
		s.start(m)
		s.applyLive(m)
	case m.Seq == s.next:
		s.applyLive(m)
	case m.Seq < s.next:
		s.old(m)
	default:
		if !s.o.Replay {
			s.goOnAt(m.Received, m.Seq)
			s.applyLive(m)
			break
		}
		s.hold(m)
		if s.run.id == 0 {
			s.goOn(m.Received)
		}
	}
	s.tell()
}

// old judges a batch with a number that was applied before.
func (s *Stream) old(m Message) {
	if s.seen(m) {
		s.fx.Counted(CountDuplicates, 1)
		return
	}
	s.restart(m.Received, &m)
}

// seen says whether a batch came before: it was applied, or waits.
func (s *Stream) seen(m Message) bool {
	i, waits := slices.BinarySearchFunc(s.held, m.Seq, func(h Message, seq uint64) int { return cmp.Compare(h.Seq, seq) })
	return !s.o.Once && (s.sums.same(m) || waits && bytes.Equal(s.held[i].Payload, m.Payload))
}

func (s *Stream) hold(m Message) {
	if k := len(s.held); k > 0 && m.Seq <= s.held[k-1].Seq {
		if s.seen(m) {
			s.fx.Counted(CountDuplicates, 1)
			return
		}
		s.restart(m.Received, &m)
		return
	}
	m.Payload = bytes.Clone(m.Payload)
	s.held = append(s.held, m)
	s.heldBytes += len(m.Payload)
	s.liveNext = m.Seq + 1
	dropped := 0
	for len(s.held)-dropped > 1 && (len(s.held)-dropped > s.o.MaxHeld || s.heldBytes > s.o.MaxHeldBytes) {
		s.heldBytes -= len(s.held[dropped].Payload)
		dropped++
	}
	if dropped > 0 {
		s.held = append(s.held[:0], s.held[dropped:]...)
		s.fx.Counted(CountHeldDropped, dropped)
	}
}

// drain applies what was held as far as it goes on from what is known, and
// says whether nothing is left.
func (s *Stream) drain() bool {
	for i := range s.held {
		m := s.held[i]
		switch {
		case !s.started:
			s.start(m)
			s.apply(m)
		case m.Seq == s.next:
			s.apply(m)
		case m.Seq > s.next:
			for _, d := range s.held[:i] {
				s.heldBytes -= len(d.Payload)
			}
			s.held = append(s.held[:0], s.held[i:]...)
			return false
		case s.sums.differs(m):
			rest := s.held[i:]
			s.restart(m.Received, nil)
			for _, m := range rest {
				s.hold(m)
			}
			return false
		}
	}
	s.held, s.heldBytes = nil, 0
	return true
}

// start begins with a batch of which nothing earlier is known.
func (s *Stream) start(m Message) {
	s.started, s.next = true, m.Seq
	s.late, s.lateBlocks = m.Seq > 0, 0
}

func (s *Stream) applyLive(m Message) {
	s.apply(m)
	s.liveNext = m.Seq + 1
}

func (s *Stream) apply(m Message) {
	s.next = m.Seq + 1
	s.sums.put(m)
	s.holeTried = false
	s.heard, s.mute = true, false
	s.fx.Apply(m)
}

// goOnAt accepts that the batches before seq are lost. What a view that is
// being built holds from before them may have been removed in them, so it begins
// anew behind: it shows less than there is, never more. One that stands serves
// on until another is built beside it.
func (s *Stream) goOnAt(now time.Time, seq uint64) {
	s.countLost(s.next, seq)
	s.next = seq
	switch s.mode {
	case modeBuild:
		s.fx.Reset(engine.ResetGap)
	case modeRebuild:
		s.fx.Rebuild(engine.ResetGap)
	default:
		s.loses(now)
		return
	}
	s.late, s.lateBlocks = true, 0
	s.lossy, s.rebuildAt = false, time.Time{}
	// A publisher that drops answers may have those batches all the same.
	s.holed = true
	s.planRebuild(now)
}

// loses notes that the view may claim what is gone, and plans to build it anew.
func (s *Stream) loses(now time.Time) {
	s.lossy = true
	s.planRebuild(now)
}

// planRebuild plans to read everything again, each time after a longer pause.
func (s *Stream) planRebuild(now time.Time) {
	if s.o.Replay && s.rebuildAt.IsZero() {
		s.rebuildAt = now.Add(s.rebuildPause)
		s.rebuildPause = min(2*s.rebuildPause, 32*s.o.RebuildAfter)
	}
}

// Applied tells what became of the batch given to Apply: GPU blocks it stored,
// events that could not be read, events of unknown kinds, and whether removals
// may have been lost with them.
func (s *Stream) Applied(now time.Time, stored, damaged, unknown int, lostRemovals bool) {
	s.badInARow = 0
	if damaged > 0 {
		s.fx.Counted(CountDamaged, damaged)
	}
	if unknown > 0 {
		s.fx.Counted(CountUnknown, unknown)
	}
	if lostRemovals {
		s.loses(now)
	}
	if s.late {
		s.lateBlocks += stored
		if s.pool > 0 && s.lateBlocks > s.pool {
			s.late = false // what was missed must have been evicted since
			if s.holed && !s.lossy {
				s.rebuildAt, s.rebuildPause = time.Time{}, s.o.RebuildAfter
			}
			s.holed = false
		}
	}
}

// Cleared tells that the batch given to Apply clears GPU memory, and that the engine
// tells of no other: what was missed before matters no more. It is told before
// Applied, since a removal that was lost in the same batch may stand behind.
func (s *Stream) Cleared() {
	s.late, s.lossy, s.holed = false, false, false
	s.rebuildAt, s.rebuildPause = time.Time{}, s.o.RebuildAfter
}

// WrongRank tells that the batch given to Apply is another rank's of the same
// engine, and was not applied: its cache must not be taken for ours. RightRank
// tells that one was ours.
func (s *Stream) WrongRank(now time.Time, rank int) {
	s.fx.Counted(CountWrongRank, 1)
	if s.otherRank < 0 {
		s.fx.Reset(engine.ResetGap)
	}
	s.otherRank = rank
}

// RightRank tells that the batch given to Apply was ours.
func (s *Stream) RightRank() { s.otherRank = -1 }

// Silent tells whether the engine computed prompts long enough for events to be
// due, and none came.
func (s *Stream) Silent(mute bool) {
	if mute && !s.mute && !s.gone {
		s.fx.Counted(CountSilences, 1)
	}
	s.mute = mute
	s.tell()
}

// UnknownTier tells how many blocks the batch given to Apply stored in memory that
// is not told. Nobody can use them, so that the view is one in part from then on.
func (s *Stream) UnknownTier(blocks int) {
	if blocks > 0 {
		s.fx.Counted(CountUnknownTier, blocks)
		s.untold = true
	}
}

// Doubt tells why the events cannot be relied on whatever the stream itself
// shows; empty: they can.
func (s *Stream) Doubt(why string) {
	s.doubt = why
	s.tell()
}

// Malformed tells of a message or payload that could not be read at all.
func (s *Stream) Malformed(now time.Time) {
	s.fx.Counted(CountMalformed, 1)
	s.badInARow++
	s.tell()
}

// BadPayload tells that the batch given to Apply could not be decoded.
func (s *Stream) BadPayload(now time.Time) {
	s.fx.Counted(CountMalformed, 1)
	s.badInARow++
	s.loses(now)
}

// Restart tells that the engine's process is another one.
func (s *Stream) Restart(now time.Time) {
	if !s.gone {
		s.restart(now, nil)
		s.tell()
	}
}

// restart begins anew with another process, whose first batch may be at hand.
func (s *Stream) restart(now time.Time, first *Message) {
	s.fx.Counted(CountRestarts, 1)
	s.fx.Reset(engine.ResetRestart)
	quick := !s.lastRestart.IsZero() && now.Sub(s.lastRestart) < 2*s.pause(s.hasty)
	s.lastRestart = now
	s.restarts++
	s.forget()
	if !s.o.Replay {
		if first != nil {
			s.mode = modeLive
			s.start(*first)
			s.apply(*first)
		}
		return
	}
	if !quick {
		s.hasty, s.lastBuild = 0, time.Time{}
		s.build(now)
	} else {
		// A stream that seems to restart again and again must not be asked
		// for its history each time.
		s.hasty++
		s.mode, s.retryAt = modeBuild, now.Add(s.pause(s.hasty))
	}
	if first != nil {
		s.hold(*first)
		s.liveNext = 0 // a number that went down may be a stray: what follows jumps over nothing
	}
}

// pause is the n-th pause before asking again.
func (s *Stream) pause(n int) time.Duration {
	return min(s.o.RetryMin<<min(n, 16), s.o.RetryMax)
}

// forget drops everything known about the publisher's numbers.
func (s *Stream) forget() {
	s.held, s.heldBytes = nil, 0
	s.sums = sums{}
	s.liveNext, s.lostTo = 0, 0
	s.mode, s.started, s.next = modeIdle, false, 0
	s.late, s.lossy, s.holed, s.behind, s.unverified = false, false, false, false, false
	s.run, s.again, s.retryAt, s.rebuildAt = run{}, run{}, time.Time{}, time.Time{}
	s.failures, s.holeTried = 0, false
	s.heard, s.mute, s.untold, s.otherRank = false, false, false, -1
	s.rebuildPause, s.probePause = s.o.RebuildAfter, s.o.ProbeEvery
}

// Gone tells that the engine does not serve any more, though its event sockets
// may still answer: nothing there can be used.
func (s *Stream) Gone(time.Time) {
	if s.gone {
		return
	}
	s.fx.Reset(engine.ResetGone)
	s.forget()
	s.gone = true
	s.tell()
}

// Back tells that the engine serves again.
func (s *Stream) Back(now time.Time) {
	if !s.gone {
		return
	}
	s.gone = false
	if s.o.Replay && !s.disconnected {
		s.build(now)
	}
	s.tell()
}

// Slept tells that the engine gave its cache up to sleep; the event that says
// so comes only with its next step.
func (s *Stream) Slept(time.Time) {
	if !s.gone {
		s.fx.Reset(engine.ResetSleep)
	}
}

// Resync builds the view anew from the beginning: it proved wrong, or, lacking, to
// have too little.
func (s *Stream) Resync(now time.Time, lacking bool) {
	switch {
	case s.gone:
	case !s.o.Replay && lacking:
		// What it lacks is not told again, and what it has must not go with it.
	case !s.o.Replay:
		s.fx.Reset(engine.ResetGap)
		s.late, s.lateBlocks, s.lossy = true, 0, false
	case s.mode == modeLive && !s.run.rebuild:
		s.rebuild(now)
	}
	s.tell()
}

// Tick lets time pass. busy says that the engine runs requests, so that
// batches are to be expected.
func (s *Stream) Tick(now time.Time, busy bool) {
	switch {
	case s.gone || !s.o.Replay:
	case s.run.id != 0:
		if now.Sub(s.run.heard) >= s.o.ReplayTimeout {
			s.ReplayFailed(s.run.id, now)
		}
	case !s.retryAt.IsZero():
		if !now.Before(s.retryAt) {
			s.askAgain(now)
		}
	case s.mode == modeLive && !s.rebuildAt.IsZero() && !now.Before(s.rebuildAt):
		s.rebuild(now)
	case s.mode == modeLive && s.started && s.probeDue(now, busy):
		s.lastProbe = now
		s.goOn(now)
	}
	s.tell()
}

func (s *Stream) probeDue(now time.Time, busy bool) bool {
	since := now.Sub(s.lastProbe)
	return since >= s.probePause ||
		busy && since >= s.o.BusyProbeAfter && now.Sub(s.lastLive) >= s.o.BusyProbeAfter && !s.behind
}
