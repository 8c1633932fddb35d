// Package faults is the library of engine faults: each misbehaviour that an
// agent has met or will meet, by name, ready to be switched on in an emulated
// engine. Most change event batches or HTTP answers on their way out, so they
// work on every engine of their kind; some are how an old version is.
package faults

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"

	"waypost/testbed/emulator"
	"waypost/testbed/emulator/profile"
	"waypost/testbed/emulator/wire"
)

// VLLM is the kind of the engines that package emulator emulates; the others
// are package profile's.
const VLLM profile.Kind = "vllm"

// Fault is one misbehaviour.
type Fault struct {
	// Name is its name, Kind the engine kind it belongs to.
	Name string
	Kind profile.Kind
	// What happens, and Want: what an agent must do about it.
	What, Want string

	vllm  func(*emulator.Options)
	other func(*profile.Options)
	// events changes the events of a batch, batch the batch itself.
	events func(s *state, events []any) []any
	batch  func(s *state, b *wire.Batch)
	// answer changes what a route answers; serve takes its place.
	answer map[string]func(s *state, status int, body []byte) (int, []byte)
	serve  map[string]func(s *state, w http.ResponseWriter, r *http.Request, next http.Handler)
}

// state is that of one engine's fault. Its counters are of the publisher's
// goroutine.
type state struct {
	on      atomic.Bool
	batches int
	seen    []any // stores passed so far
	calls   atomic.Int64
	first   atomic.Pointer[[]byte] // answer
}

// ErrUnknown is a name that no fault has.
var ErrUnknown = errors.New("no such fault")

// List is all faults in the order of the kinds.
func List() []Fault { return slices.Clone(library) }

// Named finds a fault.
func Named(name string) (Fault, error) {
	for _, f := range library {
		if f.Name == name {
			return f, nil
		}
	}
	return Fault{}, fmt.Errorf("%w: %q; all are listed by \"waypost testbed faults\"", ErrUnknown, name)
}

// Switch turns a fault of a running engine on and off. What is decided when an
// engine starts, its version for example, stays.
type Switch struct{ s *state }

// Set turns the fault on or off.
func (s *Switch) Set(on bool) { s.s.on.Store(on) }

// ToVLLM puts the fault into the options of an engine of package emulator. It
// is on.
func (f Fault) ToVLLM(o *emulator.Options) *Switch {
	s := &state{}
	s.on.Store(true)
	if f.vllm != nil {
		f.vllm(o)
	}
	o.Tap, o.Wrap = f.tap(s, o.Tap), f.wrap(s, o.Wrap)
	return &Switch{s}
}

// ToProfile puts the fault into the options of an engine of package profile. It
// is on.
func (f Fault) ToProfile(o *profile.Options) *Switch {
	s := &state{}
	s.on.Store(true)
	if f.other != nil {
		f.other(o)
	}
	o.Tap, o.Wrap = f.tap(s, o.Tap), f.wrap(s, o.Wrap)
	return &Switch{s}
}

func (f *Fault) tap(s *state, next wire.Tap) wire.Tap {
	if f.events == nil && f.batch == nil {
		return next
	}
	return func(b *wire.Batch) {
		if next != nil {
			next(b)
		}
		if !s.on.Load() {
			return
		}
		s.batches++
		if f.events != nil {
			// Batches are ours and decode.
			_ = b.Events(func(events []any) []any { return f.events(s, events) })
		}
		if f.batch != nil {
			f.batch(s, b)
		}
	}
}

// ControlPath is where a fault is looked at (GET) and switched (POST with
// {"on": false}).
const ControlPath = "/emulator/fault"

func (f *Fault) wrap(s *state, outer func(http.Handler) http.Handler) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		if outer != nil {
			next = outer(next)
		}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == ControlPath {
				f.control(s, w, r)
				return
			}
			serve, answer := f.serve[r.URL.Path], f.answer[r.URL.Path]
			switch {
			case !s.on.Load() || serve == nil && answer == nil:
				next.ServeHTTP(w, r)
			case serve != nil:
				serve(s, w, r, next)
			default:
				rec := httptest.NewRecorder()
				next.ServeHTTP(rec, r)
				status, body := answer(s, rec.Code, rec.Body.Bytes())
				for k, v := range rec.Header() {
					w.Header()[k] = v
				}
				w.Header().Del("Content-Length")
				w.WriteHeader(status)
				_, _ = w.Write(body)
			}
		})
	}
}

func (f *Fault) control(s *state, w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost {
		var q struct{ On *bool }
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4096)).Decode(&q); err != nil || q.On == nil {
			http.Error(w, `on: want {"on": true} or {"on": false}`, http.StatusBadRequest)
			return
		}
		s.on.Store(*q.On)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"fault": f.Name, "on": s.on.Load(), "what": f.What})
}

// The events that faults change are maps of the newest layout.

func mapOf(e any) map[string]any {
	m, _ := e.(map[string]any)
	return m
}

func isA(e any, kind string) bool { return mapOf(e)["type"] == kind }

func list(v any) []any {
	l, _ := v.([]any)
	return l
}

func number(v any) int {
	switch n := v.(type) {
	case int64:
		return int(n)
	case uint64:
		return int(n)
	}
	return 0
}

// with is a copy of an event with some fields changed; gone takes one away.
func with(e any, fields map[string]any) map[string]any {
	out := map[string]any{}
	for k, v := range mapOf(e) {
		out[k] = v
	}
	for k, v := range fields {
		if v == gone {
			delete(out, k)
		} else {
			out[k] = v
		}
	}
	return out
}

type absent struct{}

var gone = absent{}

// each changes events one by one: what f returns takes the event's place.
func each(kind string, f func(s *state, e any) []any) func(*state, []any) []any {
	return func(s *state, events []any) (out []any) {
		for _, e := range events {
			if isA(e, kind) {
				out = append(out, f(s, e)...)
			} else {
				out = append(out, e)
			}
		}
		return out
	}
}

// edit changes an answer that is a JSON object.
func edit(f func(body map[string]any)) func(*state, int, []byte) (int, []byte) {
	return func(_ *state, status int, body []byte) (int, []byte) {
		d := json.NewDecoder(bytes.NewReader(body))
		d.UseNumber()
		var m map[string]any
		if d.Decode(&m) != nil {
			return status, body
		}
		f(m)
		out, err := json.Marshal(m)
		if err != nil {
			return status, body
		}
		return status, out
	}
}

// missing is a route that an engine does not have.
func missing(*state, int, []byte) (int, []byte) {
	return http.StatusNotFound, []byte(`{"detail":"Not Found"}`)
}

// frozen answers what it answered first.
func frozen(s *state, status int, body []byte) (int, []byte) {
	s.first.CompareAndSwap(nil, &body)
	return status, *s.first.Load()
}

func addLines(lines ...string) func(*state, int, []byte) (int, []byte) {
	return func(_ *state, status int, body []byte) (int, []byte) {
		return status, append(append([]byte{}, body...), []byte(strings.Join(lines, "\n")+"\n")...)
	}
}
