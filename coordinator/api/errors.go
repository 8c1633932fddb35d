package api

import (
	"encoding/json"
	"net/http"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// BadField says that a field of a request cannot be used, and why. The field
// is named as in the proto, "input.token_ids[17]" for example.
func BadField(field, detail string) error {
	return withDetail(codes.InvalidArgument, field, detail)
}

// NotFound says that something named in a request does not exist.
func NotFound(field, detail string) error {
	return withDetail(codes.NotFound, field, detail)
}

// Conflict says that what a request rests on has changed meanwhile.
func Conflict(field, detail string) error {
	return withDetail(codes.Aborted, field, detail)
}

// Unavailable says that nobody can do this now, a write without a leader for
// example.
func Unavailable(detail string) error { return status.Error(codes.Unavailable, detail) }

// Denied says that the caller may not do this.
func Denied(detail string) error { return status.Error(codes.PermissionDenied, detail) }

func withDetail(code codes.Code, field, detail string) error {
	s, err := status.New(code, detail).WithDetails(&errdetails.BadRequest{
		FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: detail}},
	})
	if err != nil {
		return status.Error(code, field+": "+detail)
	}
	return s.Err()
}

// FieldOf returns the field that a service error names; empty: none.
func FieldOf(err error) string {
	for _, d := range status.Convert(err).Details() {
		if br, ok := d.(*errdetails.BadRequest); ok && len(br.GetFieldViolations()) > 0 {
			return br.GetFieldViolations()[0].GetField()
		}
	}
	return ""
}

// Problem is the body of an error over HTTP, as RFC 9457 has it.
type Problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Field  string `json:"field,omitempty"`
	Detail string `json:"detail"`
}

// problemKinds maps gRPC codes to HTTP: the code a caller would expect of a
// plain HTTP service, and a stable last part of the type URI.
var problemKinds = map[codes.Code]struct {
	status int
	kind   string
	title  string
}{
	codes.InvalidArgument:    {http.StatusBadRequest, "field", "bad request"},
	codes.OutOfRange:         {http.StatusBadRequest, "field", "bad request"},
	codes.NotFound:           {http.StatusNotFound, "not-found", "not found"},
	codes.Aborted:            {http.StatusConflict, "conflict", "conflict"},
	codes.AlreadyExists:      {http.StatusConflict, "conflict", "conflict"},
	codes.FailedPrecondition: {http.StatusConflict, "conflict", "conflict"},
	codes.PermissionDenied:   {http.StatusForbidden, "denied", "denied"},
	codes.Unauthenticated:    {http.StatusUnauthorized, "denied", "not authenticated"},
	codes.ResourceExhausted:  {http.StatusTooManyRequests, "busy", "too many requests"},
	codes.Unavailable:        {http.StatusServiceUnavailable, "unavailable", "unavailable"},
	codes.DeadlineExceeded:   {http.StatusGatewayTimeout, "timeout", "timed out"},
	codes.Unimplemented:      {http.StatusNotImplemented, "unsupported", "unsupported"},
}

const problemType = "https://waypost.invalid/problems/"

// problemOf turns a service error into its HTTP form.
func problemOf(err error) Problem {
	s := status.Convert(err)
	k, ok := problemKinds[s.Code()]
	if !ok {
		k.status, k.kind, k.title = http.StatusInternalServerError, "internal", "internal error"
	}
	return Problem{Type: problemType + k.kind, Title: k.title, Status: k.status, Field: FieldOf(err), Detail: s.Message()}
}

func writeProblem(w http.ResponseWriter, p Problem) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	// The connection may be gone; there is nobody left to tell.
	_ = json.NewEncoder(w).Encode(p)
}

func writeError(w http.ResponseWriter, err error) { writeProblem(w, problemOf(err)) }

// badJSON turns a decoder's complaint into a bad request without the prefix
// that only names the library.
func badJSON(err error) error {
	msg := strings.ReplaceAll(err.Error(), "\u00a0", " ")
	msg = strings.TrimPrefix(msg, "proto: ")
	return BadField("body", msg)
}
