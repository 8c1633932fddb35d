package replica

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"

	"waypost/coordinator/registry"
)

// scene writes a situation in short: one letter per coordinator, the first is
// the leader. "V" voter, "n" non-voter that wishes to vote and has the log, "N"
// likewise but behind, "g" non-voter that does not wish to, "+" in the catalogue
// only, "-" a voter that is not in the catalogue, "x" a non-voter that is not.
// A "!" after a letter: it does not answer; a ">": its address changed.
func scene(text string) *situation {
	s := &situation{self: "1", peers: map[string]follower{}, commit: 1000, freshFor: time.Second}
	for i := range text {
		if text[i] == '!' || text[i] == '>' {
			continue
		}
		after := ""
		if i+1 < len(text) {
			after = text[i+1 : i+2]
		}
		number := uint32(len(s.peers) + 1)
		id := fmt.Sprint(number)
		entry := registry.Coordinator{Number: number, ID: id, Name: "c" + id, ClusterAddress: "h" + id + ":1", Voter: text[i] != 'g'}
		server := raft.Server{ID: raft.ServerID(id), Address: raft.ServerAddress(entry.ClusterAddress), Suffrage: raft.Nonvoter}
		if text[i] == 'V' || text[i] == '-' {
			server.Suffrage = raft.Voter
		}
		if after == ">" {
			server.Address = "old:1"
		}
		f := follower{match: 1000, age: 100 * time.Millisecond}
		if text[i] == 'N' {
			f.match = 1000 - caughtUpWithin - 1
		}
		if after == "!" {
			f.age = time.Minute
		}
		s.peers[id] = f
		if text[i] != '+' {
			s.servers = append(s.servers, server)
		}
		if text[i] != '-' && text[i] != 'x' {
			s.catalogue = append(s.catalogue, entry)
		}
	}
	return s
}

func TestPlan(t *testing.T) {
	for _, tt := range []struct{ scene, want string }{
		{"V", ""},
		{"V+", "add as non-voter 2"},
		{"Vn", ""},
		{"Vnn", "promote to voter 2"},
		{"VVn", "promote to voter 3"},
		{"VnN", ""},
		{"Vnn!", ""},
		{"Vng", ""},
		{"VgnNn", "promote to voter 3"},
		{"VVV", ""},
		{"VVVn", ""},
		{"VVVnn", "promote to voter 4"},
		{"VVVVn", "promote to voter 5"},
		{"VVVVVnn", ""},
		{"VVVV", "make a non-voter 4"},
		{"VV!VV", "make a non-voter 2"},
		{"VV", "make a non-voter 2"},
		{"VV!", "make a non-voter 2"},
		{"VVN", "make a non-voter 2"},
		{"VVV-", "remove 4"},
		{"VV-", "remove 3"},
		{"V-V!", ""}, // the majority would be gone with it
		{"V-V!V", "remove 2"},
		{"V-!VV!", "remove 2"},
		{"V-VV!V!", ""},
		{"VVVx!", "remove 4"},
		{"VVV!", ""}, // a dead voter is not for us to remove
		{"V>", "change the address 1"},
		{"VV>V", "change the address 2"},
		{"VV>V!", ""},
		{"Vn>", "change the address 2"},
		{"VVV+", "add as non-voter 4"},
		{"-V", ""}, // the leader is not in the catalogue: it is of no use yet
	} {
		got := ""
		if next, ok := plan(scene(tt.scene)); ok {
			got = string(next.kind) + " " + next.id
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.scene, got, tt.want)
		}
	}
}

// TestPlanEnds: from any situation whose facts stay as they are, the steps come
// to an end; on the way the leader is never removed or demoted, voters change
// one at a time and are never more than five; at the end, if all answer, Raft
// has exactly the catalogue and an odd number of voters.
func TestPlanEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := scene("V" + rapid.StringMatching(`([VnNg+\-x][!>]?){0,9}`).Draw(t, "scene"))
		allAnswer := true
		for _, p := range s.peers {
			allAnswer = allAnswer && p.age <= s.freshFor
		}
		start := len(s.voters())
		steps := 0
		for ; ; steps++ {
			next, ok := plan(s)
			if !ok {
				break
			}
			if steps > 60 {
				t.Fatalf("no end: %+v of %+v", next, s)
			}
			if next.id == s.self && next.kind != stepReaddress {
				t.Fatalf("the leader acts on itself: %+v", next)
			}
			before := len(s.voters())
			perform(s, next)
			if d := len(s.voters()) - before; d > 1 || d < -1 || len(s.voters()) > max(maxVoters, start) {
				t.Fatalf("%d voters after %+v, %d before", len(s.voters()), next, before)
			}
		}
		if !allAnswer {
			return
		}
		if n := len(s.voters()); n%2 == 0 || len(s.servers) != len(s.catalogue) {
			t.Fatalf("it ends with %d voters of %d servers, catalogue has %d", n, len(s.servers), len(s.catalogue))
		}
		for _, c := range s.catalogue {
			if !slices.ContainsFunc(s.servers, func(v raft.Server) bool { return string(v.ID) == c.ID && string(v.Address) == c.ClusterAddress }) {
				t.Fatalf("%+v is not there at its address", c)
			}
		}
	})
}

// perform does to the servers what Raft does.
func perform(s *situation, next step) {
	at := slices.IndexFunc(s.servers, func(v raft.Server) bool { return string(v.ID) == next.id })
	switch next.kind {
	case stepAddNonvoter:
		s.servers = append(s.servers, raft.Server{ID: raft.ServerID(next.id), Address: raft.ServerAddress(next.address), Suffrage: raft.Nonvoter})
	case stepPromote:
		s.servers[at].Suffrage = raft.Voter
	case stepDemote:
		s.servers[at].Suffrage = raft.Nonvoter
	case stepReaddress:
		s.servers[at].Address = raft.ServerAddress(next.address)
	case stepRemove:
		s.servers = slices.Delete(s.servers, at, at+1)
	}
}
