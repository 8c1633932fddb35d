package coordinator

import (
	"github.com/prometheus/client_golang/prometheus"

	waypostv1 "waypost/proto/waypost/v1"
)

// memoCollector tells how texts find their tokens at the time of asking.
type memoCollector struct {
	c                              *Coordinator
	requests, tokens, bytes, state *prometheus.Desc
}

func newMemoCollector(c *Coordinator) *memoCollector {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("waypost_memo_"+name, help, labels, nil)
	}
	return &memoCollector{
		c:        c,
		requests: d("requests_total", "Requests given as text, by whether their first tokens were known.", "pool", "result"),
		tokens:   d("tokens_total", "Tokens of prompts learnt: all, those known from others before, of these those that were told, and those told that were not so.", "pool", "kind"),
		bytes:    d("bytes", "Memory of the text memo.", "pool"),
		state:    d("breaker_open", "1 while the text memo of a pool is not used because its predictions were wrong.", "pool"),
	}
}

// Describe implements prometheus.Collector.
func (m *memoCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.requests, m.tokens, m.bytes, m.state} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *memoCollector) Collect(ch chan<- prometheus.Metric) {
	for pool, p := range m.c.memos.all() {
		p.mu.Lock()
		s, bytes := p.memo.Stats(), p.memo.Bytes()
		open, _, _ := p.memo.Breaker()
		p.mu.Unlock()
		count := func(d *prometheus.Desc, v uint64, label string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), pool, label)
		}
		count(m.requests, s.Hits, "hit")
		count(m.requests, s.Withheld, "withheld")
		count(m.requests, s.Lookups-s.Hits-s.Withheld, "miss")
		count(m.tokens, s.PromptTokens, "prompt")
		count(m.tokens, s.KnownTokens, "known")
		count(m.tokens, s.CoveredTokens, "covered")
		count(m.tokens, s.OverTokens, "over")
		x := 0.
		if open {
			x = 1
		}
		ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.GaugeValue, float64(bytes), pool)
		ch <- prometheus.MustNewConstMetric(m.state, prometheus.GaugeValue, x, pool)
	}
}

// plusMemo adds what two coordinators tell of one pool. A memo that is off
// somewhere is what an operator should see.
func plusMemo(a, b *waypostv1.MemoReuse) *waypostv1.MemoReuse {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	if a.GetState() == "on" {
		a.State = b.State
	}
	for _, f := range [...]struct{ to, from **float64 }{
		{&a.Lookups, &b.Lookups},
		{&a.Hits, &b.Hits},
		{&a.PromptTokens, &b.PromptTokens},
		{&a.KnownTokens, &b.KnownTokens},
		{&a.CoveredTokens, &b.CoveredTokens},
		{&a.OverTokens, &b.OverTokens},
		{&a.Bytes, &b.Bytes},
		{&a.Opened, &b.Opened},
		{&a.Epochs, &b.Epochs},
	} {
		plus(f.to, *f.from)
	}
	a.Learnt = plusAll(a.Learnt, b.Learnt)
	return a
}

// checkMemos tells of pools whose text memo is not used.
func (c *Coordinator) checkMemos(p *problems) {
	for pool, m := range c.memos.all() {
		m.mu.Lock()
		open, _, _ := m.memo.Breaker()
		state := m.state()
		m.mu.Unlock()
		p.check(!open, "warning", "pool "+pool, "text memo "+state, nil, "requests given as text are placed without prefix credit; learning goes on", "waypost reuse --pool "+pool)
	}
}
