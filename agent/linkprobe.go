package agent

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/gossip/lane"
	"waypost/gossip/mesh"
	waypostv1 "waypost/proto/waypost/v1"
)

// takeLinkProbe does this host's part of a link probe. Sending takes its time and
// is a task of its own; the mesh takes part in one probe at a time.
func (a *Agent) takeLinkProbe(l *lane.Lane, ask *waypostv1.LinkProbeAsk) {
	answer := func(reply *waypostv1.LinkProbeReply, err error) {
		if err != nil {
			reply = &waypostv1.LinkProbeReply{Error: proto.String(err.Error())}
		}
		reply.AskId = ask.AskId
		if err := l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_LinkProbe{LinkProbe: reply}}); err != nil {
			a.log.Debug("answer to a link probe not sent", "error", err)
		}
	}
	token, limits, err := linkProbeOf(ask)
	switch {
	case err != nil:
		answer(nil, err)
	case ask.GetTo() == "":
		answer(&waypostv1.LinkProbeReply{}, a.mesh.ExpectProbe(token, limits))
	default:
		a.tasks.Go(func() { answer(a.probeLink(ask.GetTo(), token, limits)) })
	}
}

// linkProbeOf reads an ask.
func linkProbeOf(ask *waypostv1.LinkProbeAsk) (token mesh.ProbeToken, limits mesh.ProbeLimits, err error) {
	if copy(token[:], ask.GetToken()) != len(token) || len(ask.GetToken()) != len(token) {
		return token, limits, fmt.Errorf("token has %d bytes, want %d", len(ask.GetToken()), len(token))
	}
	if !(ask.GetMaxBytes() >= 1 && ask.GetMaxBytes() <= mesh.MaxProbeBytes) {
		return token, limits, fmt.Errorf("max_bytes: %v is not in 1 to %d", ask.GetMaxBytes(), int64(mesh.MaxProbeBytes))
	}
	if most := mesh.MaxProbeTime.Seconds() * 1000; !(ask.GetMaxMs() > 0 && ask.GetMaxMs() <= most) {
		return token, limits, fmt.Errorf("max_ms: %v is not above 0 and up to %v", ask.GetMaxMs(), most)
	}
	return token, mesh.ProbeLimits{Bytes: int64(ask.GetMaxBytes()), Time: time.Duration(ask.GetMaxMs() * float64(time.Millisecond))}, nil
}

func (a *Agent) probeLink(to string, token mesh.ProbeToken, limits mesh.ProbeLimits) (*waypostv1.LinkProbeReply, error) {
	p, err := a.mesh.ProbeTo(a.ctx, to, token, limits)
	if err != nil {
		return nil, err
	}
	inMs := func(d time.Duration) *float64 { return proto.Float64(float64(d) / float64(time.Millisecond)) }
	return &waypostv1.LinkProbeReply{Bytes: proto.Float64(float64(p.Bytes)), TookMs: inMs(p.Took), AnswerMs: inMs(p.Answer)}, nil
}
