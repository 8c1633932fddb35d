package lane

import (
	"context"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/stats"
)

// agentMetrics are those of a dialer.
type agentMetrics struct {
	connected  *prometheus.GaugeVec
	bytes      *prometheus.CounterVec
	reconnects prometheus.Counter
	refused    prometheus.Counter
	stalled    prometheus.Counter

	mu    sync.Mutex
	known map[string]bool // coordinators that were up once
}

func newBytes() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "waypost_lane_bytes_total",
		Help: "Bytes of lane frames, sent and received, by kind of frame.",
	}, []string{"kind"})
}

func newAgentMetrics(reg prometheus.Registerer) (*agentMetrics, error) {
	m := &agentMetrics{
		connected: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "waypost_lane_connected",
			Help: "1 while the lane to a coordinator is up.",
		}, []string{"coordinator"}),
		bytes: newBytes(),
		reconnects: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "waypost_lane_reconnects_total",
			Help: "Lanes that came up again to a coordinator that had one before.",
		}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "waypost_lane_refused_total",
			Help: "Lanes that a coordinator refused.",
		}),
		stalled: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "waypost_lane_stalled_total",
			Help: "Lanes closed because nothing could be written.",
		}),
		known: map[string]bool{},
	}
	return m, register(reg, m.connected, m.bytes, m.reconnects, m.refused, m.stalled)
}

func (m *agentMetrics) up(coordinator string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known[coordinator] {
		m.reconnects.Inc()
	} else if len(m.known) >= maxCoordinatorsNamed {
		// Names come from the network; the label set stays bounded.
		for gone := range m.known {
			delete(m.known, gone)
			m.connected.DeleteLabelValues(gone)
			break
		}
	}
	m.known[coordinator] = true
	m.connected.WithLabelValues(coordinator).Set(1)
}

func (m *agentMetrics) down(coordinator string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known[coordinator] {
		m.connected.WithLabelValues(coordinator).Set(0)
	}
}

// serverMetrics are those of a server.
type serverMetrics struct {
	connected prometheus.Gauge
	bytes     *prometheus.CounterVec
	refused   *prometheus.CounterVec
	replaced  prometheus.Counter
	stalled   prometheus.Counter
	lateness  prometheus.Histogram
}

func newServerMetrics(reg prometheus.Registerer) (*serverMetrics, error) {
	m := &serverMetrics{
		connected: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "waypost_lanes_connected",
			Help: "Hosts whose lane is up.",
		}),
		bytes: newBytes(),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "waypost_lane_refused_total",
			Help: "Lanes refused, by reason.",
		}, []string{"reason"}),
		replaced: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "waypost_lane_replaced_total",
			Help: "Lanes that a newer one of the same host replaced.",
		}),
		stalled: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "waypost_lane_stalled_total",
			Help: "Lanes closed because nothing could be written.",
		}),
		lateness: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "waypost_lane_lateness_seconds",
			Help: "How much later than the fastest frame of its lane a LOAD arrived.", Buckets: []float64{.001, .003, .01, .03, .1, .3, 1, 3, 10},
		}),
	}
	return m, register(reg, m.connected, m.bytes, m.refused, m.replaced, m.stalled, m.lateness)
}

func register(reg prometheus.Registerer, cs ...prometheus.Collector) error {
	if reg == nil {
		return nil
	}
	for _, c := range cs {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// byteCounter counts the bytes of lane frames; other calls on the same
// connection are not its business.
type byteCounter struct{ bytes *prometheus.CounterVec }

var _ stats.Handler = byteCounter{}

// TagRPC implements stats.Handler.
func (byteCounter) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (b byteCounter) HandleRPC(_ context.Context, s stats.RPCStats) {
	switch p := s.(type) {
	case *stats.InPayload:
		if kind := kindOf(p.Payload); kind != "" {
			b.bytes.WithLabelValues(kind).Add(float64(p.WireLength))
		}
	case *stats.OutPayload:
		if kind := kindOf(p.Payload); kind != "" {
			b.bytes.WithLabelValues(kind).Add(float64(p.WireLength))
		}
	}
}

// TagConn implements stats.Handler.
func (byteCounter) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (byteCounter) HandleConn(context.Context, stats.ConnStats) {}
