package zmtp

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"time"
)

// Options configures a socket. The zero value of a field other than Endpoint
// and Topics means its default.
type Options struct {
	// Endpoint is where to connect or listen: "tcp://host:port". A listening
	// socket also takes "tcp://*:port" and port 0.
	Endpoint string
	// Topics are the prefixes of the first frame to subscribe to; "" is
	// everything. A SUB needs at least one, a DEALER has none.
	Topics []string
	// Identity is a DEALER's name for the peer's ROUTER, at most 255 bytes,
	// not starting with a zero byte; empty: the ROUTER invents one.
	Identity string

	// MaxFrameBytes limits one frame's body. Default 32 MiB, several times
	// the events of a prompt of a million tokens.
	MaxFrameBytes int
	// MaxMessageBytes limits the bodies of one message's frames together.
	// Default 32 MiB. Each connection holds at most about two messages.
	MaxMessageBytes int
	// MaxParts limits the frames of one message. Default 64.
	MaxParts int
	// MaxPublishers limits the publishers that may be connected to a
	// listening socket at one time. Default 8.
	MaxPublishers int

	// HandshakeTimeout bounds TCP connect and handshake together. Default 5 s.
	HandshakeTimeout time.Duration
	// WriteTimeout bounds one write to the peer. Default 5 s.
	WriteTimeout time.Duration
	// BackoffMin is the first pause between attempts to connect, BackoffMax
	// the longest; a pause doubles with each failure and is then cut by a
	// random share of at most half. Defaults 100 ms and 5 s.
	BackoffMin, BackoffMax time.Duration
	// Rand is the source of the back-off's jitter; the socket uses it alone.
	// Default: seeded at random.
	Rand *rand.Rand
	// KeepAlive is the idle time after which TCP probes the peer, three times
	// in as long again. Default 15 s; negative: off.
	KeepAlive time.Duration
	// HeartbeatInterval is the silence after which Recv sends a PING. The
	// default 0 is never: TCP keep-alive finds a dead host, a heartbeat also
	// finds a process that hangs.
	HeartbeatInterval time.Duration
	// HeartbeatTimeout is how long after that PING the peer may stay silent
	// before the connection is dropped. Default: HeartbeatInterval.
	HeartbeatTimeout time.Duration
	// Dial opens connections. Default: TCP by net.Dialer with KeepAlive.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Wrap is given every connection, dialled or accepted, before its first
	// byte. Default: connections are used as they are.
	Wrap func(net.Conn) net.Conn
}

const (
	defaultMaxBytes   = 32 << 20
	defaultMaxParts   = 64
	defaultPublishers = 8
	defaultTimeout    = 5 * time.Second
	defaultBackoffMin = 100 * time.Millisecond
	defaultBackoffMax = 5 * time.Second
	defaultKeepAlive  = 15 * time.Second
	maxIdentityBytes  = 255
	keepAliveProbes   = 3
)

// withDefaults checks o for the given socket and fills in defaults.
func (o Options) withDefaults(r *role, listen bool) (*Options, error) {
	for _, f := range []struct {
		name  string
		value *int
		def   int
	}{
		{"MaxFrameBytes", &o.MaxFrameBytes, defaultMaxBytes},
		{"MaxMessageBytes", &o.MaxMessageBytes, defaultMaxBytes},
		{"MaxParts", &o.MaxParts, defaultMaxParts},
		{"MaxPublishers", &o.MaxPublishers, defaultPublishers},
	} {
		if *f.value < 0 {
			return nil, fmt.Errorf("zmtp: %s is %d: must be positive, or 0 for the default %d", f.name, *f.value, f.def)
		}
		if *f.value == 0 {
			*f.value = f.def
		}
	}
	if o.HeartbeatInterval == 0 && o.HeartbeatTimeout != 0 {
		return nil, fmt.Errorf("zmtp: HeartbeatTimeout is %v without HeartbeatInterval: set both or neither", o.HeartbeatTimeout)
	}
	for _, f := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"HandshakeTimeout", &o.HandshakeTimeout, defaultTimeout},
		{"WriteTimeout", &o.WriteTimeout, defaultTimeout},
		{"BackoffMin", &o.BackoffMin, defaultBackoffMin},
		{"BackoffMax", &o.BackoffMax, max(defaultBackoffMax, o.BackoffMin)},
		{"HeartbeatInterval", &o.HeartbeatInterval, 0},
		{"HeartbeatTimeout", &o.HeartbeatTimeout, o.HeartbeatInterval},
	} {
		if *f.value < 0 {
			return nil, fmt.Errorf("zmtp: %s is %v: must be positive, or 0 for the default %v", f.name, *f.value, f.def)
		}
		if *f.value == 0 {
			*f.value = f.def
		}
	}
	if o.BackoffMax < o.BackoffMin {
		return nil, fmt.Errorf("zmtp: BackoffMax %v is below BackoffMin %v", o.BackoffMax, o.BackoffMin)
	}
	if o.KeepAlive == 0 {
		o.KeepAlive = defaultKeepAlive
	}
	if err := o.checkRole(r); err != nil {
		return nil, err
	}
	if _, err := address(o.Endpoint, listen); err != nil {
		return nil, err
	}
	if o.Rand == nil {
		o.Rand = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	}
	if o.Dial == nil {
		d := &net.Dialer{KeepAlive: o.KeepAlive, KeepAliveConfig: o.keepAlive()}
		o.Dial = d.DialContext
	}
	return &o, nil
}

// checkRole checks the fields that depend on the socket type.
func (o *Options) checkRole(r *role) error {
	if r == subRole {
		if len(o.Topics) == 0 {
			return fmt.Errorf(`zmtp: Topics is empty: a SUB without a subscription receives nothing; use "" for everything`)
		}
		if o.Identity != "" {
			return fmt.Errorf("zmtp: Identity is %q: a SUB has none", o.Identity)
		}
		return nil
	}
	if len(o.Topics) > 0 {
		return fmt.Errorf("zmtp: Topics is %q: a DEALER does not subscribe", o.Topics)
	}
	if len(o.Identity) > maxIdentityBytes || strings.HasPrefix(o.Identity, "\x00") {
		return fmt.Errorf("zmtp: Identity is %d bytes, %q...: at most %d bytes, not starting with a zero byte",
			len(o.Identity), o.Identity[:min(8, len(o.Identity))], maxIdentityBytes)
	}
	return nil
}

// keepAlive is the TCP keep-alive that KeepAlive stands for. Where it is off,
// package net also wants a negative KeepAlive.
func (o *Options) keepAlive() net.KeepAliveConfig {
	if o.KeepAlive < 0 {
		return net.KeepAliveConfig{Enable: false}
	}
	return net.KeepAliveConfig{
		Enable:   true,
		Idle:     o.KeepAlive,
		Interval: max(o.KeepAlive/keepAliveProbes, time.Second),
		Count:    keepAliveProbes,
	}
}

// address turns an endpoint into the address net.Dial or net.Listen takes.
func address(endpoint string, listen bool) (string, error) {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", fmt.Errorf("zmtp: Endpoint is %q: must be tcp://host:port", endpoint)
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil || strings.ContainsAny(host, ";/@ ") {
		return "", fmt.Errorf("zmtp: Endpoint is %q: must be tcp://host:port, an IPv6 host in brackets", endpoint)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return "", fmt.Errorf("zmtp: Endpoint is %q: the port must be a number up to 65535", endpoint)
	}
	if host == "*" {
		host = ""
	}
	if listen {
		return net.JoinHostPort(host, port), nil
	}
	if host == "" {
		return "", fmt.Errorf("zmtp: Endpoint is %q: that is where a publisher binds; to connect, name its host, tcp://127.0.0.1:%s on this one", endpoint, port)
	}
	if n == 0 {
		return "", fmt.Errorf("zmtp: Endpoint is %q: port 0 is only for a listening socket", endpoint)
	}
	return net.JoinHostPort(host, port), nil
}
