package daemon

import (
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"
)

// Duration is a time span in a file: "5s", "1h30m", "200ms", or whole days, "30d".
type Duration time.Duration

// D returns the time.Duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(b []byte) error {
	s := string(b)
	var v time.Duration
	var err error
	if days, ok := strings.CutSuffix(s, "d"); ok {
		var n uint64
		n, err = strconv.ParseUint(days, 10, 16)
		v = time.Duration(n) * 24 * time.Hour
	} else {
		v, err = time.ParseDuration(s)
	}
	if err != nil {
		return fmt.Errorf("%.80q is not a duration; write it like \"5s\", \"1h30m\", \"200ms\" or \"30d\"", s)
	}
	if v < 0 {
		return fmt.Errorf("duration %q is negative", s)
	}
	*d = Duration(v)
	return nil
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// String returns the shortest form that UnmarshalText reads.
func (d Duration) String() string {
	v := time.Duration(d)
	if v != 0 && v%(24*time.Hour) == 0 {
		return strconv.FormatInt(int64(v/(24*time.Hour)), 10) + "d"
	}
	s := v.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// Size is a number of bytes in a file: "128MiB", "1.5GiB", "10GB", "4096".
type Size uint64

var sizeUnits = []struct {
	suffix string
	bytes  uint64
}{
	{"TiB", 1 << 40},
	{"GiB", 1 << 30},
	{"MiB", 1 << 20},
	{"KiB", 1 << 10},
	{"TB", 1e12},
	{"GB", 1e9},
	{"MB", 1e6},
	{"kB", 1e3},
	{"B", 1},
	{"", 1},
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (z *Size) UnmarshalText(b []byte) error {
	s := string(b)
	for _, u := range sizeUnits {
		number, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		number = strings.TrimSpace(number)
		if n, err := strconv.ParseUint(number, 10, 64); err == nil {
			if n > math.MaxInt64/u.bytes {
				return fmt.Errorf("size %.80q is too large", s)
			}
			*z = Size(n * u.bytes)
			return nil
		}
		if f, err := strconv.ParseFloat(number, 64); err == nil && f >= 0 && u.bytes > 1 && !strings.ContainsAny(number, "xXpPiInN_") {
			if f*float64(u.bytes) > math.MaxInt64 {
				return fmt.Errorf("size %.80q is too large", s)
			}
			*z = Size(f * float64(u.bytes))
			return nil
		}
		break
	}
	return fmt.Errorf("%.80q is not a size; write it like \"128MiB\", \"2GiB\" or \"4096\"", s)
}

// MarshalText implements encoding.TextMarshaler.
func (z Size) MarshalText() ([]byte, error) { return []byte(z.String()), nil }

// String returns the size in the largest unit that leaves no fraction.
func (z Size) String() string {
	for _, u := range sizeUnits {
		if n := uint64(z); n > 0 && u.bytes > 1 && n%u.bytes == 0 {
			return strconv.FormatUint(n/u.bytes, 10) + u.suffix
		}
	}
	return strconv.FormatUint(uint64(z), 10)
}

// Listen is an address to listen on: ":7710", "127.0.0.1:7713", "[::1]:0"; the
// host is empty for all interfaces, an IP address, or "localhost".
type Listen string

// Split returns host and port.
func (l Listen) Split() (host string, port uint16) {
	host, port, _ = splitHostPort(string(l))
	return host, port
}

// Loopback says whether only this host can reach the address.
func (l Listen) Loopback() bool {
	host, _ := l.Split()
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Listen) UnmarshalText(b []byte) error {
	s := string(b)
	host, _, err := splitHostPort(s)
	if err != nil {
		return fmt.Errorf("%.80q is not an address to listen on (%w); write it like \":7710\" or \"127.0.0.1:7713\"", s, err)
	}
	if host != "" && host != "localhost" && net.ParseIP(host) == nil {
		return fmt.Errorf("%.80q: the host to listen on must be an IP address, \"localhost\" or empty", s)
	}
	*l = Listen(s)
	return nil
}

// OptionalListen is an address to listen on, or empty to listen nowhere.
type OptionalListen string

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *OptionalListen) UnmarshalText(b []byte) error {
	var address Listen
	if len(b) > 0 {
		if err := address.UnmarshalText(b); err != nil {
			return fmt.Errorf("%w, or \"\" for none", err)
		}
	}
	*l = OptionalListen(address)
	return nil
}

// OptionalInt is a whole number that may be left out, where 0 means something.
type OptionalInt struct {
	Value int
	// Set says that there is one.
	Set bool
}

// UnmarshalText implements encoding.TextUnmarshaler. An empty text is no number.
func (o *OptionalInt) UnmarshalText(b []byte) error {
	if len(b) == 0 {
		*o = OptionalInt{}
		return nil
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		return fmt.Errorf("want a whole number, have %.80q", b)
	}
	*o = OptionalInt{Value: int(n), Set: true}
	return nil
}

// MarshalText implements encoding.TextMarshaler.
func (o OptionalInt) MarshalText() ([]byte, error) {
	if !o.Set {
		return nil, nil
	}
	return strconv.AppendInt(nil, int64(o.Value), 10), nil
}

// HostPort is an address to dial: "gpu-01:7711", "10.0.0.11:7710".
type HostPort string

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *HostPort) UnmarshalText(b []byte) error {
	s := string(b)
	host, port, err := splitHostPort(s)
	switch {
	case err != nil:
		return fmt.Errorf("%.80q is not an address (%w); write it like \"gpu-01:7711\"", s, err)
	case host == "" || port == 0:
		return fmt.Errorf("%.80q: an address to dial needs a host and a port from 1 to 65535", s)
	}
	*h = HostPort(s)
	return nil
}

func splitHostPort(s string) (host string, port uint16, err error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil {
		var ae *net.AddrError
		if errors.As(err, &ae) {
			return "", 0, errors.New(ae.Err)
		}
		return "", 0, err
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("port %q is not a number from 0 to 65535", p)
	}
	if strings.ContainsAny(host, " /\\\"'\t\n") {
		return "", 0, errors.New("the host holds a character that no host has")
	}
	return host, uint16(n), nil
}

// LogLevel is the least level of log lines.
type LogLevel string

// Allowed implements [Enum].
func (LogLevel) Allowed() []string { return []string{"debug", "info", "warn", "error"} }

// LogFormat is the form of log lines.
type LogFormat string

// Allowed implements [Enum].
func (LogFormat) Allowed() []string { return []string{"logfmt", "json"} }
