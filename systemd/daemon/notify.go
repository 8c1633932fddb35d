package daemon

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
)

// Notifier speaks to the service manager. Without one (no NOTIFY_SOCKET) its
// methods do nothing.
type Notifier struct {
	log *slog.Logger

	mu     sync.Mutex
	status string
	failed bool // said so once
}

// NewNotifier returns a notifier for the service manager that started this process.
func NewNotifier(log *slog.Logger) *Notifier {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Notifier{log: log}
}

func (n *Notifier) send(state string) {
	if _, err := sd.SdNotify(false, state); err != nil {
		n.mu.Lock()
		first := !n.failed
		n.failed = true
		n.mu.Unlock()
		if first {
			n.log.Warn("service manager cannot be told", "error", err)
		}
	}
}

// Ready says that the daemon serves: its listeners are bound and a first local
// snapshot is taken. It does not wait for others, or a cold start of a whole
// cluster could never order itself.
func (n *Notifier) Ready() { n.send(sd.SdNotifyReady) }

// Reloading says that the configuration is being read again; Ready ends it.
func (n *Notifier) Reloading() { n.send(sd.SdNotifyReloading) }

// Stopping says that the daemon is about to end.
func (n *Notifier) Stopping() { n.send(sd.SdNotifyStopping) }

// Status sets the line that `systemctl status` shows. Equal lines are sent once.
func (n *Notifier) Status(line string) {
	line = strings.ReplaceAll(line, "\n", " ") // a newline would begin another assignment
	n.mu.Lock()
	same := line == n.status
	n.status = line
	n.mu.Unlock()
	if !same {
		n.send("STATUS=" + line)
	}
}

// Watchdog tells the service manager at half of its interval that the daemon
// lives, as long as alive says so; it returns when ctx ends, or at once when the
// unit has no watchdog. What alive looks at must be the progress of the loops
// that matter: a ticker alone proves nothing.
func (n *Notifier) Watchdog(ctx context.Context, alive func() bool) {
	interval, err := sd.SdWatchdogEnabled(false)
	if err != nil {
		n.log.Warn("watchdog settings of the unit cannot be read", "error", err)
	}
	if err != nil || interval <= 0 {
		return
	}
	tick := time.NewTicker(interval / 2)
	defer tick.Stop()
	for {
		if alive() {
			n.send(sd.SdNotifyWatchdog)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
