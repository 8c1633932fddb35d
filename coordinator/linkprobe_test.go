package coordinator

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// prober answers link probe asks as a host would.
type prober struct {
	mu    sync.Mutex
	asked []*waypostv1.LinkProbeAsk
	reply *waypostv1.LinkProbeReply
	wait  chan struct{} // nil: it answers at once
}

func (p *prober) answer(l *lane.Lane, f *waypostv1.ConnectResponse) {
	ask := f.GetLinkProbe()
	if ask == nil {
		return
	}
	p.mu.Lock()
	p.asked = append(p.asked, ask)
	r := proto.CloneOf(p.reply)
	p.mu.Unlock()
	if p.wait != nil {
		<-p.wait
	}
	r.AskId = ask.AskId
	// A lane that is down shows as an answer that does not come.
	_ = l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_LinkProbe{LinkProbe: r}})
}

func (p *prober) last() *waypostv1.LinkProbeAsk {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.asked) == 0 {
		return nil
	}
	return p.asked[len(p.asked)-1]
}

// The receiver is told first, then the sender, with one token; what they measured
// is told beside the link that prices rest on. Whatever cannot be is named.
func TestProbeLink(t *testing.T) {
	o := startOne(t)
	sender := &prober{reply: &waypostv1.LinkProbeReply{Bytes: new(5e8), TookMs: new(250.), AnswerMs: new(.2)}, wait: make(chan struct{}, 9)}
	receiver := &prober{reply: &waypostv1.LinkProbeReply{}}
	a, b := &fakeAgent{workers: 1, asks: sender.answer}, &fakeAgent{workers: 1, host: "gpu-02", process: 0xa2, asks: receiver.answer}
	a.start(t, o)
	b.start(t, o)
	eventually(t, "lanes", func() bool { return o.lanes.session("gpu-01") != nil && o.lanes.session("gpu-02") != nil })
	client := waypostv1.NewOperatorServiceClient(o.conn)
	probe := func(from, to string) (*waypostv1.ProbeLinkResponse, error) {
		return client.ProbeLink(t.Context(), &waypostv1.ProbeLinkRequest{From: &from, To: &to})
	}
	type result struct {
		r   *waypostv1.ProbeLinkResponse
		err error
	}
	first := make(chan result, 1)
	go func() {
		r, err := probe("gpu-01/vllm-8000/0", "gpu-02")
		first <- result{r, err}
	}()
	eventually(t, "the sender is asked", func() bool { return sender.last() != nil })
	if got, sent := receiver.last(), sender.last(); got.GetTo() != "" || sent.GetTo() != "gpu-02" || len(sent.GetToken()) != 16 || string(got.GetToken()) != string(sent.GetToken()) ||
		sent.GetMaxBytes() != 1<<30 || sent.GetMaxMs() != 2000 || got.GetMaxBytes() != 1<<30 || got.GetMaxMs() != 2000 {
		t.Errorf("receiver asked %v, sender %v", got, sent)
	}
	// One at a time.
	if _, err := probe("gpu-01", "gpu-02"); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a second one beside it: %v", err)
	}
	sender.wait <- struct{}{}
	got := <-first
	if r := got.r; got.err != nil || r.GetFrom() != "gpu-01" || r.GetTo() != "gpu-02" || r.GetBytesPerSec() != 2e9 || r.GetBytes() != 5e8 || r.GetTookMs() != 250 || r.GetAnswerMs() != .2 ||
		r.GetLink().GetName() != "same zone" || r.GetLink().GetBandwidthSource() != "assumed" || r.GetAnsweredBy() != "c-1" {
		t.Errorf("measured %v, %v", got.r, got.err)
	}
	before := string(sender.last().GetToken())

	// Over HTTP, and too short for a rate.
	sender.mu.Lock()
	sender.reply = &waypostv1.LinkProbeReply{Bytes: new(1.), TookMs: new(0.), AnswerMs: new(.2)}
	sender.mu.Unlock()
	sender.wait <- struct{}{}
	resp, err := http.Post("http://"+o.APIAddress()+"/v1/topology:probe", "application/json", strings.NewReader(`{"from":"gpu-01","to":"gpu-02","maxBytes":1,"maxMs":5.5}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if s := sender.last(); resp.StatusCode != http.StatusOK || s.GetMaxBytes() != 1 || s.GetMaxMs() != 5.5 || string(s.GetToken()) == before {
		t.Errorf("over HTTP: %s, asked %v", resp.Status, s)
	}
	sender.wait <- struct{}{}
	if r, err := probe("gpu-01", "gpu-02"); err != nil || r.BytesPerSec != nil {
		t.Errorf("one byte at once: %v, %v", r, err)
	}

	for _, c := range []struct {
		field string
		req   *waypostv1.ProbeLinkRequest
	}{
		{"from", &waypostv1.ProbeLinkRequest{From: new("gpu-07"), To: new("gpu-02")}},
		{"to", &waypostv1.ProbeLinkRequest{From: new("gpu-01"), To: new("gpu-07")}},
		{"from", &waypostv1.ProbeLinkRequest{To: new("gpu-02")}},
		{"to", &waypostv1.ProbeLinkRequest{From: new("gpu-01"), To: new("gpu-01/vllm-8000/0")}},
		{"max_bytes", &waypostv1.ProbeLinkRequest{From: new("gpu-01"), To: new("gpu-02"), MaxBytes: new(0.)}},
		{"max_bytes", &waypostv1.ProbeLinkRequest{From: new("gpu-01"), To: new("gpu-02"), MaxBytes: new(1e12)}},
		{"max_bytes", &waypostv1.ProbeLinkRequest{From: new("gpu-01"), To: new("gpu-02"), MaxBytes: new(1.5)}},
		{"max_ms", &waypostv1.ProbeLinkRequest{From: new("gpu-01"), To: new("gpu-02"), MaxMs: new(0.)}},
		{"max_ms", &waypostv1.ProbeLinkRequest{From: new("gpu-01"), To: new("gpu-02"), MaxMs: new(10_001.)}},
	} {
		if _, err := client.ProbeLink(t.Context(), c.req); api.FieldOf(err) != c.field {
			t.Errorf("%v: %v, want %s", c.req, err, c.field)
		}
	}
	// A host's own refusal, and a host without a lane.
	receiver.mu.Lock()
	receiver.reply = &waypostv1.LinkProbeReply{Error: new("a link probe is under way here already")}
	receiver.mu.Unlock()
	if _, err := probe("gpu-01", "gpu-02"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "gpu-02: a link probe is under way") {
		t.Errorf("refused: %v", err)
	}
	b.dialer.Close()
	eventually(t, "no lane", func() bool { return o.lanes.session("gpu-02") == nil })
	if _, err := probe("gpu-01", "gpu-02"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "gpu-02 has no lane") {
		t.Errorf("without a lane: %v", err)
	}
	waiting := o.linkProbes.waiting()
	if waiting != 0 {
		t.Errorf("%d asks are left", waiting)
	}
}
