package api

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"runtime/debug"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	waypostv1 "waypost/proto/waypost/v1"
)

// Role says what a caller may do. Each role includes the ones below it.
type Role int

// The roles, least first.
const (
	RoleNone Role = iota
	RoleViewer
	RolePlacer
	RoleOperator
	RoleAdmin
)

var roleNames = map[Role]string{RoleNone: "none", RoleViewer: "viewer", RolePlacer: "placer", RoleOperator: "operator", RoleAdmin: "admin"}

// String returns the role's name as certificates carry it.
func (r Role) String() string { return roleNames[r] }

// ParseRole returns the role of a name.
func ParseRole(name string) (Role, error) {
	for r, n := range roleNames {
		if n == name && r != RoleNone {
			return r, nil
		}
	}
	return RoleNone, fmt.Errorf("unknown role %q: use viewer, placer, operator or admin", name)
}

// Caller is who asks.
type Caller struct {
	// Name is the certificate's name; "local" for a loopback caller of an
	// API without TLS.
	Name string
	// Role is the highest role the certificate gives.
	Role Role
	// Address is where the call comes from; the zero value: not known.
	Address netip.Addr
}

type callerKey struct{}

// CallerOf returns who asks within a service call.
func CallerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}

// WithCaller returns a context that carries the caller.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// needs lists the role each call needs; a call that is not listed needs admin,
// so that a forgotten line fails closed.
var needs = map[string]Role{
	waypostv1.PlacementService_Place_FullMethodName:               RolePlacer,
	waypostv1.PlacementService_PlaceBatch_FullMethodName:          RolePlacer,
	waypostv1.PlacementService_ReportOutcome_FullMethodName:       RolePlacer,
	waypostv1.PlacementService_RenewPlacement_FullMethodName:      RolePlacer,
	waypostv1.PlacementService_ReleasePlacement_FullMethodName:    RolePlacer,
	waypostv1.PlacementService_LearnTokens_FullMethodName:         RolePlacer,
	waypostv1.PlacementService_GetPlacement_FullMethodName:        RoleViewer,
	waypostv1.PlacementService_ListPlacements_FullMethodName:      RoleViewer,
	waypostv1.PlacementService_SummarizePlacements_FullMethodName: RoleViewer,
	waypostv1.PlacementService_WatchPlacements_FullMethodName:     RoleViewer,
	waypostv1.OperatorService_ExplainWorker_FullMethodName:        RoleViewer,
	waypostv1.OperatorService_GetReuse_FullMethodName:             RoleViewer,
	waypostv1.OperatorService_GetStatus_FullMethodName:            RoleViewer,
	waypostv1.OperatorService_ListWorkers_FullMethodName:          RoleViewer,
	waypostv1.OperatorService_ListHosts_FullMethodName:            RoleViewer,
	waypostv1.OperatorService_ListGpus_FullMethodName:             RoleViewer,
	waypostv1.OperatorService_AckGpu_FullMethodName:               RoleOperator,
	waypostv1.OperatorService_Doctor_FullMethodName:               RoleViewer,
	waypostv1.OperatorService_ListMembers_FullMethodName:          RoleViewer,
	waypostv1.OperatorService_ListCoordinators_FullMethodName:     RoleViewer,
	waypostv1.OperatorService_GetFleet_FullMethodName:             RoleViewer,
	waypostv1.OperatorService_GetTopology_FullMethodName:          RoleViewer,
	waypostv1.OperatorService_ProbeLink_FullMethodName:            RoleOperator,
	waypostv1.OperatorService_InspectWorker_FullMethodName:        RoleViewer,
	waypostv1.OperatorService_GetBoundary_FullMethodName:          RoleViewer,
	waypostv1.OperatorService_Watch_FullMethodName:                RoleViewer,
	waypostv1.OperatorService_CordonTarget_FullMethodName:         RoleOperator,
	waypostv1.OperatorService_UncordonTarget_FullMethodName:       RoleOperator,
	waypostv1.OperatorService_PutFleet_FullMethodName:             RoleAdmin,
	"/grpc.health.v1.Health/Check":                                RoleNone,
	"/grpc.health.v1.Health/Watch":                                RoleNone,
}

func authorise(c Caller, method string) error {
	need, ok := needs[method]
	if !ok {
		need = RoleAdmin
	}
	if c.Role >= need {
		return nil
	}
	if c.Role == RoleNone {
		return status.Error(codes.Unauthenticated, "this API needs a client certificate of the fleet with role "+need.String()+" or higher")
	}
	return Denied(fmt.Sprintf("%s has role %s; this needs %s", c.Name, c.Role, need))
}

// Recovering turns a panic of a call into an error of that call: one bad
// request must not end the process for all others.
func Recovering(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
		defer func() {
			if p := recover(); p != nil {
				log.Error("call panicked", "method", info.FullMethod, "panic", p, "stack", string(debug.Stack()))
				err = status.Error(codes.Internal, "internal error; the coordinator's log says more")
			}
		}()
		return handler(ctx, req)
	}
}

func (s *Server) unaryAuth(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	c := s.callerOfRPC(ctx)
	if err := authorise(c, info.FullMethod); err != nil {
		return nil, err
	}
	resp, err := handler(WithCaller(ctx, c), req)
	if place, ok := req.(*waypostv1.PlaceRequest); ok {
		s.ids.reuse(place)
	}
	return resp, err
}

func (s *Server) streamAuth(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := authorise(s.callerOfRPC(ss.Context()), info.FullMethod); err != nil {
		return err
	}
	return handler(srv, ss)
}

// call runs one service call for an HTTP request as the gRPC side would.
func call[Req, Resp any](s *Server, w http.ResponseWriter, r *http.Request, method string, req Req,
	fn func(context.Context, Req) (Resp, error),
) (resp Resp, ok bool) {
	c := s.callerOfHTTP(r)
	if err := authorise(c, method); err != nil {
		writeError(w, err)
		return resp, false
	}
	resp, err := fn(WithCaller(r.Context(), c), req)
	if err != nil {
		writeError(w, err)
		return resp, false
	}
	return resp, true
}

// LocalCaller makes every call of a server one caller's: that of a socket whose
// file permissions say who may connect.
func LocalCaller(name string, role Role) grpc.UnaryServerInterceptor {
	c := Caller{Name: name, Role: role}
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if err := authorise(c, info.FullMethod); err != nil {
			return nil, err
		}
		return handler(WithCaller(ctx, c), req)
	}
}
