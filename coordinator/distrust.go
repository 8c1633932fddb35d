package coordinator

import (
	"time"

	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// where is the lane and index of a worker.
func (h *lanes) where(worker string) (host string, index uint32, ok bool) {
	w, err := h.c.fleet.Worker(time.Now(), worker)
	if err != nil {
		return "", 0, false
	}
	return w.Host, w.Facts.Index, true
}

// send puts a frame on a host's lane; false: it is down or stuck.
func (h *lanes) send(host string, f *waypostv1.ConnectResponse) bool {
	s := h.session(host)
	return s != nil && s.Send(f) == nil
}

func (h *lanes) session(host string) *lane.Session {
	h.mu.Lock()
	hl := h.hosts[host]
	h.mu.Unlock()
	if hl == nil {
		return nil
	}
	hl.mu.Lock()
	defer hl.mu.Unlock()
	return hl.session
}

// distrust asks for a worker's whole view anew, because predictions about it
// went wrong; its agent reads the engine's events again, at its own rate. The
// caller bounds how often.
func (h *lanes) distrust(worker string) {
	host, index, ok := h.where(worker)
	s := h.session(host)
	if !ok || s == nil {
		return
	}
	hl := h.host(host)
	hl.mu.Lock()
	defer hl.mu.Unlock()
	if st := h.streamOf(hl, s, index); st != nil {
		h.c.log.Warn("predictions about a worker went wrong: its cache view is asked for anew", "event", "view_disagrees", "worker", worker)
		st.distrusted = true
		h.want(host, index, st, pullDistrust, false)
	}
}

// pullDistrust is the reason of a pull that has the agent read the engine's
// events again.
const pullDistrust = "distrust"
