package kvevents

import (
	"time"

	"waypost/agent/engine"
)

// What an engine computes before an event is due: so many blocks in prompts of
// so many blocks on average, for prompts shorter than a block make none, in so
// long a time, for events may wait for some steps.
const (
	dueBlocks       = 64
	duePromptBlocks = 2
	dueAfter        = 10 * time.Second
)

// work watches the counters of an engine for prompts that are computed while no
// event comes.
type work struct {
	blockTokens int

	known              bool
	since              time.Time
	computed, finished float64
	mute               bool
}

// unheard says whether events are overdue. lastLive is when one last came.
func (w *work) unheard(l *engine.Load, lastLive, now time.Time) bool {
	computed := l.ComputedPromptTokens
	if computed == nil || l.Finished == nil || w.blockTokens <= 0 {
		w.known, w.mute = false, false
		return false
	}
	if !w.known || lastLive.After(w.since) || *computed < w.computed || *l.Finished < w.finished {
		*w = work{blockTokens: w.blockTokens, known: true, since: now, computed: *computed, finished: *l.Finished}
		return false
	}
	tokens, prompts := *computed-w.computed, 1+*l.Finished-w.finished
	block := float64(w.blockTokens)
	w.mute = w.mute || now.Sub(w.since) >= dueAfter && tokens >= dueBlocks*block && tokens/prompts >= duePromptBlocks*block
	return w.mute
}
