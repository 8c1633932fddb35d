package coordinator

import (
	"context"
	"sync"
	"time"

	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// agentAsks are questions to agents that wait for their answers, of one kind. An
// answer counts that comes from the host that was asked: the number of a question
// is easily guessed, and a host speaks for itself only.
type agentAsks[R any] struct {
	mu   sync.Mutex
	last uint32
	open map[uint32]agentAsk[R]
}

type agentAsk[R any] struct {
	host   string
	answer chan R
}

// begin numbers a question to a host, from 1. Its answer comes at most once; done
// must be called when nobody waits for it any more.
func (a *agentAsks[R]) begin(host string) (id uint32, answer <-chan R, done func()) {
	ask := agentAsk[R]{host, make(chan R, 1)}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = max(1, a.last+1)
	id = a.last
	if a.open == nil {
		a.open = map[uint32]agentAsk[R]{}
	}
	a.open[id] = ask
	return id, ask.answer, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.open, id)
	}
}

// answered takes what a host answers to a question.
func (a *agentAsks[R]) answered(host string, id uint32, r R) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ask, ok := a.open[id]; ok && ask.host == host {
		delete(a.open, id)
		ask.answer <- r
	}
}

// ask sends the frame made for a question's number over a lane, and waits for its
// answer.
func (a *agentAsks[R]) ask(ctx context.Context, s *lane.Session, within time.Duration, frame func(id uint32) *waypostv1.ConnectResponse) (R, error) {
	var none R
	id, answer, done := a.begin(s.Host())
	defer done()
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

// waiting is the number of questions without an answer.
func (a *agentAsks[R]) waiting() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.open)
}
