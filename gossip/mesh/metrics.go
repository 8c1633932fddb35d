package mesh

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// counts are the counters behind the metrics.
type counts struct {
	bytesIn, bytesOut atomic.Uint64

	mu      sync.Mutex
	dropped map[string]uint64 // by reason; the reasons are fixed words of this package
}

// dropReasons are the reasons that have a series from the start; those that are
// told by the library's log are among them.
var dropReasons = []string{"event_overflow", "key", "label", "malformed", "peers_file", "queue_full", "stream_limit", "vetoed"}

func (c *counts) drop(reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dropped == nil {
		c.dropped = map[string]uint64{}
	}
	c.dropped[reason]++
}

func (c *counts) droppedFor(reason string) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dropped[reason]
}

// echoesKept is the number of own sketches whose return is waited for: a newer one
// replaces the former on its way, so that older ones do not come any more.
const echoesKept = 8

// echoes measures how fast gossip spreads by this process's own clock: the time
// from sending a sketch until another member hands it back.
type echoes struct {
	seconds prometheus.Histogram

	mu   sync.Mutex
	sets [echoesKept]struct {
		seq uint64
		at  time.Time
	}
}

func newEchoes() echoes {
	return echoes{seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "waypost_mesh_propagation_seconds", Help: "Time from sending a sketch until another member handed it back in a packet.",
		Buckets: []float64{.01, .03, .1, .2, .4, .6, .8, 1, 1.5, 2, 3, 5, 10, 30},
	})}
}

func (e *echoes) sent(seq uint64, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := &e.sets[seq%echoesKept]
	s.seq, s.at = seq, now
}

// heard takes a sketch of our own that came back; the first return of each
// counts.
func (e *echoes) heard(seq uint64, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := &e.sets[seq%echoesKept]
	if s.seq != seq || s.at.IsZero() {
		return
	}
	e.seconds.Observe(now.Sub(s.at).Seconds())
	s.at = time.Time{}
}

var (
	membersDesc = prometheus.NewDesc("waypost_mesh_members", "Gossip members as this process sees them, by status.", []string{"status"}, nil)
	healthDesc  = prometheus.NewDesc("waypost_mesh_health_score", "How badly this process keeps the gossip's rhythm; 0 is well.", nil, nil)
	queueDesc   = prometheus.NewDesc("waypost_mesh_queue_depth", "Sketches waiting to be gossiped.", nil, nil)
	bytesDesc   = prometheus.NewDesc("waypost_mesh_bytes_total", "Bytes of gossip, datagrams and streams.", []string{"direction"}, nil)
	droppedDesc = prometheus.NewDesc("waypost_mesh_messages_dropped_total", "Gossip thrown away, by reason.", []string{"reason"}, nil)
	keyDesc     = prometheus.NewDesc("waypost_mesh_key_info", "Fingerprint of the gossip key that encrypts.", []string{"fingerprint"}, nil)
)

// Describe implements prometheus.Collector.
func (m *Mesh) Describe(ch chan<- *prometheus.Desc) {
	m.echoes.seconds.Describe(ch)
	for _, d := range []*prometheus.Desc{membersDesc, healthDesc, queueDesc, bytesDesc, droppedDesc, keyDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Mesh) Collect(ch chan<- prometheus.Metric) {
	m.echoes.seconds.Collect(ch)
	byStatus := map[Status]int{StatusAlive: 0, StatusSuspect: 0, StatusLost: 0, StatusLeft: 0, StatusConflict: 0, StatusRefused: 0}
	for _, x := range m.Members() {
		byStatus[x.Status]++
	}
	for s, n := range byStatus {
		ch <- prometheus.MustNewConstMetric(membersDesc, prometheus.GaugeValue, float64(n), string(s))
	}
	if m.started.Load() {
		ch <- prometheus.MustNewConstMetric(healthDesc, prometheus.GaugeValue, float64(m.list.GetHealthScore()))
	}
	ch <- prometheus.MustNewConstMetric(queueDesc, prometheus.GaugeValue, float64(m.queue.NumQueued()))
	ch <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(m.counts.bytesIn.Load()), "in")
	ch <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(m.counts.bytesOut.Load()), "out")
	for _, reason := range dropReasons {
		ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(m.counts.droppedFor(reason)), reason)
	}
	if id := m.currentMeta().KeyID; id != "" {
		ch <- prometheus.MustNewConstMetric(keyDesc, prometheus.GaugeValue, 1, id)
	}
}
