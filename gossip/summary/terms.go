package summary

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrVersion reports two sides without a frame format in common.
var ErrVersion = errors.New("prefix frame formats differ")

// ErrBoundary reports two sides that do not turn the same text into the same
// blocks.
var ErrBoundary = errors.New("boundary differs")

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

// AgreeBoundary says whether two sides turn the same text into the same blocks,
// so that what one holds is worth anything to requests of the other: a worker
// and a pool, or two workers. An empty id is an unknown boundary, which agrees
// with none. An error wraps [ErrBoundary] and names both sides.
func AgreeBoundary(side, id, otherSide, otherID string) error {
	switch {
	case id != "" && id == otherID:
		return nil
	case id == "" || otherID == "":
		return fmt.Errorf("%w: %s has %s, %s has %s; an unmeasured boundary earns no prefix credit", ErrBoundary, side, orUnknown(id), otherSide, orUnknown(otherID))
	}
	return fmt.Errorf("%w: %s has %s, %s has %s; compare tokenizer, chat template and adapter rule", ErrBoundary, side, id, otherSide, otherID)
}

func orUnknown(id string) string {
	if id == "" {
		return "none known"
	}
	return id
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
