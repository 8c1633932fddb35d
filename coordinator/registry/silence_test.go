package registry

import (
	"strings"
	"testing"
)

// Both sides' timing is in one place: an interval that cannot work is refused,
// and both numbers are named.
func TestDSC08SilenceShorterThanTheRhythm(t *testing.T) {
	file := func(silent string) string {
		return "version = 1\n[policy.unplaceable_after]\nagent_silent = \"" + silent + "\"\n"
	}
	for _, silent := range []string{"100ms", "1999ms"} {
		_, err := ParseFleet("fleet.toml", file(silent))
		if err == nil || !strings.Contains(err.Error(), "agent_silent") || !strings.Contains(err.Error(), silent) || !strings.Contains(err.Error(), "200ms") || !strings.Contains(err.Error(), "at least 2s") {
			t.Errorf("%s: %v", silent, err)
		}
	}
	if _, err := ParseFleet("fleet.toml", file("2s")); err != nil {
		t.Error(err)
	}
}
