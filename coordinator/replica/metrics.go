package replica

import (
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics reads the replica when it is scraped. What is unknown is left out
// rather than shown as 0.
type metrics struct {
	r       *Replica
	reg     prometheus.Registerer
	commit  prometheus.Histogram
	state   *prometheus.Desc
	term    *prometheus.Desc
	contact *prometheus.Desc
	peers   *prometheus.Desc
	stalled *prometheus.Desc
	version *prometheus.Desc
	age     *prometheus.Desc
}

func newMetrics(r *Replica, reg prometheus.Registerer) (*metrics, error) {
	desc := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }
	m := &metrics{
		r: r, reg: reg,
		commit: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "waypost_raft_commit_seconds", Help: "Time from proposing a change on the leader to its being applied.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14),
		}),
		state:   desc("waypost_raft_state", "0 follower, 1 candidate, 2 leader, 3 shut down."),
		term:    desc("waypost_raft_term", "Raft term."),
		contact: desc("waypost_raft_last_contact_seconds", "Time since a leader was heard; on the leader, since a majority answered."),
		peers:   desc("waypost_raft_peers", "Coordinators in the Raft configuration, this one included."),
		stalled: desc("waypost_raft_disk_stalled_seconds", "Time the write to the log under way has taken."),
		version: desc("waypost_policy_version", "Version of the fleet file in force here."),
		age:     desc("waypost_policy_age_seconds", "Age of the policy: time since it was last confirmed by a leader."),
	}
	if err := reg.Register(m); err != nil {
		return nil, err
	}
	return m, nil
}

func (m *metrics) unregister() { m.reg.Unregister(m) }

func (m *metrics) committed(d time.Duration) { m.commit.Observe(d.Seconds()) }

// Describe lists the metrics.
func (m *metrics) Describe(c chan<- *prometheus.Desc) {
	m.commit.Describe(c)
	for _, d := range []*prometheus.Desc{m.state, m.term, m.contact, m.peers, m.stalled, m.version, m.age} {
		c <- d
	}
}

// Collect reads them.
func (m *metrics) Collect(c chan<- prometheus.Metric) {
	m.commit.Collect(c)
	gauge := func(d *prometheus.Desc, v float64) { c <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	gauge(m.version, float64(m.r.State().FleetFile().Version))
	node := m.r.running()
	if node == nil {
		gauge(m.state, float64(raft.Shutdown))
		return
	}
	gauge(m.state, float64(node.State()))
	gauge(m.term, float64(node.CurrentTerm()))
	gauge(m.peers, float64(len(node.GetConfiguration().Configuration().Servers)))
	gauge(m.stalled, m.r.DiskStalledFor().Seconds())
	if age, known := m.r.LastContact(); known {
		gauge(m.contact, age.Seconds())
		gauge(m.age, age.Seconds())
	}
}
