package coordinator

import (
	"errors"
	"strings"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// A mismatch of hash domains is refused with a message that names both sides.
func TestHelloNamesBothSides(t *testing.T) {
	h := &lanes{c: &Coordinator{name: "c-1", prefixKey: testKey}}
	other := prefix.ClusterKey{9}.ID()
	for name, c := range map[string]struct {
		keys   []string
		format uint32
		is     error
		says   []string
	}{
		"equal":              {[]string{testKey.ID()}, summary.Version, nil, nil},
		"while rotated, old": {[]string{other, testKey.ID()}, summary.Version, nil, nil},
		"while rotated, new": {[]string{testKey.ID(), other}, summary.Version, nil, nil},
		"another key":        {[]string{other}, summary.Version, summary.ErrKeyID, []string{"host gpu-01 has key id " + other, "coordinator c-1 has key id " + testKey.ID(), "same prefix key file"}},
		"no key":             {nil, summary.Version, summary.ErrKeyID, []string{"host gpu-01 has no key", "coordinator c-1"}},
		"newer format":       {[]string{testKey.ID()}, summary.Version + 1, summary.ErrVersion, []string{"host gpu-01 writes version 2", "coordinator c-1 reads version 1", "upgrade coordinator c-1"}},
		"no format":          {[]string{testKey.ID()}, 0, summary.ErrVersion, []string{"host gpu-01 writes version 0", "upgrade host gpu-01"}},
	} {
		host := "gpu-01"
		err := h.agree(&waypostv1.AgentHello{Host: &host, PrefixKeyIds: c.keys, PrefixFormat: &c.format})
		if !errors.Is(err, c.is) || c.is == nil && err != nil {
			t.Errorf("%s: error %v, want %v", name, err, c.is)
			continue
		}
		for _, s := range c.says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%s: %q does not say %q", name, err, s)
			}
		}
	}
}
