package ctl

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	waypostv1 "waypost/proto/waypost/v1"
)

// Where a command looks for the fleet when it is not told.
const (
	CoordinatorSocket = "/run/waypost/coordinator.sock"
	AgentSocket       = "/run/waypost/agent.sock"
)

// flags are the flags every asking command has.
type flags struct {
	addr      string
	caFile    string
	certFile  string
	keyFile   string
	json      bool
	output    string
	timeout   time.Duration
	quiet     bool
	clientTLS TLSLoader
	sockets   []string
}

const (
	// answerWithin is how long a command waits for an answer unless it is told.
	answerWithin = 10 * time.Second
	// timeoutUsage is the annotation of a command whose --timeout means something
	// else.
	timeoutUsage = "timeout"
)

// TLSLoader makes the client's TLS configuration from files.
type TLSLoader func(caFile, certFile, keyFile string) (*tls.Config, error)

func (f *flags) register(cmd *cobra.Command) {
	p := cmd.PersistentFlags()
	p.StringVar(&f.addr, "addr", os.Getenv("WAYPOST_ADDR"), "coordinator API as host:port, or unix:PATH (env WAYPOST_ADDR)")
	p.StringVar(&f.caFile, "ca-file", os.Getenv("WAYPOST_CA_FILE"), "CA of the fleet, PEM (env WAYPOST_CA_FILE)")
	p.StringVar(&f.certFile, "cert-file", os.Getenv("WAYPOST_CERT_FILE"), "your certificate, PEM (env WAYPOST_CERT_FILE)")
	p.StringVar(&f.keyFile, "key-file", os.Getenv("WAYPOST_KEY_FILE"), "its key, PEM (env WAYPOST_KEY_FILE)")
	p.BoolVar(&f.json, "json", false, "print the API's JSON")
	p.StringVarP(&f.output, "output", "o", "table", "table, wide, json or jsonl")
	p.DurationVar(&f.timeout, "timeout", answerWithin, "how long to wait for an answer")
	if own := cmd.Annotations[timeoutUsage]; own != "" {
		timeout := p.Lookup("timeout")
		timeout.Usage, timeout.DefValue = own, "0s" // which no help shows
	}
	p.BoolVarP(&f.quiet, "quiet", "q", false, "say nothing on stderr but errors")
}

func (f *flags) check() error {
	switch f.output {
	case "table", "wide", "json", "jsonl":
	default:
		return Usage("--output %q: use table, wide, json or jsonl", f.output)
	}
	if f.timeout <= 0 {
		return Usage("--timeout %s: must be above 0", f.timeout)
	}
	if f.json {
		f.output = "json"
	}
	return nil
}

// asJSON says whether data goes out as JSON.
func (f *flags) asJSON() bool { return f.output == "json" || f.output == "jsonl" }

// target returns where to ask, in the documented order.
func (f *flags) target() (string, error) {
	if f.addr != "" {
		if path, ok := strings.CutPrefix(f.addr, "unix:"); ok {
			return "unix:" + strings.TrimPrefix(path, "//"), nil
		}
		return "passthrough:///" + f.addr, nil
	}
	for _, s := range f.sockets {
		if _, err := os.Stat(s); err == nil {
			return "unix:" + s, nil
		}
	}
	return "", failed(ExitUnreachable, "no fleet given and none on this host: use --addr HOST:7712 or WAYPOST_ADDR (looked for %s)", strings.Join(f.sockets, " and "))
}

// dial connects to the coordinator or agent that a command asks.
func (f *flags) dial() (*grpc.ClientConn, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	target, err := f.target()
	if err != nil {
		return nil, err
	}
	creds := insecure.NewCredentials()
	if f.caFile != "" || f.certFile != "" || f.keyFile != "" {
		cfg, err := f.clientTLS(f.caFile, f.certFile, f.keyFile)
		if err != nil {
			return nil, Usage("%w", err)
		}
		creds = credentials.NewTLS(cfg)
	}
	return grpc.NewClient(target, grpc.WithTransportCredentials(creds), grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
}

// ask runs one call of a command and explains a failure to reach anybody.
func ask[Req, Resp any](cmd *cobra.Command, f *flags, req Req,
	method func(conn *grpc.ClientConn) func(context.Context, Req, ...grpc.CallOption) (Resp, error),
) (Resp, error) {
	var zero Resp
	conn, err := f.dial()
	if err != nil {
		return zero, err
	}
	// The answer is complete by then; a failing close changes nothing.
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
	defer cancel()
	resp, err := method(conn)(ctx, req)
	if err != nil {
		return zero, unreachable(conn, err)
	}
	return resp, nil
}

// unreachable explains an error of a call that never reached anybody.
func unreachable(conn *grpc.ClientConn, err error) error {
	if s, ok := status.FromError(err); ok && s.Code() == codes.Unavailable && strings.Contains(s.Message(), "connection error") {
		return failed(ExitUnreachable, "%s does not answer: %s", strings.TrimPrefix(conn.Target(), "passthrough:///"), shortDialError(s.Message()))
	}
	return err
}

// shortDialError takes the cause out of the library's nested text.
func shortDialError(msg string) string {
	if i := strings.LastIndex(msg, "desc = "); i >= 0 {
		msg = msg[i+len("desc = "):]
	}
	return strings.Trim(strings.TrimPrefix(strings.Trim(msg, `"`), "transport: Error while dialing: "), `"`)
}

func placement(c *grpc.ClientConn) waypostv1.PlacementServiceClient {
	return waypostv1.NewPlacementServiceClient(c)
}

func operator(c *grpc.ClientConn) waypostv1.OperatorServiceClient {
	return waypostv1.NewOperatorServiceClient(c)
}

// printJSON prints a message as the API writes it.
func printJSON(w io.Writer, m proto.Message) error {
	b, err := api.MarshalJSON(m)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, string(b))
	return err
}

// printList prints an answer that is a list as JSON: whole, or an entry a line.
func printList[M proto.Message](w io.Writer, f *flags, whole proto.Message, list []M) error {
	if f.output == "jsonl" {
		return printLines(w, list)
	}
	return printJSON(w, whole)
}

// printLines prints each message on a line of its own.
func printLines[M proto.Message](w io.Writer, list []M) error {
	var errs error
	for _, m := range list {
		errs = errors.Join(errs, printJSON(w, m))
	}
	return errs
}
