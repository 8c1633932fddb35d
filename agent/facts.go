package agent

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/agent/host"
	"waypost/gossip/lane"
	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
)

// wireFacts prepares the readers of GPUs and host.
func (a *Agent) wireFacts() error {
	if a.cfg.GPU.Enabled != "off" {
		client, err := nvml.New(nvml.Options{
			Logger: a.log, Registerer: a.opt.Registerer, Executable: a.cfg.GPU.Helper, Poll: time.Duration(a.cfg.GPU.Poll),
			KernelLog: "/dev/kmsg", StateFile: filepath.Join(a.cfg.StateDir, "gpus.json"),
		})
		if err != nil {
			return err
		}
		a.gpus = client
		if err := a.opt.Registerer.Register(newGPUCollector(a)); err != nil {
			return err
		}
	}
	var err error
	a.host, err = host.New(host.Options{DiskPath: a.cfg.StateDir, Interval: hostEvery})
	return err
}

// startFacts runs the readers and sends what they find.
func (a *Agent) startFacts() {
	if a.gpus != nil {
		a.tasks.Go(func() {
			if err := a.gpus.Run(a.ctx); err != nil && !errors.Is(err, context.Canceled) {
				a.log.Warn("GPU facts ended", "error", err)
			}
		})
	}
	a.tasks.Go(func() { a.host.Run(a.ctx) })
	a.tasks.Go(a.reportHost)
	a.tasks.Go(a.keepChecking)
}

// lookAtGPUs finds out which engine uses which GPU and tells what has changed.
func (a *Agent) lookAtGPUs() {
	if a.gpus == nil {
		return
	}
	view := a.gpus.View()
	if a.truth.look(&view, a.urls(), a.carried()) {
		a.dialer.HelloChanged()
	}
	a.tellVerdicts(&view)
}

// reportHost sends host and GPU facts on change and every ten seconds.
func (a *Agent) reportHost() {
	t := time.NewTicker(hostEvery)
	defer t.Stop()
	var changed <-chan struct{}
	if a.gpus != nil {
		changed = a.gpus.Changed()
	}
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-t.C:
		case <-changed:
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
