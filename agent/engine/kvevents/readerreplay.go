package kvevents

import (
	"context"
	"encoding/binary"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/zmtp"
	"waypost/gossip/nonblock"
)

// replays asks for replays, one at a time; a new one abandons the former.
func (r *Reader) replays(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case a := <-r.asked:
			run, cancel := context.WithTimeout(ctx, replayLimit)
			r.mu.Lock()
			if len(r.asked) > 0 { // a newer one came meanwhile
				r.mu.Unlock()
				cancel()
				continue
			}
			r.stop = cancel
			r.mu.Unlock()
			if err := r.replay(run, a); err != nil && ctx.Err() == nil {
				r.log.Debug("replay failed", "endpoint", r.plan.Replay, "from", a.from, "error", err)
				r.onStream(func(s *Stream) { s.ReplayFailed(a.run, time.Now()) })
			}
			cancel()
		}
	}
}

// replay asks once and passes the answers on. Each replay has a connection of
// its own, so that no late answer of another one can come in.
func (r *Reader) replay(ctx context.Context, a ask) error {
	if r.plan.ReplayTold {
		if err := r.elsewhere(r.plan.Replay); err != nil {
			return err
		}
	}
	d, err := zmtp.DialDealer(zmtp.Options{Endpoint: r.plan.Replay, MaxFrameBytes: MaxBatchBytes, MaxMessageBytes: MaxBatchBytes + 64<<10, Wrap: nonblock.Conn})
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Send(ctx, nil, binary.BigEndian.AppendUint64(nil, a.from)); err != nil {
		return err
	}
	for bad := 0; bad < maxBadAnswers; {
		frames, err := d.Recv(ctx)
		if err != nil {
			return err
		}
		now := time.Now()
		more := true
		seq, payload, end, err := ParseFrames(frames)
		r.onStream(func(s *Stream) {
			switch {
			case err != nil:
				bad++
				s.Malformed(now)
			case end:
				r.seen |= engine.ReplaysEvents
				s.ReplayEnded(a.run, now)
			default:
				more = s.Replayed(a.run, Message{Seq: seq, Payload: payload, Received: now})
			}
		})
		if end || !more {
			return nil
		}
	}
	return errBadAnswers
}

// AskReplay hands a request to the goroutine of the replay socket.
func (r *Reader) AskReplay(run, from uint64) {
	r.stop()
	select {
	case <-r.asked:
	default:
	}
	r.asked <- ask{run, from}
}
