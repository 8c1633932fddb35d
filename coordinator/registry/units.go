package registry

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Bounds of the numbers in a fleet file.
const (
	maxDuration          = 24 * time.Hour
	maxBandwidthBytesSec = 1e14 // 800 Tbit/s
	maxDelayRatio        = 100.0
)

// bandwidthUnits are the units of a bandwidth, in bytes per second.
var bandwidthUnits = []struct {
	name  string
	bytes float64
}{
	{"bit/s", 1.0 / 8},
	{"kbit/s", 1e3 / 8},
	{"Mbit/s", 1e6 / 8},
	{"Gbit/s", 1e9 / 8},
	{"Tbit/s", 1e12 / 8},
	{"B/s", 1},
	{"kB/s", 1e3},
	{"MB/s", 1e6},
	{"GB/s", 1e9},
	{"TB/s", 1e12},
	{"MiB/s", 1 << 20},
	{"GiB/s", 1 << 30},
}

// parseBandwidth reads "100Gbit/s" or "12.5 GB/s" as bytes per second.
func parseBandwidth(s string) (uint64, error) {
	number, unit := splitNumber(s)
	for _, u := range bandwidthUnits {
		if u.name != unit {
			continue
		}
		v, err := strconv.ParseFloat(number, 64)
		bytes := math.Round(v * u.bytes)
		if err != nil || !(bytes >= 1) || bytes > maxBandwidthBytesSec {
			return 0, fmt.Errorf("%q is not a bandwidth from 1 B/s to 800 Tbit/s", clip(s, 40))
		}
		return uint64(bytes), nil
	}
	return 0, fmt.Errorf(`%q is not a bandwidth such as "100Gbit/s" or "12.5GB/s"`, clip(s, 40))
}

func splitNumber(s string) (number, unit string) {
	s = strings.TrimSpace(s)
	i := strings.IndexFunc(s, func(r rune) bool { return !(r >= '0' && r <= '9') && r != '.' })
	if i < 0 {
		i = len(s)
	}
	return s[:i], strings.TrimSpace(s[i:])
}

// formatBandwidth is the short form people read: "12.5 GB/s".
func formatBandwidth(bytesPerSec uint64) string {
	v, unit := float64(bytesPerSec), "B/s"
	switch {
	case v >= 1e9:
		v, unit = v/1e9, "GB/s"
	case v >= 1e6:
		v, unit = v/1e6, "MB/s"
	case v >= 1e3:
		v, unit = v/1e3, "kB/s"
	}
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0") + " " + unit
}

// parseDuration reads "300ms", "20us", "2s", up to a day.
func parseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(strings.TrimSpace(s))
	if err != nil {
		return 0, fmt.Errorf(`%q is not a time such as "300ms", "20us" or "2s"`, clip(s, 40))
	}
	if d < 0 || d > maxDuration {
		return 0, fmt.Errorf("%q is not from 0 to %s", clip(s, 40), formatDuration(maxDuration))
	}
	return d, nil
}

// formatDuration is the form that parseDuration reads, in ASCII.
func formatDuration(d time.Duration) string {
	s := strings.ReplaceAll(d.String(), "µs", "us")
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// DelayLimit is how far above the best own time a candidate may be.
type DelayLimit struct {
	// Ratio of the best own time: 0.5 is 50 %. From 0 to 100.
	Ratio float64
	// Plus is added to it.
	Plus time.Duration
}

// String is the form that parseDelayLimit reads.
func (l DelayLimit) String() string {
	return strconv.FormatFloat(math.Round(l.Ratio*1e4)/100, 'f', -1, 64) + "% + " + formatDuration(l.Plus)
}

// parseDelayLimit reads "50% + 200ms", "50%" or "200ms".
func parseDelayLimit(s string) (DelayLimit, error) {
	var l DelayLimit
	bad := fmt.Errorf(`%q is not a limit such as "50%% + 200ms"`, clip(s, 40))
	seenRatio, seenPlus := false, false
	for term := range strings.SplitSeq(s, "+") {
		term = strings.TrimSpace(term)
		if percent, ok := strings.CutSuffix(term, "%"); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(percent), 64)
			if err != nil || seenRatio || !(v >= 0) || v > 100*maxDelayRatio {
				return DelayLimit{}, bad
			}
			l.Ratio, seenRatio = v/100, true
			continue
		}
		d, err := parseDuration(term)
		if err != nil || seenPlus {
			return DelayLimit{}, bad
		}
		l.Plus, seenPlus = d, true
	}
	return l, nil
}
