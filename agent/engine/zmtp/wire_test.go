package zmtp

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

func TestCheckGreeting(t *testing.T) {
	good := string(peerGreeting())
	curve := good[:12] + "CURVE" + good[17:]
	for _, tc := range []struct {
		name, in string
		err      error
		about    string
	}{
		{name: "nothing yet", in: ""},
		{name: "libzmq", in: good},
		{name: "a prefix", in: good[:11]},
		{name: "3.0", in: good[:11] + "\x00" + good[12:]},
		{name: "a later version", in: good[:10] + "\x04" + good[11:]},
		{name: "2.x", in: good[:10] + "\x01", err: ErrVersion, about: "revision 1"},
		{name: "CURVE", in: curve, err: ErrMechanism, about: `"CURVE"`},
		{name: "NULL with a tail", in: good[:16] + "X" + good[17:], err: ErrMechanism},
		{name: "HTTP server", in: "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n", err: ErrNotZMTP, about: `HTTP server: it began with "HTTP/1.1 400`},
		{name: "HTTP client", in: "GET /metrics HTTP/1.1\r\n", err: ErrNotZMTP, about: "HTTP client"},
		{name: "HTTP/2 client", in: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", err: ErrNotZMTP, about: "gRPC client"},
		{name: "HTTP/2 server", in: "\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00", err: ErrNotZMTP, about: "gRPC server"},
		{name: "TLS hello", in: "\x16\x03\x01\x02\x00\x01", err: ErrNotZMTP, about: "TLS"},
		{name: "TLS alert", in: "\x15\x03\x01\x00\x02\x02\x0a", err: ErrNotZMTP, about: "TLS"},
		{name: "SSH", in: "SSH-2.0-OpenSSH_9.6\r\n", err: ErrNotZMTP, about: "SSH"},
		{name: "random", in: "\x9d\x01\xfe", err: ErrNotZMTP, about: `"\x9d\x01\xfe"`},
		{name: "one wrong byte", in: "+", err: ErrNotZMTP},
		{name: "signature without end", in: "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x00", err: ErrNotZMTP},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := checkGreeting([]byte(tc.in))
			if !errors.Is(err, tc.err) || err != nil && !strings.Contains(err.Error(), tc.about) {
				t.Errorf("error %v, want %v about %q", err, tc.err, tc.about)
			}
			if err != nil && len(err.Error()) > 250 {
				t.Errorf("error of %d bytes", len(err.Error()))
			}
		})
	}
}

func TestReadySocketType(t *testing.T) {
	for _, tc := range []struct {
		name, in, want string
		err            error
	}{
		{name: "PUB", in: "\x0bSocket-Type\x00\x00\x00\x03PUB", want: "PUB"},
		{name: "name in other case", in: "\x0bsocket-type\x00\x00\x00\x04XPUB", want: "XPUB"},
		{name: "with others", in: "\x08Identity\x00\x00\x00\x00\x0bSocket-Type\x00\x00\x00\x03PUB\x03X-a\x00\x00\x00\x01b", want: "PUB"},
		{name: "without", in: "\x08Identity\x00\x00\x00\x00", err: ErrProtocol},
		{name: "empty", in: "", err: ErrProtocol},
		{name: "value of 4 GiB", in: "\x0bSocket-Type\xff\xff\xff\xffPUB", err: ErrProtocol},
		{name: "name past the end", in: "\xffSocket-Type", err: ErrProtocol},
		{name: "no name", in: "\x00\x00\x00\x00\x00", err: ErrProtocol},
		{name: "half a length", in: "\x0bSocket-Type\x00\x00", err: ErrProtocol},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := readySocketType([]byte(tc.in))
			if got != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("got %q, %v; want %q, %v", got, err, tc.want, tc.err)
			}
		})
	}
}

func TestCheckPeer(t *testing.T) {
	for _, tc := range []struct {
		role  *role
		peer  string
		about string // empty: fits
	}{
		{subRole, "PUB", ""},
		{subRole, "XPUB", ""},
		{subRole, "ROUTER", `it is "ROUTER", a SUB needs PUB or XPUB; this looks like the replay endpoint`},
		{subRole, "SUB", "both ends subscribe"},
		{subRole, "PUSH", `it is "PUSH"`},
		{subRole, strings.Repeat("x", 8000), "a SUB needs"},
		{dealerRole, "ROUTER", ""},
		{dealerRole, "REP", ""},
		{dealerRole, "DEALER", ""},
		{dealerRole, "PUB", "looks like the endpoint of live events"},
		{dealerRole, "REQ", "a DEALER needs ROUTER or REP or DEALER"},
	} {
		err := tc.role.checkPeer(tc.peer)
		if tc.about == "" {
			if err != nil {
				t.Errorf("%s with %s: %v", tc.role.name, tc.peer, err)
			}
			continue
		}
		if !errors.Is(err, ErrSocketType) || !strings.Contains(err.Error(), tc.about) || len(err.Error()) > 250 {
			t.Errorf("%s with %.20s: error %.300v, want one about %q", tc.role.name, tc.peer, err, tc.about)
		}
	}
}

func TestRefusal(t *testing.T) {
	for in, about := range map[string]string{
		"\x04full": `"full"`,
		"\x00":     `""`,
		"":         "without a reason",
		"\x09full": "without a reason",
	} {
		if err := refusal([]byte(in)); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), about) {
			t.Errorf("%q: error %v, want one about %s", in, err, about)
		}
	}
}

func TestOptions(t *testing.T) {
	type build func(Options) error
	dialSub := func(o Options) error { _, err := DialSub(o); return err }
	dealer := func(o Options) error { _, err := DialDealer(o); return err }
	listen := func(o Options) error {
		s, err := ListenSub(o)
		if err == nil {
			err = s.Close()
		}
		return err
	}
	const at = "tcp://127.0.0.1:5557"
	all := []string{""}
	for _, tc := range []struct {
		name  string
		build build
		o     Options
		about string // empty: good
	}{
		{"sub", dialSub, Options{Endpoint: at, Topics: all}, ""},
		{"sub by name", dialSub, Options{Endpoint: "tcp://gpu-7.example:5557", Topics: all}, ""},
		{"sub on IPv6", dialSub, Options{Endpoint: "tcp://[::1]:5557", Topics: all}, ""},
		{"dealer", dealer, Options{Endpoint: at}, ""},
		{"dealer with identity", dealer, Options{Endpoint: at, Identity: "a"}, ""},
		{"listen", listen, Options{Endpoint: "tcp://127.0.0.1:0", Topics: all}, ""},
		{"listen on any address", listen, Options{Endpoint: "tcp://*:0", Topics: all}, ""},
		{"keep-alive off", dialSub, Options{Endpoint: at, Topics: all, KeepAlive: -1}, ""},
		{"back-off above the default maximum", dialSub, Options{Endpoint: at, Topics: all, BackoffMin: time.Minute}, ""},

		{"no endpoint", dialSub, Options{Topics: all}, "tcp://host:port"},
		{"ipc", dialSub, Options{Endpoint: "ipc:///tmp/x", Topics: all}, "tcp://host:port"},
		{"no port", dialSub, Options{Endpoint: "tcp://127.0.0.1", Topics: all}, "tcp://host:port"},
		{"bad port", dialSub, Options{Endpoint: "tcp://127.0.0.1:65536", Topics: all}, "65535"},
		{"named port", dialSub, Options{Endpoint: "tcp://127.0.0.1:http", Topics: all}, "65535"},
		{"source address", dialSub, Options{Endpoint: "tcp://eth0;127.0.0.1:5557", Topics: all}, "tcp://host:port"},
		{"dialing a bind address", dialSub, Options{Endpoint: "tcp://*:5557", Topics: all}, "tcp://127.0.0.1:5557"},
		{"dialing no host", dealer, Options{Endpoint: "tcp://:5557"}, "tcp://127.0.0.1:5557"},
		{"dialing port 0", dialSub, Options{Endpoint: "tcp://127.0.0.1:0", Topics: all}, "port 0"},
		{"no topics", dialSub, Options{Endpoint: at}, "Topics"},
		{"listen without topics", listen, Options{Endpoint: at}, "Topics"},
		{"sub with identity", dialSub, Options{Endpoint: at, Topics: all, Identity: "a"}, "Identity"},
		{"dealer with topics", dealer, Options{Endpoint: at, Topics: all}, "Topics"},
		{"long identity", dealer, Options{Endpoint: at, Identity: strings.Repeat("x", 256)}, "Identity"},
		{"reserved identity", dealer, Options{Endpoint: at, Identity: "\x00a"}, "Identity"},
		{"negative frame limit", dialSub, Options{Endpoint: at, Topics: all, MaxFrameBytes: -1}, "MaxFrameBytes"},
		{"negative message limit", dialSub, Options{Endpoint: at, Topics: all, MaxMessageBytes: -1}, "MaxMessageBytes"},
		{"negative parts", dialSub, Options{Endpoint: at, Topics: all, MaxParts: -1}, "MaxParts"},
		{"negative publishers", listen, Options{Endpoint: at, Topics: all, MaxPublishers: -1}, "MaxPublishers"},
		{"negative timeout", dialSub, Options{Endpoint: at, Topics: all, HandshakeTimeout: -1}, "HandshakeTimeout"},
		{"negative write timeout", dialSub, Options{Endpoint: at, Topics: all, WriteTimeout: math.MinInt64}, "WriteTimeout"},
		{"back-off upside down", dialSub, Options{Endpoint: at, Topics: all, BackoffMin: 2, BackoffMax: 1}, "BackoffMax"},
		{"heartbeat timeout alone", dialSub, Options{Endpoint: at, Topics: all, HeartbeatTimeout: 1}, "HeartbeatInterval"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.build(tc.o)
			if tc.about == "" {
				if err != nil {
					t.Error(err)
				}
			} else if err == nil || !strings.Contains(err.Error(), tc.about) {
				t.Errorf("error %v, want one about %q", err, tc.about)
			}
		})
	}
}
