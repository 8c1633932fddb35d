package nvml

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the client's, collected as one.
type metrics struct {
	client  *Client
	starts  prometheus.Counter
	blocks  prometheus.Counter
	crashes prometheus.Counter
	xids    *prometheus.CounterVec

	mu    sync.Mutex
	calls map[string]CallTime // since the agent started, at most maxCallNames
}

var (
	callSeconds = prometheus.NewDesc("waypost_nvml_call_seconds",
		"Time of calls into the driver library.", []string{"call"}, nil)
	blockedSeconds = prometheus.NewDesc("waypost_nvml_blocked_seconds",
		"How long the driver has not answered; 0 while it does.", nil, nil)
)

func newMetrics(c *Client) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	return &metrics{
		client:  c,
		starts:  counter("waypost_nvml_child_starts_total", "NVML child processes started."),
		blocks:  counter("waypost_nvml_blocked_total", "NVML children ended because a driver call did not return."),
		crashes: counter("waypost_nvml_child_crashes_total", "NVML children that ended by themselves."),
		xids: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "waypost_gpu_xids_total", Help: "Xid events by class.",
		}, []string{"class"}),
		calls: map[string]CallTime{},
	}
}

func (m *metrics) addCalls(calls []CallTime) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range calls {
		sum, ok := m.calls[c.Call]
		if !ok && len(m.calls) >= maxCallNames {
			continue
		}
		sum.Count += c.Count
		sum.SumMs += c.SumMs
		m.calls[c.Call] = sum
	}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	m.starts.Describe(ch)
	m.blocks.Describe(ch)
	m.crashes.Describe(ch)
	m.xids.Describe(ch)
	ch <- callSeconds
	ch <- blockedSeconds
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	m.starts.Collect(ch)
	m.blocks.Collect(ch)
	m.crashes.Collect(ch)
	m.xids.Collect(ch)
	c := m.client
	c.mu.Lock()
	blocked := 0.0
	if c.status.Code == StateBlocked {
		blocked = time.Since(c.since).Seconds()
	}
	c.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(blockedSeconds, prometheus.GaugeValue, blocked)
	m.mu.Lock()
	defer m.mu.Unlock()
	for call, t := range m.calls {
		ch <- prometheus.MustNewConstSummary(callSeconds, t.Count, t.SumMs/1000, nil, call)
	}
}
