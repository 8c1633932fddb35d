package emulator

import (
	"fmt"
	"net/http"
	"time"
)

// faultRequest is the body of POST /emulator/fault.
type faultRequest struct {
	// Fault is restart, kill-api, clear, drop-batches, stall, resume, slow,
	// drop-connections, block-tokens, evict-silently, gauge-lag,
	// skew-template, ignore-salts or hide-salts.
	Fault  string  `json:"fault"`
	Rank   int     `json:"rank"`
	DownMs int     `json:"downMs"` // restart
	Count  int     `json:"count"`  // drop-batches, evict-silently, block-tokens, skew-template; 1: ignore-salts, hide-salts
	Replay bool    `json:"replay"` // drop-batches: replay still has them
	Factor float64 `json:"factor"` // slow
	LagMs  int     `json:"lagMs"`  // gauge-lag
}

func (e *Engine) serveFault(w http.ResponseWriter, r *http.Request) {
	var q faultRequest
	if err := readBody(w, r, &q); err != nil {
		writeError(w, err)
		return
	}
	answer, err := e.fault(q)
	if err != nil {
		writeError(w, badRequest("fault", "%v", err))
		return
	}
	writeJSON(w, answer)
}

// fault does what q asks. What ends this very connection is done a moment
// later, so that the answer gets out.
func (e *Engine) fault(q faultRequest) (map[string]any, error) {
	done := map[string]any{"fault": q.Fault}
	switch q.Fault {
	case "restart":
		down := time.Duration(q.DownMs) * time.Millisecond
		if down < 0 {
			return nil, fmt.Errorf("downMs is %d: want 0 or more", q.DownMs)
		}
		e.afterAnswer(func() {
			if err := e.Restart(down); err != nil {
				e.opts.Logger.Warn("restart asked over HTTP failed", "error", err)
			}
		})
	case "kill-api":
		e.afterAnswer(e.KillAPI)
	case "drop-connections":
		e.afterAnswer(e.DropConnections)
	case "clear":
		done["cleared"] = e.ClearCache()
	case "drop-batches":
		mode := DropForever
		if q.Replay {
			mode = DropLive
		}
		return done, e.DropBatches(q.Rank, q.Count, mode)
	case "stall":
		e.Stall()
	case "resume":
		e.Resume()
	case "slow":
		return done, e.Slow(q.Factor)
	case "block-tokens":
		return done, e.ClaimBlockTokens(q.Count)
	case "evict-silently":
		n, err := e.EvictSilently(q.Rank, q.Count)
		done["evicted"] = n
		return done, err
	case "skew-template":
		if q.Count < 0 || q.Count > 1<<31-1 {
			return nil, fmt.Errorf("count is %d: want a token id, or 0 for prompts as they come", q.Count)
		}
		return done, e.SkewTemplate(uint32(q.Count))
	case "ignore-salts":
		return done, e.IgnoreSalts(q.Count > 0)
	case "hide-salts":
		e.HideSalts(q.Count > 0)
	case "gauge-lag":
		return done, e.SetGaugeLag(time.Duration(q.LagMs) * time.Millisecond)
	default:
		return nil, fmt.Errorf("unknown fault %q: want restart, kill-api, clear, drop-batches, stall, resume, slow, drop-connections, block-tokens, evict-silently, gauge-lag, skew-template, ignore-salts or hide-salts", q.Fault)
	}
	return done, nil
}

// answerGrace is how long an answer has to get out before its connection ends.
const answerGrace = 50 * time.Millisecond

func (e *Engine) afterAnswer(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.isClosed() {
		return
	}
	e.later.Go(func() {
		timer := time.NewTimer(answerGrace)
		defer timer.Stop()
		select {
		case <-e.done:
		case <-timer.C:
			f()
		}
	})
}
