package mesh

import (
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// Proto is the member in the API's words; now is the moment ages count from.
func (m *Member) Proto(now time.Time) *waypostv1.Member {
	status := string(m.Status)
	if m.Other != "" {
		status += "(" + m.Other + ")"
	}
	out := &waypostv1.Member{
		Name: &m.Name, Address: &m.Address, Role: proto.String(string(m.Meta.Role)), Status: &status,
		SinceMs: proto.Float64(float64(now.Sub(m.Since)) / float64(time.Millisecond)), Version: &m.Meta.Version,
		Protocol: proto.Uint32(uint32(m.Meta.Protocol)), KeyId: &m.Meta.KeyID, Note: &m.Note,
	}
	if m.RTT > 0 {
		out.RttMs = proto.Float64(float64(m.RTT) / float64(time.Millisecond))
	}
	return out
}
