package oneport

import (
	"errors"
	"os"

	"github.com/prometheus/client_golang/prometheus"
)

// Reasons why a connection was closed before it reached a server.
const (
	reasonUnknown  = "unknown_protocol"
	reasonTimeout  = "timeout"
	reasonCrowded  = "crowded_out"
	reasonOverflow = "not_accepted"
	reasonBroken   = "handshake_failed"
)

// refusal is an error with its counter's label.
type refusal struct {
	reason string
	err    error
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

func reasonOf(err error) string {
	var r *refusal
	switch {
	case errors.As(err, &r):
		return r.reason
	case errors.Is(err, os.ErrDeadlineExceeded):
		return reasonTimeout
	default:
		return reasonBroken
	}
}

type metrics struct {
	port        string
	connections *prometheus.CounterVec
	refusals    *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, port string) (*metrics, error) {
	m := &metrics{
		port: port,
		connections: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "waypost_port_connections_total", Help: "Connections handed to a server, by port and protocol.",
		}, []string{"port", "protocol"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "waypost_port_refused_total", Help: "Connections closed before they reached a server, by port and reason.",
		}, []string{"port", "reason"}),
	}
	if reg == nil {
		return m, nil
	}
	var err error
	m.connections, err = shared(reg, m.connections)
	if err != nil {
		return nil, err
	}
	m.refusals, err = shared(reg, m.refusals)
	return m, err
}

// shared registers a counter, or returns the equal one of another port of this process.
func shared(reg prometheus.Registerer, c *prometheus.CounterVec) (*prometheus.CounterVec, error) {
	err := reg.Register(c)
	var already prometheus.AlreadyRegisteredError
	if errors.As(err, &already) {
		if existing, ok := already.ExistingCollector.(*prometheus.CounterVec); ok {
			return existing, nil
		}
	}
	return c, err
}

func (m *metrics) accepted(p Protocol)   { m.connections.WithLabelValues(m.port, string(p)).Inc() }
func (m *metrics) refused(reason string) { m.refusals.WithLabelValues(m.port, reason).Inc() }
