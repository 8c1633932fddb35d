package registry

import (
	"errors"
	"fmt"
)

// Code says how a command ended.
type Code string

// The codes of results.
const (
	// CodeOK: the state is now as the command wants it.
	CodeOK Code = "ok"
	// CodeConflict: the state changed since the command was made.
	CodeConflict Code = "conflict"
	// CodeRefused: the state does not allow it.
	CodeRefused Code = "refused"
	// CodeInvalid: a field is out of bounds.
	CodeInvalid Code = "invalid"
	// CodeUnknown: kind or format are not known to this version.
	CodeUnknown Code = "unknown"
	// CodeReused: the request id belongs to another command.
	CodeReused Code = "reused"
)

// Result is what became of one command.
type Result struct {
	// Kind of the command; empty when it could not be read.
	Kind Kind `json:"kind,omitempty"`
	// Code says how it ended.
	Code Code `json:"code"`
	// Message says why it did not end well, for a person.
	Message string `json:"message,omitempty"`
	// Changed says whether the state is another one than before.
	Changed bool `json:"changed,omitempty"`
	// Duplicate says that this is the answer to an earlier command with the
	// same request id.
	Duplicate bool `json:"duplicate,omitempty"`
	// Revision of the state after the command.
	Revision uint64 `json:"revision,omitempty"`
	// FleetVersion is the version of the fleet file in force after put_fleet.
	FleetVersion uint32 `json:"fleet_version,omitempty"`
	// Number is the registered coordinator's.
	Number uint32 `json:"number,omitempty"`
	// Cordon is the one set or removed.
	Cordon *Cordon `json:"cordon,omitempty"`
	// Removed says whether there was such a cordon or coordinator.
	Removed bool `json:"removed,omitempty"`
}

// Err is nil if the command ended well. Otherwise it wraps ErrConflict,
// ErrRefused, ErrInvalid, ErrUnknownCommand or ErrRequestReused and reads as
// Message does.
func (r Result) Err() error {
	var kind error
	switch r.Code {
	case CodeOK:
		return nil
	case CodeConflict:
		kind = ErrConflict
	case CodeInvalid:
		kind = ErrInvalid
	case CodeUnknown:
		kind = ErrUnknownCommand
	case CodeReused:
		kind = ErrRequestReused
	default:
		kind = ErrRefused
	}
	return &resultError{kind, r.Message}
}

// resultError reads as the message alone: it is written for people and names
// the next step already.
type resultError struct {
	kind    error
	message string
}

func (e *resultError) Error() string { return e.message }
func (e *resultError) Unwrap() error { return e.kind }

// Encode writes the result as DecodeResult reads it.
func (r Result) Encode() ([]byte, error) {
	text, err := marshal(r)
	if err != nil {
		return nil, err
	}
	return append([]byte{commandVersion}, text...), nil
}

// DecodeResult reads a result that another coordinator encoded.
func DecodeResult(b []byte) (Result, error) {
	var r Result
	switch {
	case len(b) == 0 || b[0] != commandVersion:
		return Result{}, errors.New("result is of a format this version does not know")
	case len(b) > MaxCommandBytes:
		return Result{}, fmt.Errorf("result has %d bytes, at most %d", len(b), MaxCommandBytes)
	}
	if err := unmarshal(b[1:], &r); err != nil {
		return Result{}, fmt.Errorf("result: %w", err)
	}
	if r.Code == "" {
		return Result{}, errors.New("result: code is missing")
	}
	return r, nil
}

func refusef(code Code, format string, args ...any) Result {
	return Result{Code: code, Message: fmt.Sprintf(format, args...)}
}

// codeOf is the code of an error from decode.
func codeOf(err error) Code {
	if errors.Is(err, ErrUnknownCommand) {
		return CodeUnknown
	}
	return CodeInvalid
}
