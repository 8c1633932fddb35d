package coordinator

import (
	"context"
	"crypto/rand"
	"fmt"
	"math"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/gossip/lane"
	"waypost/gossip/mesh"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of measuring a link: what is sent unless the request says otherwise, the
// wait for a host's word, and how long a rate is measured at least.
const (
	probeBytes   = 1 << 30
	probeMs      = 2000.
	probeAnswer  = 3 * time.Second
	probeRateMin = 100 * time.Microsecond
)

// ProbeLink implements the operator service. The receiver's agent is told to
// expect the probe, then the sender's agent sends it. It rests on the lanes of both
// alone: no leader is needed.
func (o *operators) ProbeLink(ctx context.Context, req *waypostv1.ProbeLinkRequest) (*waypostv1.ProbeLinkResponse, error) {
	c := o.c
	ask := &waypostv1.LinkProbeAsk{MaxBytes: proto.Float64(probeBytes), MaxMs: proto.Float64(probeMs)}
	if req.MaxBytes != nil {
		ask.MaxBytes = req.MaxBytes
	}
	if req.MaxMs != nil {
		ask.MaxMs = req.MaxMs
	}
	most := ms(mesh.MaxProbeTime)
	switch {
	case !(ask.GetMaxBytes() >= 1 && ask.GetMaxBytes() <= mesh.MaxProbeBytes) || ask.GetMaxBytes() != math.Trunc(ask.GetMaxBytes()):
		return nil, api.BadField("max_bytes", fmt.Sprintf("%v is not a number of bytes in 1 to %d", ask.GetMaxBytes(), int64(mesh.MaxProbeBytes)))
	case !(ask.GetMaxMs() > 0 && ask.GetMaxMs() <= most):
		return nil, api.BadField("max_ms", fmt.Sprintf("%v is not above 0 and up to %v", ask.GetMaxMs(), most))
	}
	from, err := c.probeEnd("from", req.GetFrom())
	if err != nil {
		return nil, err
	}
	to, err := c.probeEnd("to", req.GetTo())
	if err != nil {
		return nil, err
	}
	if from.Host() == to.Host() {
		return nil, api.BadField("to", fmt.Sprintf("%q is the host it would come from: name another one", to.Host()))
	}
	if !c.probing.TryLock() {
		return nil, status.Error(codes.ResourceExhausted, "this coordinator measures another link; ask again in some seconds")
	}
	defer c.probing.Unlock()
	ask.Token = make([]byte, len(mesh.ProbeToken{}))
	if _, err := rand.Read(ask.Token); err != nil {
		return nil, err
	}
	if _, err := c.askProbe(ctx, to, proto.CloneOf(ask), probeAnswer); err != nil {
		return nil, err
	}
	ask.To = proto.String(to.Host())
	measured, err := c.askProbe(ctx, from, ask, time.Duration(ask.GetMaxMs())*time.Millisecond+4*mesh.MaxProbeTime)
	if err != nil {
		return nil, err
	}
	out := &waypostv1.ProbeLinkResponse{
		From: proto.String(from.Host()), To: proto.String(to.Host()), Bytes: measured.Bytes, TookMs: measured.TookMs, AnswerMs: measured.AnswerMs, AnsweredBy: &c.name,
	}
	if took := measured.GetTookMs(); took >= ms(probeRateMin) {
		out.BytesPerSec = proto.Float64(measured.GetBytes() / took * 1000)
	}
	out.Link = c.linkBetween(from.Host(), to.Host(), time.Now())
	c.log.Info("link measured", "from", from.Host(), "to", to.Host(), "bytes", measured.GetBytes(), "ms", measured.GetTookMs(), "by", api.CallerOf(ctx).Name)
	return out, nil
}

// probeEnd is the lane of a host, which may be named by an engine or worker of it.
func (c *Coordinator) probeEnd(field, name string) (*lane.Session, error) {
	host, _, _ := strings.Cut(name, "/")
	for _, h := range c.fleet.Hosts(time.Now()) {
		if h.Name != host {
			continue
		}
		if s := c.lanes.session(host); s != nil {
			return s, nil
		}
		return nil, api.Unavailable(fmt.Sprintf("host %s has no lane to this coordinator, so its agent cannot be asked; see: waypost members %s", host, host))
	}
	return nil, api.NotFound(field, fmt.Sprintf("no host %q; see: waypost hosts", host))
}

// askProbe has one end do its part.
func (c *Coordinator) askProbe(ctx context.Context, s *lane.Session, ask *waypostv1.LinkProbeAsk, within time.Duration) (*waypostv1.LinkProbeReply, error) {
	r, err := c.linkProbes.ask(ctx, s, within, func(id uint32) *waypostv1.ConnectResponse {
		ask.AskId = &id
		return &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_LinkProbe{LinkProbe: ask}}
	})
	switch {
	case err != nil:
		return nil, api.Unavailable(fmt.Sprintf("host %s did not answer: %v; an agent of an older version knows no link probes", s.Host(), err))
	case r.GetError() != "":
		return nil, api.Unavailable(fmt.Sprintf("host %s: %s", s.Host(), r.GetError()))
	}
	return r, nil
}

// linkBetween is the link between two hosts as prices reckon with it.
func (c *Coordinator) linkBetween(from, to string, now time.Time) *waypostv1.TopologyLink {
	file := c.fleetFile.Load()
	c.transfers.use(file)
	t := c.transfers
	t.mu.Lock()
	defer t.mu.Unlock()
	p := file.Link(from, to)
	return t.link(t.ms(now), &p)
}
