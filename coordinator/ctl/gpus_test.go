package ctl

import (
	"testing"

	waypostv1 "waypost/proto/waypost/v1"
)

// What is not known of a GPU is no health.
func TestVerdictText(t *testing.T) {
	for verdict, want := range map[string]string{"": "?", "ok": "ok", "price:power_brake": "priced: power_brake", "exclude:xid_79,nvlink_down": "excluded: xid_79, nvlink_down"} {
		if got := verdictText(&waypostv1.Gpu{Verdict: &verdict}); got != want {
			t.Errorf("%q is shown as %q, want %q", verdict, got, want)
		}
	}
}
