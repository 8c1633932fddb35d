package lane

import (
	"net"
	"time"

	waypostv1 "waypost/proto/waypost/v1"
)

// The lane protocol.
const (
	// Protocol is the version spoken, ProtocolMin the oldest one understood.
	Protocol    = 1
	ProtocolMin = 1
	// MaxMessageBytes is the largest frame either side accepts.
	MaxMessageBytes = 8 << 20

	// The receive windows are fixed. gRPC's growing ones would let megabytes of
	// LOADs wait at a receiver that does not read, unseen by the sender; 64 KiB is
	// a few hundred, and still 5 MB/s over a path of 12 ms.
	streamWindow = 64 << 10
	connWindow   = 1 << 20
)

// kindOf names a frame for counters. The set is fixed.
func kindOf(msg any) string {
	switch m := msg.(type) {
	case *waypostv1.ConnectRequest:
		switch m.GetFrame().(type) {
		case *waypostv1.ConnectRequest_Hello:
			return "agent_hello"
		case *waypostv1.ConnectRequest_Load:
			return "load"
		case *waypostv1.ConnectRequest_Prefixes:
			return "prefixes"
		case *waypostv1.ConnectRequest_TokenizeReply:
			return "tokenize_reply"
		case *waypostv1.ConnectRequest_Host:
			return "host"
		case *waypostv1.ConnectRequest_AckGpu:
			return "ack_gpu"
		case *waypostv1.ConnectRequest_LinkProbe:
			return "link_probe"
		}
	case *waypostv1.ConnectResponse:
		switch m.GetFrame().(type) {
		case *waypostv1.ConnectResponse_Hello:
			return "coordinator_hello"
		case *waypostv1.ConnectResponse_Policy:
			return "policy"
		case *waypostv1.ConnectResponse_Pull:
			return "pull"
		case *waypostv1.ConnectResponse_Claims:
			return "claims"
		case *waypostv1.ConnectResponse_Marks:
			return "marks"
		case *waypostv1.ConnectResponse_Outcomes:
			return "outcomes"
		case *waypostv1.ConnectResponse_Transfers:
			return "transfers"
		case *waypostv1.ConnectResponse_AckGpu:
			return "ack_gpu"
		case *waypostv1.ConnectResponse_LinkProbe:
			return "link_probe"
		case *waypostv1.ConnectResponse_Tokenize, *waypostv1.ConnectResponse_Render:
			return "tokenize"
		}
	default:
		return "" // not a frame of a lane
	}
	return "unknown" // a newer peer's
}

// addLateness makes a frame from an agent as old as it is: the time it was late
// is added to every age in it. Ages that are not set stay unknown.
func addLateness(f *waypostv1.ConnectRequest, late time.Duration) {
	ms := float64(late) / float64(time.Millisecond)
	switch x := f.GetFrame().(type) {
	case *waypostv1.ConnectRequest_Load:
		for _, w := range x.Load.GetWorkers() {
			older(w.AgeMs, ms)
			older(w.CountersAgeMs, ms)
		}
	case *waypostv1.ConnectRequest_Host:
		for _, g := range x.Host.GetGpus() {
			for _, xid := range g.GetXids() {
				older(xid.AgeMs, ms)
			}
		}
	}
}

// addLatenessDown does the same for a frame from a coordinator.
func addLatenessDown(f *waypostv1.ConnectResponse, late time.Duration) {
	ms := float64(late) / float64(time.Millisecond)
	switch x := f.GetFrame().(type) {
	case *waypostv1.ConnectResponse_Claims:
		for _, c := range x.Claims.GetClaims() {
			older(c.AgeMs, ms)
		}
	case *waypostv1.ConnectResponse_Marks:
		for _, m := range x.Marks.GetMarks() {
			older(m.AgeMs, ms)
		}
	}
}

func older(ageMs *float64, byMs float64) {
	if ageMs != nil {
		*ageMs += byMs
	}
}

// isLoopback says whether host:port or an address of a socket is on this host.
func isLoopback(hostPort string) bool {
	host, _, err := net.SplitHostPort(hostPort)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
