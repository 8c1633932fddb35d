package replica

import (
	"cmp"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"waypost/coordinator/registry"
)

const (
	// maxVoters bounds the voters: more make every change slower and no
	// failure less likely to matter.
	maxVoters = 5
	// caughtUpWithin is how many entries a non-voter may lack to be promoted.
	caughtUpWithin = 64
)

// stepKind is one change of the Raft configuration.
type stepKind string

const (
	stepAddNonvoter stepKind = "add as non-voter"
	stepPromote     stepKind = "promote to voter"
	stepDemote      stepKind = "make a non-voter"
	stepReaddress   stepKind = "change the address"
	stepRemove      stepKind = "remove"
)

type step struct {
	kind    stepKind
	id      string
	address string
	voter   bool // of stepReaddress: what it is
}

// situation is all that plan looks at.
type situation struct {
	self      string
	servers   []raft.Server
	catalogue []registry.Coordinator
	// match is the log index a server is known to have, age how long ago it
	// answered; neither for self.
	peers map[string]follower
	// commit is the log index that is committed.
	commit uint64
	// freshFor is the age up to which a server counts as answering.
	freshFor time.Duration
}

type follower struct {
	match uint64
	age   time.Duration
}

func (s *situation) answers(id string) bool {
	p, ok := s.peers[id]
	return id == s.self || ok && p.age <= s.freshFor
}

func (s *situation) voters() []raft.Server {
	return slices.DeleteFunc(slices.Clone(s.servers), func(v raft.Server) bool { return v.Suffrage != raft.Voter })
}

// majorityWithout says whether a majority of the voters but one answers.
func (s *situation) majorityWithout(id string) bool {
	all, answering := 0, 0
	for _, v := range s.voters() {
		if string(v.ID) == id {
			continue
		}
		all++
		if s.answers(string(v.ID)) {
			answering++
		}
	}
	return answering > all/2
}

// plan returns the next step that brings the Raft configuration nearer to the
// catalogue, if there is one that is safe. See the package comment for the rule.
func plan(s *situation) (step, bool) {
	entries := map[string]registry.Coordinator{}
	for _, c := range s.catalogue {
		entries[c.ID] = c
	}
	if _, ok := entries[s.self]; !ok {
		return step{}, false // the catalogue is not the one of this cluster yet
	}
	servers := map[string]raft.Server{}
	for _, v := range s.servers {
		servers[string(v.ID)] = v
	}
	for _, v := range s.servers {
		id := string(v.ID)
		c, wanted := entries[id]
		voter := v.Suffrage == raft.Voter
		switch {
		case !wanted && (!voter || s.majorityWithout(id)):
			return step{kind: stepRemove, id: id}, true
		case wanted && string(v.Address) != c.ClusterAddress && (!voter || id == s.self || s.majorityWithout(id)):
			return step{kind: stepReaddress, id: id, address: c.ClusterAddress, voter: voter}, true
		}
	}
	for _, c := range s.catalogue {
		if _, ok := servers[c.ID]; !ok {
			return step{kind: stepAddNonvoter, id: c.ID, address: c.ClusterAddress}, true
		}
	}
	return s.planVoters(servers)
}

// planVoters keeps the number of voters odd and up to five.
func (s *situation) planVoters(servers map[string]raft.Server) (step, bool) {
	var ready []registry.Coordinator
	for _, c := range s.catalogue {
		p := s.peers[c.ID]
		if servers[c.ID].Suffrage != raft.Voter && c.Voter && s.answers(c.ID) && p.match+caughtUpWithin >= s.commit && p.match > 0 {
			ready = append(ready, c)
		}
	}
	voters := s.voters()
	even := len(voters)%2 == 0
	switch {
	case even && len(ready) >= 1 && len(voters) < maxVoters, !even && len(ready) >= 2 && len(voters)+2 <= maxVoters:
		return step{kind: stepPromote, id: ready[0].ID, address: ready[0].ClusterAddress}, true
	case even:
		// The one least missed: it does not answer, or came last.
		number := map[string]uint32{}
		for _, c := range s.catalogue {
			number[c.ID] = c.Number
		}
		others := slices.DeleteFunc(voters, func(v raft.Server) bool { return string(v.ID) == s.self })
		if len(others) == 0 {
			return step{}, false
		}
		worst := slices.MaxFunc(others, func(a, b raft.Server) int {
			return cmp.Or(
				cmp.Compare(missing(s, a), missing(s, b)),
				cmp.Compare(number[string(a.ID)], number[string(b.ID)]),
			)
		})
		return step{kind: stepDemote, id: string(worst.ID), address: string(worst.Address)}, true
	}
	return step{}, false
}

func missing(s *situation, v raft.Server) int {
	if s.answers(string(v.ID)) {
		return 0
	}
	return 1
}
