package kvevents

import (
	"net"
	"net/url"
	"strconv"
	"strings"
)

// Dialect is how one kind of engine publishes, as far as shapes do not tell.
type Dialect struct {
	// Setting is the engine's setting of events, as hints name it:
	// "--kv-events-config" for example.
	Setting string
	// Check is what to look at if an engine that should publish does not.
	Check string
	// Enable is what to start an engine with that publishes nothing.
	Enable string
	// BindsAllZero says that an endpoint of 0.0.0.0 is bound, not connected to;
	// AlwaysBinds that every endpoint is.
	BindsAllZero, AlwaysBinds bool
	// NamesNoAdapters says that events never name the adapter of a prompt,
	// whatever fields they have.
	NamesNoAdapters bool
	// TellsMedium says that events name GPU memory too wherever their layout has a
	// field for the memory; see Decoder.TellsMedium.
	TellsMedium bool
}

// HintNoEvents says how to start an engine that publishes nothing.
func (d *Dialect) HintNoEvents() string {
	return "the engine publishes no KV events: start it with " + d.Enable
}

// HintUnknown is for an engine that does not tell where it publishes.
func (d *Dialect) HintUnknown() string {
	return "where the engine publishes KV events is not known: set kv_events and kv_replay of the engine, or start it with " + d.Enable
}

// Binds is the engine's rule for binding an endpoint rather than connecting.
func (d *Dialect) Binds(endpoint string) bool {
	return d.AlwaysBinds || strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::") || d.BindsAllZero && hostOf(endpoint) == "0.0.0.0"
}

// Plan is how to reach the publisher of one rank.
type Plan struct {
	// Events is the endpoint; empty: none.
	Events string
	// Listen says that the publisher connects to us, Either that the address
	// does not tell who binds: listen if nobody answers there.
	Listen, Either bool
	// Replay is the endpoint of the replay; empty: none.
	Replay string
	// Pulled says that the adapter delivers the messages itself.
	Pulled bool
	// EventsTold and ReplayTold say that an endpoint is the engine's word: then
	// it must be on this host.
	EventsTold, ReplayTold bool
	// Named is the number that the rank gives itself in its batches, Others are
	// those of the other ranks of the engine. Batches of another rank are
	// refused; numbers that are in neither say nothing.
	Named  int
	Others []int
	// Hint is why there is none.
	Hint string
}

// Publisher is what an engine says about the event publisher of one rank.
type Publisher struct {
	// Off says that it is switched off.
	Off bool
	// Endpoint and Replay are as configured in the engine; empty: none.
	Endpoint, Replay string
}

// Configured is what the agent's configuration says of rank 0: see
// engine.Target.
type Configured struct {
	Events, Replay string
	Listen         bool
}

// PlanFor works out the endpoints of a rank from the agent's configuration and
// from what the engine says; p is nil if it says nothing. host is where the
// engine is reached. The engine's own word decides who binds.
func (d *Dialect) PlanFor(c Configured, p *Publisher, host string, rank int) Plan {
	out := Plan{Events: ShiftPort(c.Events, rank), Replay: ShiftPort(c.Replay, rank), Listen: c.Listen || hostOf(c.Events) == "*", Named: rank}
	switch {
	case p == nil && out.Events == "":
		out.Hint = d.HintUnknown()
		return out
	case p == nil:
		return out
	case p.Off || p.Endpoint == "":
		return Plan{Named: rank, Hint: d.HintNoEvents()}
	case !reachable(p.Endpoint) && out.Events == "":
		return Plan{Named: rank, Hint: "the engine publishes KV events at " + p.Endpoint + ", which is inside its process or host only: give it an endpoint such as tcp://*:5557"}
	case !reachable(p.Endpoint):
	case d.Binds(p.Endpoint):
		if out.Events == "" || out.Listen {
			out.Events, out.EventsTold = onHost(p.Endpoint, host), true
		}
		out.Listen = false
	default:
		out.Events, out.Either, out.EventsTold = p.Endpoint, true, true
	}
	if out.Replay == "" && reachable(p.Replay) {
		// A replay socket is always bound.
		out.Replay, out.ReplayTold = onHost(p.Replay, host), true
	}
	return out
}

func reachable(endpoint string) bool { return strings.HasPrefix(endpoint, "tcp://") }

func hostOf(endpoint string) string {
	host, _, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		return ""
	}
	return host
}

// ShiftPort gives the endpoint of a rank from that of rank 0.
func ShiftPort(endpoint string, rank int) string {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		return endpoint
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(n+rank))
}

// onHost gives an endpoint bound everywhere at the engine's host; one with a
// host of its own stays.
func onHost(endpoint, host string) string {
	switch hostOf(endpoint) {
	case "*", "", "::", "0.0.0.0":
	default:
		return endpoint
	}
	port := endpoint[strings.LastIndexByte(endpoint, ':')+1:]
	return "tcp://" + net.JoinHostPort(host, port)
}

// HostOf is the host of an engine's URL.
func HostOf(target string) string {
	u, err := url.Parse(target)
	if err != nil {
		return ""
	}
	return u.Hostname()
}
