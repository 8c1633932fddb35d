package registry

import "slices"

// Group lists hosts that may carry shares of one engine together: an engine whose
// model is spread over several hosts.
type Group struct {
	Name  string
	Hosts []Pattern
}

// MayShare says which hosts may carry shares of engines that a host serves:
// declared, that a group of the file names the host, so that all shares must be
// told of; may, whether another host can carry one. Without any group every host
// may.
func (f *Fleet) MayShare(host string) (declared bool, may func(other string) bool) {
	if len(f.Groups) == 0 {
		return false, nil
	}
	var with []Group
	for _, g := range f.Groups {
		if matchAny(g.Hosts, host) {
			with = append(with, g)
		}
	}
	return len(with) > 0, func(other string) bool {
		return slices.ContainsFunc(with, func(g Group) bool { return matchAny(g.Hosts, other) })
	}
}

func (r *reader) group(s *section) Group {
	g := Group{Name: readName(s), Hosts: readPatterns(s, "hosts", "gpu-0[1-2]")}
	if texts, _ := s.texts("hosts", "gpu-0[1-2]"); len(texts) == 0 {
		s.problem("hosts", `it names no host; list those that carry one engine together, such as ["gpu-0[1-2]"]`)
	}
	return g
}
