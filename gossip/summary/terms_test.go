package summary

import (
	"errors"
	"strings"
	"testing"
)

// TestTermsNameBothSides: a mismatch of hash domains cannot be missed, and the
// message says who has what and what to do.
func TestTermsNameBothSides(t *testing.T) {
	agent := OwnTerms("host gpu7", "be45cb26")
	for name, c := range map[string]struct {
		agent, coordinator Terms
		is                 error
		says               []string
	}{
		"equal":       {agent, OwnTerms("coordinator c1", "be45cb26"), nil, nil},
		"one of two":  {agent, OwnTerms("coordinator c1", "374708ff", "be45cb26"), nil, nil},
		"two of one":  {OwnTerms("host gpu7", "374708ff", "be45cb26"), OwnTerms("coordinator c1", "be45cb26"), nil, nil},
		"older":       {Terms{"host gpu7", 3, []uint32{2, 3}, agent.KeyIDs}, Terms{"coordinator c1", 4, []uint32{3, 4}, agent.KeyIDs}, nil, nil},
		"keys differ": {agent, OwnTerms("coordinator c1", "374708ff"), ErrKeyID, []string{"host gpu7 has key id be45cb26", "coordinator c1 has key id 374708ff", "same prefix key file"}},
		"no key":      {OwnTerms("host gpu7"), OwnTerms("coordinator c1", "374708ff"), ErrKeyID, []string{"host gpu7 has no key", "374708ff"}},
		"agent new":   {Terms{"host gpu7", 5, nil, agent.KeyIDs}, Terms{"coordinator c1", 3, []uint32{2, 3}, agent.KeyIDs}, ErrVersion, []string{"host gpu7 writes version 5", "coordinator c1 reads version 2 or 3", "upgrade coordinator c1"}},
		"agent old":   {Terms{"host gpu7", 1, nil, agent.KeyIDs}, Terms{"coordinator c1", 3, []uint32{2, 3}, agent.KeyIDs}, ErrVersion, []string{"upgrade host gpu7"}},
		"reads none":  {agent, Terms{"coordinator c1", 3, nil, agent.KeyIDs}, ErrVersion, []string{"coordinator c1 reads no version"}},
	} {
		check(t, name, Agree(c.agent, c.coordinator), c.is, c.says)
	}
}

func check(t *testing.T, name string, err, is error, says []string) {
	t.Helper()
	if is == nil && err != nil || is != nil && !errors.Is(err, is) {
		t.Errorf("%s: error %v, want %v", name, err, is)
		return
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%s: error %q does not say %q", name, err, s)
		}
	}
}

func TestOwnTermsReadWhatTheyWrite(t *testing.T) {
	o := OwnTerms("x", "k")
	if o.Writes != Version || o.Reads[0] != OldestVersion || o.Reads[len(o.Reads)-1] != Version || Version-OldestVersion > 1 {
		t.Errorf("%+v", o)
	}
}
