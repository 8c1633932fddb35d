package summary

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrVersion reports two sides without a frame format in common.
var ErrVersion = errors.New("prefix frame formats differ")

// Terms is what one side of a lane says in its hello about the prefixes that it
// tells or takes.
type Terms struct {
	// Side names it to people: "host gpu7", "coordinator c1".
	Side string
	// Writes is the frame format it writes; Reads are those it reads.
	Writes uint32
	Reads  []uint32
	// KeyIDs are the ids of its cluster keys, the primary first.
	KeyIDs []string
}

// OwnTerms are the terms of this build with some cluster keys.
func OwnTerms(side string, keyIDs ...string) Terms {
	t := Terms{Side: side, Writes: Version, KeyIDs: keyIDs}
	for v := uint32(OldestVersion); v <= Version; v++ {
		t.Reads = append(t.Reads, v)
	}
	return t
}

// Agree says whether a coordinator can take the prefixes that an agent tells.
// An error wraps [ErrVersion] or [ErrKeyID], names both sides and says what to
// do.
func Agree(agent, coordinator Terms) error {
	if !slices.Contains(coordinator.Reads, agent.Writes) {
		older := agent.Side
		if len(coordinator.Reads) == 0 || agent.Writes > slices.Max(coordinator.Reads) {
			older = coordinator.Side
		}
		return fmt.Errorf("%w: %s writes version %d, %s reads %s; upgrade %s",
			ErrVersion, agent.Side, agent.Writes, coordinator.Side, numberList(coordinator.Reads), older)
	}
	for _, id := range agent.KeyIDs {
		if slices.Contains(coordinator.KeyIDs, id) {
			return nil
		}
	}
	return fmt.Errorf("%w: %s has %s, %s has %s; give both the same prefix key file",
		ErrKeyID, agent.Side, idList(agent.KeyIDs), coordinator.Side, idList(coordinator.KeyIDs))
}

func numberList(versions []uint32) string {
	if len(versions) == 0 {
		return "no version"
	}
	words := make([]string, len(versions))
	for i, v := range versions {
		words[i] = fmt.Sprint(v)
	}
	return "version " + strings.Join(words, " or ")
}

func idList(ids []string) string {
	if len(ids) == 0 {
		return "no key"
	}
	return "key id " + strings.Join(ids, " and ")
}
