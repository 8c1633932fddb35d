package enginefaults

import (
	"testing"

	"waypost/testbed/emulator/faults"
	"waypost/testbed/emulator/profile"
)

// Every release whose events differ gives an exact view, to an agent that was
// late too.
func TestVersions(t *testing.T) {
	for _, kind := range []profile.Kind{faults.VLLM, profile.SGLang, profile.TensorRTLLM} {
		for _, version := range versionsOf(string(kind)) {
			t.Run(string(kind)+" "+version, func(t *testing.T) {
				t.Parallel()
				r := newRigOf(t, faults.Fault{Kind: kind}, version)
				exact(r)
				r.Mu.Lock()
				defer r.Mu.Unlock()
				if r.Known.Version != version {
					t.Errorf("version %q", r.Known.Version)
				}
			})
		}
	}
}
