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
	bytes      *kindBytes
	reconnects prometheus.Counter
	refused    prometheus.Counter
	stalled    prometheus.Counter

	mu    sync.Mutex
	known map[string]bool // coordinators that were up once
}

func newBytes() *kindBytes {
	return &kindBytes{vec: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "waypost_lane_bytes_total",
		Help: "Bytes of lane frames, sent and received, by kind of frame.",
	}, []string{"kind"})}
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
	return m, register(reg, m.connected, m.bytes.vec, m.reconnects, m.refused, m.stalled)
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
	bytes     *kindBytes
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
	return m, register(reg, m.connected, m.bytes.vec, m.refused, m.replaced, m.stalled, m.lateness)
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

// kindBytes counts the bytes of lane frames by kind, and keeps the counters of the
// kinds that it has met.
type kindBytes struct {
	vec  *prometheus.CounterVec
	kept sync.Map // kind → prometheus.Counter
}

// frameHeaderBytes is what gRPC puts before a message.
const frameHeaderBytes = 5

// add counts a frame of so many bytes.
func (b *kindBytes) add(frame any, bytes int) {
	kind := kindOf(frame)
	if kind == "" {
		return
	}
	counter, ok := b.kept.Load(kind)
	if !ok {
		counter, _ = b.kept.LoadOrStore(kind, b.vec.WithLabelValues(kind))
	}
	counter.(prometheus.Counter).Add(float64(bytes + frameHeaderBytes))
}

// byteCounter counts the bytes of lane frames; other calls on the same
// connection are not its business.
type byteCounter struct{ bytes *kindBytes }

var _ stats.Handler = byteCounter{}

// TagRPC implements stats.Handler.
func (byteCounter) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (b byteCounter) HandleRPC(_ context.Context, s stats.RPCStats) {
	switch p := s.(type) {
	case *stats.InPayload:
		b.bytes.add(p.Payload, p.WireLength-frameHeaderBytes)
	case *stats.OutPayload:
		b.bytes.add(p.Payload, p.WireLength-frameHeaderBytes)
	}
}

// TagConn implements stats.Handler.
func (byteCounter) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (byteCounter) HandleConn(context.Context, stats.ConnStats) {}
