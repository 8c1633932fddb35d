package agent

import (
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/agent/host"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// wireFacts prepares the readers of GPUs and host.
func (a *Agent) wireFacts() error {
	if err := a.gpus.open(a, a.cfg.GPU); err != nil {
		return err
	}
	var err error
	a.host, err = host.New(host.Options{DiskPath: a.cfg.StateDir, Interval: hostEvery})
	return err
}

// startFacts runs the readers and sends what they find.
func (a *Agent) startFacts() {
	a.gpus.run(a)
	a.tasks.Go(func() { a.host.Run(a.ctx) })
	a.tasks.Go(func() {
		t := time.NewTicker(hostEvery)
		defer t.Stop()
		a.reportHost(t.C)
	})
	a.tasks.Go(a.keepChecking)
}

// lookAtGPUs finds out which engine uses which GPU and tells what has changed.
func (a *Agent) lookAtGPUs() {
	reader := a.gpus.client()
	if reader == nil {
		return
	}
	view := reader.View()
	if a.truth.look(&view, a.urls(), a.carried()) {
		a.dialer.HelloChanged()
	}
	a.tellVerdicts(&view)
}

// reportHost sends host and GPU facts on change and whenever they are due, until
// the agent ends: a coordinator forgets facts that are not repeated.
func (a *Agent) reportHost(due <-chan time.Time) {
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-due:
		case <-a.gpus.changed:
			a.dialer.Kick()
		case <-a.truth.judged:
			a.dialer.Kick()
		}
		a.lookAtGPUs()
		a.sendHostReport(a.dialer.Lanes()...)
		// A flood of GPU errors must not keep the agent busy.
		select {
		case <-a.ctx.Done():
		case <-time.After(hostAtMost):
		}
	}
}

// sendHostReport tells the facts of this moment to some coordinators.
func (a *Agent) sendHostReport(lanes ...*lane.Lane) {
	if len(lanes) == 0 {
		return
	}
	r := a.hostReport()
	r.Checks, r.WallUnixMs = a.kept(), proto.Float64(float64(time.Now().UnixMilli()))
	for _, l := range lanes {
		// A full queue means newer facts follow within seconds.
		_ = l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Host{Host: r}})
	}
}

// checkEvery is how often the checks are made.
const checkEvery = 10 * time.Second

// keepChecking makes the checks again and again until the agent ends. It is no
// part of reportHost: one of them waits for the disk.
func (a *Agent) keepChecking() {
	t := time.NewTicker(checkEvery)
	defer t.Stop()
	for {
		a.keepChecks(time.Now())
		select {
		case <-a.ctx.Done():
			return
		case <-t.C:
		}
	}
}

// keepChecks keeps the checks of this moment for reports and metrics.
func (a *Agent) keepChecks(now time.Time) {
	checks := a.checks(now).Bounded()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.checked = checks
}

// kept are the checks that were kept last.
func (a *Agent) kept() []*waypostv1.Check {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.checked
}
