package nvml

import (
	"strings"
	"testing"
	"time"
)

// A child that has worked for a while is replaced at once when it ends, however
// many had failed before it.
func TestClientBacksOffFromNewFailuresOnly(t *testing.T) {
	run(t, newScript(gpu(0, "GPU-a")), Options{}, func(h *host) {
		crash := func(words string) { h.script.set(func(s *script) { s.crash = words }) }
		crash("exit status 1")
		h.after(10 * time.Minute)
		crash("")
		h.want(h.after(2*maxBackOff+steadyAfter), StateOK, "ok")
		before := h.starts.Load()
		crash("exit status 1")
		for h.after(minBackOff/10).Status.Code != StateCrashed { // at its next poll
		}
		crash("")
		h.want(h.after(minBackOff), StateOK, "ok")
		if n := h.starts.Load() - before; n != 1 {
			t.Errorf("%d children after the end of one that had worked, want 1", n)
		}
	})
}

// A child that the kernel holds inside the driver: the state is told, no more
// than a few such children pile up, and the end of Run does not hang on them.
func TestClientUnkillableChild(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"))
	run(t, s, Options{}, func(h *host) {
		h.after(2 * time.Second)
		h.unkillable.Store(true)
		s.set(func(s *script) { s.crash = "exit status 1" })
		h.after(2 * time.Second)
		s.set(func(s *script) { s.crash, s.hang = "", "nvmlDeviceGetUUID" })
		v := h.after(time.Hour)
		if v.Status.Code != StateBlocked || !strings.HasPrefix(v.Status.Text, "NVML blocked: 2 killed NVML children do not end (") {
			t.Errorf("%+v", v.Status)
		}
		if n := h.starts.Load(); n > 1+1+maxUnkillable {
			t.Errorf("%d children started while none ended", n)
		}
		s.set(func(s *script) { s.hang = "" })
		h.unkillable.Store(false)
		for _, p := range h.children {
			p.end(-1, "signal: killed")
		}
		h.want(h.after(2*maxBackOff), StateOK, "ok")
	})
}

func TestClientUnkillableAtTheEnd(t *testing.T) {
	run(t, newScript(gpu(0, "GPU-a")), Options{}, func(h *host) {
		h.unkillable.Store(true)
		h.script.set(func(s *script) { s.hang = "nvmlDeviceGetUUID" })
		h.after(2 * time.Second)
	}) // run checks that Run ends in time
}
