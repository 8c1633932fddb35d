package lane

import (
	"google.golang.org/protobuf/proto"

	"waypost/gossip/boundary"
	waypostv1 "waypost/proto/waypost/v1"
)

// BoundaryOf turns the boundary of an engine into its wire form.
func BoundaryOf(engine string, v *boundary.Vector) *waypostv1.EngineBoundary {
	out := &waypostv1.EngineBoundary{Engine: &engine, KeyId: &v.KeyID}
	if v.Declared != "" {
		out.Declared = &v.Declared
	}
	if v.Rule != "" {
		out.Rule = &v.Rule
	}
	for _, set := range v.Sets {
		out.Sets = append(out.Sets, uint32(set))
	}
	for i := range v.Probes {
		m := &v.Probes[i]
		probe := &waypostv1.MeasuredProbe{Part: proto.String(string(m.Part)), Probe: proto.Uint32(uint32(m.Number)), Run: &m.Run, Tokens: make([]uint32, len(m.Tokens))}
		for j, t := range m.Tokens {
			probe.Tokens[j] = uint32(t)
		}
		out.Probes = append(out.Probes, probe)
	}
	return out
}

// VectorOf turns the wire form of a boundary back. It comes from another
// process: an error names the field that is out of bounds.
func VectorOf(m *waypostv1.EngineBoundary) (*boundary.Vector, error) {
	v := &boundary.Vector{KeyID: m.GetKeyId(), Declared: m.GetDeclared(), Rule: m.GetRule()}
	for _, set := range m.GetSets() {
		v.Sets = append(v.Sets, int(set))
	}
	for _, p := range m.GetProbes() {
		probe := boundary.Measurement{Part: boundary.Part(p.GetPart()), Number: int(p.GetProbe()), Run: p.GetRun(), Tokens: make([]boundary.Token, len(p.GetTokens()))}
		for j, t := range p.GetTokens() {
			probe.Tokens[j] = boundary.Token(t)
		}
		v.Probes = append(v.Probes, probe)
	}
	return v, v.Validate()
}
