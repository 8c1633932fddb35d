package coordinator

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"waypost/coordinator/explain"
)

// recordMetrics counts the decision records and says whether the disk takes
// them.
func recordMetrics(f promauto.Factory, c *Coordinator) {
	state := func() explain.JournalState {
		if c.journal == nil {
			return explain.JournalState{}
		}
		return c.journal.State()
	}
	for _, m := range []struct {
		name, help string
		of         func(explain.JournalState) uint64
	}{
		{"written", "Frames of decision records written to disk.", func(s explain.JournalState) uint64 { return s.Written }},
		{"dropped", "Frames of decision records that came faster than the disk.", func(s explain.JournalState) uint64 { return s.Dropped }},
		{"failed", "Frames of decision records that the disk refused; they are in memory only.", func(s explain.JournalState) uint64 { return s.Failed }},
		{"skipped", "Frames that could not be read at the start: torn by a crash or damaged.", func(s explain.JournalState) uint64 { return s.Skipped }},
	} {
		f.NewCounterFunc(prometheus.CounterOpts{Name: "waypost_explain_records_" + m.name + "_total", Help: m.help}, func() float64 { return float64(m.of(state())) })
	}
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "waypost_explain_disk_bytes", Help: "Bytes of decision records on disk."}, func() float64 { return float64(state().Bytes) })
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "waypost_explain_disk_failed", Help: "1 while decision records are kept in memory only."}, func() float64 {
		if c.journalProblem() != "" {
			return 1
		}
		return 0
	})
}
