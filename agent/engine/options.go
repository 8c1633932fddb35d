package engine

import (
	"errors"
	"log/slog"
	"net"
	"time"

	"waypost/gossip/nonblock"
)

// The bounds of the rhythm of an adapter: four questions a second about load
// are enough, and as many as an engine should be asked.
const (
	// MinLoadEvery is the least time between two readings of the counters.
	MinLoadEvery = 250 * time.Millisecond
	// DefaultFactsEvery is the time between looks at what seldom changes.
	DefaultFactsEvery = 30 * time.Second
	// DefaultPageTimeout bounds one reading of the counters and one dial.
	DefaultPageTimeout = time.Second
)

// Options is what every adapter is made with. Zero values are the defaults.
type Options struct {
	// Target is the engine.
	Target Target
	// Logger is where faults are told. Required.
	Logger *slog.Logger
	// LoadEvery is the time between readings of the counters, at least and
	// by default 250 ms.
	LoadEvery time.Duration
	// FactsEvery is the time between looks at what seldom changes. 30 s.
	FactsEvery time.Duration
	// PageTimeout bounds one reading of the counters and one dial. 1 s.
	PageTimeout time.Duration
	// WrapEvents is given every connection that events come by, before its first
	// byte. Default: nonblock.Conn.
	WrapEvents func(net.Conn) net.Conn
}

// ErrNoLogger means that Options has no Logger.
var ErrNoLogger = errors.New("engine: Logger is missing")

// WithDefaults checks the options, fills in what is not set and names the
// engine in the log.
func (o Options) WithDefaults() (Options, error) {
	if o.Logger == nil {
		return o, ErrNoLogger
	}
	o.Logger = o.Logger.With("engine", o.Target.Name)
	o.LoadEvery = max(o.LoadEvery, MinLoadEvery)
	if o.FactsEvery <= 0 {
		o.FactsEvery = DefaultFactsEvery
	}
	if o.PageTimeout <= 0 {
		o.PageTimeout = DefaultPageTimeout
	}
	if o.WrapEvents == nil {
		o.WrapEvents = nonblock.Conn
	}
	return o, nil
}
