package coordinator

import (
	"math/rand/v2"
	"sync"
	"time"

	"waypost/coordinator/pull"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// puller drives the queue of pulls.
type puller struct {
	h    *lanes
	wake chan struct{}

	mu    sync.Mutex
	queue *pull.Queue
}

func newPuller(h *lanes) (*puller, error) {
	q, err := pull.New(pull.Options{Seed: rand.Uint64(), NextID: h.pullID})
	return &puller{h: h, wake: make(chan struct{}, 1), queue: q}, err
}

// pullID numbers a pull.
func (h *lanes) pullID() uint32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pulls = max(1, h.pulls+1)
	return h.pulls
}

func (p *puller) stir() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *puller) want(host string, index uint32, reason string, atOnce bool) {
	p.mu.Lock()
	news := p.queue.Want(pull.Stream{Host: host, Index: index}, reason, atOnce)
	p.mu.Unlock()
	if news {
		p.stir()
	}
}

// progress notes a part of an answer.
func (p *puller) progress(id uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue.Progress(id, time.Now())
}

func (p *puller) answered(id uint32, helped bool) {
	p.mu.Lock()
	p.queue.Answered(id, helped)
	p.mu.Unlock()
	p.stir()
}

// drop forgets what was wanted of a host.
func (p *puller) drop(host string) {
	p.mu.Lock()
	p.queue.Drop(host)
	p.mu.Unlock()
	p.stir()
}

func (p *puller) counts() (inFlight, waiting int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.queue.Counts()
}

// run sends pulls when their turn comes, until the coordinator ends.
func (p *puller) run() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		for {
			p.mu.Lock()
			ask, ok := p.queue.Next(time.Now())
			p.mu.Unlock()
			if !ok {
				break
			}
			p.send(ask)
		}
		p.mu.Lock()
		due, ok := p.queue.Due()
		p.mu.Unlock()
		var timer <-chan time.Time
		if ok {
			t.Reset(max(0, time.Until(due)))
			timer = t.C
		}
		select {
		case <-p.h.c.ctx.Done():
			return
		case <-p.wake:
		case <-timer:
		}
	}
}

// send asks for one stream: the first time the peers, and then the agent, which
// tells what has happened since.
func (p *puller) send(ask pull.Ask) {
	h := p.h
	hl := h.host(ask.Host)
	hl.mu.Lock()
	s := hl.session
	var st *stream
	if s != nil {
		st = h.streamOf(hl, s, ask.Index)
	}
	if st == nil {
		hl.mu.Unlock()
		p.answered(ask.ID, false)
		return
	}
	st.pull, st.short, st.asked = ask.ID, "", time.Now()
	st.resyncs[ask.Reason]++
	st.resyncReason = ask.Reason
	_, _, have := st.decoder.Have()
	askPeers := !have && !st.peerAsked
	st.peerAsked = true
	worker, process := st.worker, st.process
	hl.mu.Unlock()
	if askPeers {
		if peers := h.c.copyPeers(); len(peers) > 0 {
			h.c.tasks.Go(func() {
				h.copyFromPeer(peers, hl, s, ask, worker, process)
				p.askAgent(hl, s, ask)
			})
			return
		}
	}
	p.askAgent(hl, s, ask)
}

// askAgent sends a pull to the agent, from where the stream stands now.
func (p *puller) askAgent(hl *hostLane, s *lane.Session, ask pull.Ask) {
	hl.mu.Lock()
	st := p.h.streamOf(hl, s, ask.Index)
	if hl.session != s || st == nil || st.pull != ask.ID {
		hl.mu.Unlock()
		p.answered(ask.ID, false) // the next lane, or the next turn, asks
		return
	}
	reason := ask.Reason
	if st.distrusted {
		reason, st.distrustPull = pullDistrust, ask.ID
	}
	msg := &waypostv1.PrefixPull{PullId: &ask.ID, Index: &ask.Index, EngineProcess: &st.process, Reason: &reason}
	if epoch, seq, ok := st.decoder.Have(); ok && reason != pullDistrust {
		msg.Epoch, msg.HaveSeq = &epoch, &seq
	}
	hl.mu.Unlock()
	p.h.c.metrics.pulls.WithLabelValues(reason, string(fromAgent)).Inc()
	// A lane that is gone or full leaves the pull unanswered: it is repeated.
	_ = s.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Pull{Pull: msg}})
}
