package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"

	waypostv1 "waypost/proto/waypost/v1"
)

// Check is one named condition of readiness.
type Check struct {
	// Name names the check.
	Name string
	// Problem says what is missing; empty: nothing.
	Problem string
}

// Options wires a Server.
type Options struct {
	// Placement answers placements. The token ids of a request are its own only
	// until the call has ended.
	Placement waypostv1.PlacementServiceServer
	// Operator answers operators.
	Operator waypostv1.OperatorServiceServer
	// Credentials give gRPC the state of an already secured connection;
	// nil: the connections are in clear.
	Credentials credentials.TransportCredentials
	// CallerOfTLS tells who stands behind a secured connection.
	CallerOfTLS func(tls.ConnectionState) (Caller, error)
	// Clear is the caller of connections in clear; loopback only.
	Clear Caller
	// BodyLimitBytes bounds a request body.
	BodyLimitBytes int64
	// Metrics serves /metrics; nil: it is not served.
	Metrics http.Handler
	// Ready returns the checks of readiness.
	Ready func() []Check
	// Logger receives what goes wrong between the wire and the services.
	Logger *slog.Logger
}

// DefaultOptions returns the limits of the documented configuration.
func DefaultOptions() Options {
	return Options{BodyLimitBytes: 4 << 20, Ready: func() []Check { return nil }, Logger: slog.New(slog.DiscardHandler)}
}

// Validate names what is missing.
func (o *Options) Validate() error {
	switch {
	case o.Placement == nil || o.Operator == nil:
		return errors.New("api: both services must be set")
	case o.BodyLimitBytes < 1024 || o.BodyLimitBytes > 1<<30:
		return fmt.Errorf("api: body limit %d must be between 1 KiB and 1 GiB", o.BodyLimitBytes)
	case o.Credentials != nil && o.CallerOfTLS == nil:
		return errors.New("api: CallerOfTLS must be set with TLS")
	}
	return nil
}

// streamWindow and connWindow are the bytes that a caller may send before the
// server has read them, of one call and of all calls on a connection.
const (
	streamWindow = 1 << 20
	connWindow   = 4 << 20
)

// readBuffer is the bytes that are read from a connection at once, at most: a
// long prompt's.
const readBuffer = 128 << 10

// Server serves the API on listeners that are already sorted by protocol.
type Server struct {
	opt    Options
	grpc   *grpc.Server
	http   *http.Server
	health *health.Server
	ids    idPool
	bodies sync.Pool // of *bytes.Buffer
}

// New wires a server; it serves nothing yet.
func New(opt Options) (*Server, error) {
	if err := opt.Validate(); err != nil {
		return nil, err
	}
	s := &Server{opt: opt, health: health.NewServer()}
	buffers := newBuffers()
	gopts := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newCodec(buffers, &s.ids)),
		experimental.BufferPool(buffers),
		grpc.ReadBufferSize(readBuffer),
		// Goroutines that serve one call after the other keep their stacks.
		grpc.NumStreamWorkers(uint32(runtime.GOMAXPROCS(0))),
		// Long prompts do not wait for each other's window.
		grpc.InitialWindowSize(streamWindow),
		grpc.InitialConnWindowSize(connWindow),
		grpc.ChainUnaryInterceptor(Recovering(opt.Logger), s.unaryAuth),
		grpc.ChainStreamInterceptor(s.streamAuth),
		grpc.MaxRecvMsgSize(int(opt.BodyLimitBytes)),
		grpc.MaxConcurrentStreams(1024),
		grpc.ConnectionTimeout(10 * time.Second),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
	if opt.Credentials != nil {
		gopts = append(gopts, grpc.Creds(opt.Credentials))
	}
	s.grpc = grpc.NewServer(gopts...)
	waypostv1.RegisterPlacementServiceServer(s.grpc, opt.Placement)
	waypostv1.RegisterOperatorServiceServer(s.grpc, opt.Operator)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	s.http = &http.Server{
		Handler:           s.guard(s.routes()),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(opt.Logger.Handler(), slog.LevelWarn),
	}
	return s, nil
}

// UpdateHealth lets the gRPC health service say what the checks of readiness
// say now.
func (s *Server) UpdateHealth() {
	status := healthpb.HealthCheckResponse_SERVING
	for _, c := range s.opt.Ready() {
		if c.Problem != "" {
			status = healthpb.HealthCheckResponse_NOT_SERVING
		}
	}
	s.health.SetServingStatus("", status)
}

// Serve serves until both listeners are closed or Stop is called.
func (s *Server) Serve(grpcListener, httpListener net.Listener) error {
	errs := make(chan error, 2)
	go func() { errs <- s.grpc.Serve(grpcListener) }()
	go func() { errs <- s.http.Serve(httpListener) }()
	var out error
	for range 2 {
		if err := <-errs; err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) && !errors.Is(err, net.ErrClosed) {
			out = errors.Join(out, err)
		}
	}
	return out
}

// Stop ends serving; calls under way get until ctx ends.
func (s *Server) Stop(ctx context.Context) error {
	s.health.Shutdown()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.grpc.GracefulStop()
	}()
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(err, s.http.Close())
	}
	select {
	case <-done:
	case <-ctx.Done():
		s.grpc.Stop()
		<-done
	}
	return err
}

func (s *Server) callerOfRPC(ctx context.Context) (c Caller) {
	p, ok := peer.FromContext(ctx)
	if s.opt.Credentials == nil {
		c = s.opt.Clear
	} else if ok {
		if info, isTLS := p.AuthInfo.(credentials.TLSInfo); isTLS {
			c = s.callerOfState(info.State)
		}
	}
	if ok {
		if a, isTCP := p.Addr.(*net.TCPAddr); isTCP {
			c.Address = a.AddrPort().Addr().Unmap()
		}
	}
	return c
}

func (s *Server) callerOfHTTP(r *http.Request) (c Caller) {
	if s.opt.Credentials == nil {
		c = s.opt.Clear
	} else if r.TLS != nil {
		c = s.callerOfState(*r.TLS)
	}
	if a, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		c.Address = a.Addr().Unmap()
	}
	return c
}

func (s *Server) callerOfState(state tls.ConnectionState) Caller {
	c, err := s.opt.CallerOfTLS(state)
	if err != nil {
		s.opt.Logger.Debug("caller without a usable certificate", "error", err)
		return Caller{}
	}
	return c
}
