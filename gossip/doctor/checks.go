package doctor

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"waypost/gossip/mesh"
)

const (
	// certSoon is how long before its end a certificate is a problem.
	certSoon = 7 * 24 * time.Hour
	// maxSkew is how far clocks may be apart: certificates and tokens are judged by
	// them, nothing else is.
	maxSkew = 10 * time.Second
	// minDiskBytes is the least free space of a state directory.
	minDiskBytes = 256 << 20
	// dialWithin bounds the try of one port, dialAtOnce how many run together,
	// maxTargets how many there may be.
	dialWithin = 2 * time.Second
	dialAtOnce = 16
	maxTargets = 256
)

// Mesh checks what the members of the mesh show: gossip that comes one way only,
// wrong keys, and versions that are not all alike.
func (l *List) Mesh(self, version string, members []mesh.Member) {
	udp, key, alive := true, true, 0
	versions := map[string][]string{version: {self}}
	for _, m := range members {
		switch {
		case m.Status == mesh.StatusRefused:
			key = false
			l.Bad("mesh-key", m.Name, "speaks with another key or to another fleet: its packets are refused", "refused by "+m.Other,
				"waypost keys list, then copy mesh.key_file of a member of the fleet to it")
			continue
		case m.Self:
			continue
		case strings.HasPrefix(m.Note, "UDP lost"):
			udp = false
			l.Bad("mesh-udp", m.Name, "answers by TCP and not by UDP", "a firewall drops UDP one way, or the path has a smaller MTU", "open "+m.Address+" for UDP in both directions")
		case m.Status == mesh.StatusAlive:
			alive++
		}
		if v := m.Meta.Version; m.Status == mesh.StatusAlive && v != "" {
			versions[v] = append(versions[v], m.Name)
		}
	}
	if udp {
		l.Good("mesh-udp", self, fmt.Sprintf("%d members answer", alive))
	}
	if key {
		l.Good("mesh-key", self, "no member speaks with another key")
	}
	if len(versions) == 1 {
		l.Good("version-skew", self, "all members run "+version)
		return
	}
	for v, names := range versions {
		if v != version {
			slices.Sort(names)
			l.Bad("version-skew", strings.Join(names[:min(len(names), 5)], ","), fmt.Sprintf("%d run %s, %s runs %s", len(names), v, self, version), "", "upgrade them, or finish the upgrade: one version apart is served, two are not")
		}
	}
}

// Certificate checks how long a certificate is valid.
func (l *List) Certificate(subject string, notAfter, now time.Time) {
	switch left := notAfter.Sub(now); {
	case left <= 0:
		l.Bad("cert-expiry", subject, "its certificate ended at "+notAfter.UTC().Format(time.RFC3339), "lanes and API calls are refused", "renew it, or set the clock right")
	case left < certSoon:
		l.Bad("cert-expiry", subject, "its certificate ends at "+notAfter.UTC().Format(time.RFC3339), "", "renew it")
	default:
		l.Good("cert-expiry", subject, fmt.Sprintf("its certificate is valid for %d days", int(left.Hours()/24)))
	}
}

// Clock checks how far a process's clock is from another's; above 0: ahead.
func (l *List) Clock(subject, other string, ahead time.Duration) {
	way := "ahead of"
	if ahead < 0 {
		way = "behind"
	}
	if ahead.Abs() > maxSkew {
		l.Bad("clock-skew", subject, fmt.Sprintf("its clock is %s %s %s's", ahead.Abs().Round(time.Second), way, other),
			"certificates and tokens are judged by it; ages and freshness are not", "timedatectl set-ntp true")
		return
	}
	l.Good("clock-skew", subject, fmt.Sprintf("its clock agrees with %s's within %s", other, maxSkew))
}

// Disk checks that a state directory takes files; freeBytes nil: unknown.
func (l *List) Disk(subject, dir string, freeBytes *float64) {
	// CreateTemp makes a file of its own; nothing else is touched.
	f, err := os.CreateTemp(dir, ".doctor-*")
	if err == nil {
		_, err = f.WriteString("x")
		_ = f.Close()
		_ = os.Remove(filepath.Clean(f.Name()))
	}
	switch {
	case err != nil:
		l.Bad("disk", subject, "the state directory cannot be written", err.Error(), fmt.Sprintf("chown waypost: %s && chmod 0700 %s", dir, dir))
	case freeBytes != nil && *freeBytes < minDiskBytes:
		l.Bad("disk", subject, fmt.Sprintf("%.0f MB free in %s", *freeBytes/1e6, dir), "", "free some space: du -xh --max-depth=2 "+dir)
	default:
		l.Good("disk", subject, "the state directory can be written")
	}
}

// Target is a port to try.
type Target struct {
	// Name is whose it is, Use what it is for, Address where.
	Name, Use, Address string
}

// Targets are the mesh ports of members, and the addresses of coordinators that
// lanes are dialled at.
func Targets(members []mesh.Member) (out []Target) {
	for _, m := range members {
		if m.Self || m.Status != mesh.StatusAlive && m.Status != mesh.StatusSuspect && m.Status != mesh.StatusLost {
			continue
		}
		out = append(out, Target{m.Name, "mesh", m.Address})
		if m.Meta.ClusterAddress != "" {
			out = append(out, Target{m.Name, "lanes", m.Meta.ClusterAddress})
		}
	}
	return out
}

// Ports tries ports from here.
func (l *List) Ports(ctx context.Context, self string, targets []Target) {
	targets = targets[:min(len(targets), maxTargets)]
	errs := make([]error, len(targets))
	slots := make(chan struct{}, dialAtOnce)
	var tries sync.WaitGroup
	for i, t := range targets {
		tries.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(ctx, dialWithin)
			defer cancel()
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", t.Address)
			if err == nil {
				_ = conn.Close()
			}
			errs[i] = err
		})
	}
	tries.Wait()
	good := 0
	for i, t := range targets {
		if errs[i] == nil {
			good++
			continue
		}
		l.Bad("ports", t.Name, fmt.Sprintf("%s/tcp (%s) does not answer %s", t.Address, t.Use, self), errs[i].Error(), "open it from "+self+", or start the daemon there")
	}
	if good == len(targets) {
		l.Good("ports", self, fmt.Sprintf("%d ports of members answer", good))
	}
}
