package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"waypost/coordinator/api"
	"waypost/systemd/daemon"
)

// Exit codes of every command; scripts rely on them.
const (
	ExitOK          = 0
	ExitFailed      = 1
	ExitUsage       = 2
	ExitUnreachable = 3
	ExitInfeasible  = 4
	ExitDenied      = 5
	ExitConflict    = 6
	ExitTimeout     = 7
)

// ExitError is an error with the exit code it leads to.
type ExitError struct {
	Code int
	Err  error
}

// Error returns the text of the error.
func (e *ExitError) Error() string { return e.Err.Error() }

// Unwrap returns the error within.
func (e *ExitError) Unwrap() error { return e.Err }

// Usage returns an error about how a command was used.
func Usage(format string, args ...any) error {
	return &ExitError{ExitUsage, fmt.Errorf(format, args...)}
}

// failed returns an error that leads to an exit code.
func failed(code int, format string, args ...any) error {
	return &ExitError{code, fmt.Errorf(format, args...)}
}

// ExitCode returns the exit code an error leads to.
func ExitCode(err error) int {
	if err == nil {
		return ExitOK
	}
	var e *ExitError
	if errors.As(err, &e) {
		return e.Code
	}
	var field *daemon.FieldError
	if errors.Is(err, daemon.ErrConfig) || errors.As(err, &field) {
		return ExitUsage
	}
	if s, ok := status.FromError(err); ok {
		switch s.Code() {
		case codes.InvalidArgument, codes.OutOfRange, codes.NotFound:
			return ExitUsage
		case codes.Unavailable:
			return ExitUnreachable
		case codes.PermissionDenied, codes.Unauthenticated:
			return ExitDenied
		case codes.Aborted, codes.AlreadyExists, codes.FailedPrecondition:
			return ExitConflict
		case codes.DeadlineExceeded:
			return ExitTimeout
		case codes.ResourceExhausted:
			return ExitInfeasible
		}
		return ExitFailed
	}
	// Cobra has no typed error for a command that does not exist.
	if strings.HasPrefix(err.Error(), "unknown command") || strings.HasPrefix(err.Error(), "unknown flag") ||
		strings.HasPrefix(err.Error(), "accepts ") || strings.HasPrefix(err.Error(), "requires ") ||
		strings.HasPrefix(err.Error(), "required flag") {
		return ExitUsage
	}
	return ExitFailed
}

// Message returns the error as a person should read it.
func Message(err error) string {
	s, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	if f := api.FieldOf(err); f != "" {
		return f + ": " + s.Message()
	}
	return s.Message()
}

// Execute runs the root command and returns the exit code; what went wrong is
// said on stderr.
func Execute(ctx context.Context, root *cobra.Command, args []string, stderr io.Writer) int {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return Usage("%w; see: %s --help", err, cmd.CommandPath())
	})
	root.SetArgs(args)
	cmd, err := unknownSubcommand(root, args)
	if err == nil {
		cmd, err = root.ExecuteContextC(ctx)
	}
	if err == nil {
		return ExitOK
	}
	msg := Message(err)
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled) {
		msg = context.Cause(ctx).Error()
	}
	if msg != "" {
		fmt.Fprintf(stderr, "%s: %s\n", cmd.CommandPath(), msg)
	}
	return ExitCode(err)
}

// unknownSubcommand refuses a word that is none of the commands below one that
// does nothing by itself; help alone would look like an answer to a script.
func unknownSubcommand(root *cobra.Command, args []string) (*cobra.Command, error) {
	cmd, rest, err := root.Find(args)
	if err != nil || cmd == root || cmd.Runnable() || len(rest) == 0 || strings.HasPrefix(rest[0], "-") {
		return nil, nil // cobra's own checks follow
	}
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return cmd, Usage("unknown command %q; use one of: %s", rest[0], strings.Join(names, ", "))
}
