package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/mesh"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
)

// SocketName is the file of the local socket within the run directory.
const SocketName = "agent.sock"

// localServer answers on the host itself what needs no coordinator.
type localServer struct {
	waypostv1.UnimplementedOperatorServiceServer
	a    *Agent
	grpc *grpc.Server
	done chan error
}

// ListMembers answers from the agent's own view of the mesh.
func (s *localServer) ListMembers(_ context.Context, req *waypostv1.ListMembersRequest) (*waypostv1.ListMembersResponse, error) {
	if from := req.GetFrom(); from != "" && from != s.a.name {
		return nil, status.Errorf(codes.Unavailable, "this is the agent of %s; ask a coordinator for the view of %s", s.a.name, from)
	}
	return &waypostv1.ListMembersResponse{Members: s.a.members(), AnsweredBy: &s.a.name}, nil
}

// elsewhere answers every call but the member list, the doctor and those about
// this host's own drain: where to ask.
func (s *localServer) elsewhere(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	switch r := req.(type) {
	case *waypostv1.ListMembersRequest, *waypostv1.DoctorRequest:
		return next(ctx, req)
	case *waypostv1.CordonTargetRequest:
		if r.GetSelector() == "" {
			return next(ctx, req)
		}
	case *waypostv1.UncordonTargetRequest:
		if r.GetSelector() == "" {
			return next(ctx, req)
		}
	}
	return nil, s.needsCoordinator(info.FullMethod)
}

func (s *localServer) needsCoordinator(method string) error {
	what := method[strings.LastIndexByte(method, '/')+1:]
	for _, l := range s.a.dialer.Status() {
		if l.State == "up" {
			return status.Errorf(codes.Unavailable, "the local agent cannot answer %s; ask coordinator %s (cluster address %s) with --addr", what, l.Coordinator, l.Address)
		}
	}
	return status.Errorf(codes.Unavailable, "the local agent cannot answer %s and reaches no coordinator; see: waypost members", what)
}

// members is the mesh as this agent sees it, with its own lanes.
func (a *Agent) members() []*waypostv1.Member {
	up := map[string]bool{}
	lanes := a.dialer.Status()
	for _, l := range lanes {
		if l.State == "up" {
			up[l.Coordinator] = true
		}
	}
	list := a.mesh.Members()
	coordinators := 0
	for _, m := range list {
		if m.Meta.Role == mesh.RoleCoordinator && m.Status == mesh.StatusAlive {
			coordinators++
		}
	}
	out := make([]*waypostv1.Member, 0, len(list))
	for _, m := range list {
		pb := m.Proto(time.Now())
		switch {
		case m.Name == a.name:
			pb.Lane = proto.String(fmt.Sprintf("direct %d/%d", len(up), max(coordinators, len(up))))
		case m.Meta.Role == mesh.RoleCoordinator && up[m.Name]:
			pb.Lane = proto.String("lane up")
		case m.Meta.Role == mesh.RoleCoordinator:
			pb.Lane = proto.String("no lane")
		}
		out = append(out, pb)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].GetName() < out[j].GetName() })
	return out
}

// metricsServer serves /metrics, /healthz and /readyz.
type metricsServer struct {
	http *http.Server
	done chan error
}

// startLocal opens the local socket and the metrics listener.
func (a *Agent) startLocal() error {
	if a.cfg.RunDir != "" {
		l, err := daemon.ListenSocket(filepath.Join(a.cfg.RunDir, SocketName))
		if err != nil {
			return fmt.Errorf("agent: run_dir: %w", err)
		}
		a.local = &localServer{a: a, done: make(chan error, 1)}
		a.local.grpc = grpc.NewServer(grpc.UnaryInterceptor(a.local.elsewhere), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			method, _ := grpc.MethodFromServerStream(stream)
			return a.local.needsCoordinator(method)
		}))
		waypostv1.RegisterOperatorServiceServer(a.local.grpc, a.local)
		go func() { a.local.done <- a.local.grpc.Serve(l) }()
	}
	if a.cfg.Metrics.Listen == "" {
		return nil
	}
	l, err := net.Listen("tcp", string(a.cfg.Metrics.Listen))
	if err != nil {
		return errors.Join(fmt.Errorf("agent: metrics.listen: %w", err), a.stopLocal(context.Background()))
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.opt.Gatherer, promhttp.HandlerOpts{}))
	ok := func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") }
	mux.HandleFunc("GET /healthz", ok)
	mux.HandleFunc("GET /readyz", ok)
	a.metrics = &metricsServer{http: &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, MaxHeaderBytes: 16 << 10}, done: make(chan error, 1)}
	go func() { a.metrics.done <- a.metrics.http.Serve(l) }()
	return nil
}

func (a *Agent) stopLocal(ctx context.Context) error {
	var err error
	if a.local != nil {
		a.local.grpc.Stop()
		// Serve has nothing more to say than that it was stopped.
		<-a.local.done
	}
	if a.metrics != nil {
		err = a.metrics.http.Shutdown(ctx)
		<-a.metrics.done
	}
	return err
}

// SocketPath is the file of the local socket; empty: there is none.
func (a *Agent) SocketPath() string {
	if a.cfg.RunDir == "" {
		return ""
	}
	return filepath.Join(a.cfg.RunDir, SocketName)
}
