package views

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"waypost/coordinator/pull"
	waypostv1 "waypost/proto/waypost/v1"

	"google.golang.org/protobuf/proto"
)

// puller drives the queue of pulls.
type puller struct {
	vs   *Views
	wake chan struct{}
	// copies are the questions to peers under way.
	copies sync.WaitGroup

	mu    sync.Mutex
	queue *pull.Queue
}

func newPuller(vs *Views) (*puller, error) {
	q, err := pull.New(pull.Options{Seed: rand.Uint64(), NextID: vs.pullID})
	return &puller{vs: vs, wake: make(chan struct{}, 1), queue: q}, err
}

// pullID numbers a pull.
func (vs *Views) pullID() uint32 {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.pulls = max(1, vs.pulls+1)
	return vs.pulls
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
func (p *puller) progress(host string, index, id uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue.Progress(pull.Stream{Host: host, Index: index}, id, time.Now())
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

// run sends pulls when their turn comes, until ctx ends.
func (p *puller) run(ctx context.Context) {
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
			p.send(ctx, ask)
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
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-timer:
		}
	}
}

// send asks for one stream: the first time the peers, and then the agent, which
// tells what has happened since.
func (p *puller) send(ctx context.Context, ask pull.Ask) {
	vs := p.vs
	hs := vs.host(ask.Host)
	hs.mu.Lock()
	s := hs.session
	var st *stream
	if s != nil {
		st = vs.streamOf(hs, s, ask.Index)
	}
	if st == nil {
		hs.mu.Unlock()
		p.answered(ask.ID, false)
		return
	}
	st.pull, st.short, st.asked, st.answer = ask.ID, "", time.Now(), answerNothing
	st.resyncs[ask.Reason]++
	st.resyncReason = ask.Reason
	_, _, have := st.decoder.Have()
	askPeers := !have && !st.peerAsked
	st.peerAsked = true
	worker, process := st.worker, st.process
	hs.mu.Unlock()
	if askPeers {
		if peers := vs.opt.Peers.CopyPeers(); len(peers) > 0 {
			p.copies.Go(func() {
				vs.copyFromPeer(ctx, peers, hs, s, ask, worker, process)
				p.askAgent(hs, s, ask)
			})
			return
		}
	}
	p.askAgent(hs, s, ask)
}

// askAgent sends a pull to the agent, from where the stream stands now.
func (p *puller) askAgent(hs *hostStreams, s Session, ask pull.Ask) {
	hs.mu.Lock()
	st := p.vs.streamOf(hs, s, ask.Index)
	if hs.session != s || st == nil || st.pull != ask.ID {
		hs.mu.Unlock()
		p.answered(ask.ID, false) // the next lane, or the next turn, asks
		return
	}
	reason := ask.Reason
	if st.distrusted {
		reason, st.distrustPull = pullDistrust, ask.ID
	}
	msg := &waypostv1.PrefixPull{PullId: &ask.ID, Index: &ask.Index, EngineProcess: &st.process, Reason: &reason}
	if st.distrusted && st.lacking {
		msg.Lacking = proto.Bool(true)
	}
	if epoch, seq, ok := st.decoder.Have(); ok && reason != pullDistrust {
		msg.Epoch, msg.HaveSeq = &epoch, &seq
	}
	hs.mu.Unlock()
	p.vs.metrics.pulls.WithLabelValues(reason, string(fromAgent)).Inc()
	// A lane that is gone or full leaves the pull unanswered: it is repeated.
	_ = s.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Pull{Pull: msg}})
}
