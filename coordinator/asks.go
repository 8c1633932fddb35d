package coordinator

import (
	"context"
	"sync"
	"time"

	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// reply is an answer of a host to one ask.
type reply interface{ GetAskId() uint32 }

// asks are questions to hosts that wait for their answers, by id.
type asks[R reply] struct {
	mu      sync.Mutex
	waiting map[uint32]chan R
	asked   uint32
}

func newAsks[R reply]() *asks[R] { return &asks[R]{waiting: map[uint32]chan R{}} }

// ask sends the frame made for an id over a lane and waits for its answer.
func (a *asks[R]) ask(ctx context.Context, s *lane.Session, within time.Duration, frame func(id uint32) *waypostv1.ConnectResponse) (R, error) {
	var none R
	answer := make(chan R, 1)
	a.mu.Lock()
	a.asked++
	id := a.asked
	a.waiting[id] = answer
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		delete(a.waiting, id)
		a.mu.Unlock()
	}()
	if err := s.Send(frame(id)); err != nil {
		return none, err
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	select {
	case r := <-answer:
		return r, nil
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

// answered takes a host's answer; one that nobody waits for is dropped.
func (a *asks[R]) answered(r R) {
	a.mu.Lock()
	answer := a.waiting[r.GetAskId()]
	delete(a.waiting, r.GetAskId())
	a.mu.Unlock()
	if answer != nil {
		answer <- r
	}
}
