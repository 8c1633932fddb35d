package placement

import (
	"math"
)

// LinkRates is what transfers were seen to reach, by link and by pair. The
// zero value is ready. It is not safe for concurrent use. Times are ms on the
// caller's clock.
type LinkRates struct {
	links map[string]*seenRate
	pairs map[Pair]*seenRate
}

// SeenRate is what transfers were seen to reach.
type SeenRate struct {
	// BytesPerMs is the bandwidth of the link alone, over the transfers of
	// late; Transfers counts them, and AtMs is when the last one was over.
	BytesPerMs float64
	Transfers  int
	AtMs       float64
}

// seenRate sums bytes and times, older ones with less weight: long transfers
// tell more of a link than short ones.
type seenRate struct {
	bytes, ms float64
	SeenRate
}

// Constants of LinkRates. After MeasuredTransfers a rate replaces what is
// declared or assumed; without transfers it fades after RateKeptMs, so that a
// link that once was slow is tried again.
const (
	MeasuredTransfers = 20
	RateKeptMs        = 3_600_000
	// rateKeep is the weight that a sum keeps with each transfer: about the last
	// 20 count.
	rateKeep = .95
	maxRates = 4096
	// maxRate bounds a sample: more than any memory reads.
	maxRate = 1e10
)

// Note takes a transfer that was over at nowMs: its bytes, its time on the way
// without setup and latency, and how many others shared the link.
func (r *LinkRates) Note(nowMs float64, link string, pair Pair, bytes, ms float64, others int) {
	if !(bytes > 0) || !(ms > 0) {
		return
	}
	// Others had their shares of the link: alone it would have done as much more.
	bytes *= float64(1 + max(others, 0))
	if bytes/ms > maxRate {
		return
	}
	if r.links == nil {
		r.links, r.pairs = map[string]*seenRate{}, map[Pair]*seenRate{}
	}
	noteRate(r.links, link, nowMs, bytes, ms)
	noteRate(r.pairs, pair, nowMs, bytes, ms)
}

func noteRate[K comparable](rates map[K]*seenRate, key K, nowMs, bytes, ms float64) {
	s := rates[key]
	if s == nil || nowMs-s.AtMs > RateKeptMs {
		if s == nil && len(rates) >= maxRates {
			dropOldest(rates)
		}
		s = &seenRate{}
		rates[key] = s
	}
	s.bytes, s.ms = s.bytes*rateKeep+bytes, s.ms*rateKeep+ms
	s.SeenRate = SeenRate{BytesPerMs: s.bytes / s.ms, Transfers: s.Transfers + 1, AtMs: nowMs}
}

// dropOldest forgets what was heard of longest ago.
func dropOldest[K comparable](rates map[K]*seenRate) {
	var oldest K
	atMs := math.Inf(1)
	for key, s := range rates {
		if s.AtMs < atMs {
			oldest, atMs = key, s.AtMs
		}
	}
	delete(rates, oldest)
}

// OfLink is what transfers over a link reached; false: none was seen lately.
func (r *LinkRates) OfLink(nowMs float64, link string) (SeenRate, bool) {
	return rateOf(r.links, link, nowMs)
}

// OfPair is what transfers of a pair reached, in its direction.
func (r *LinkRates) OfPair(nowMs float64, pair Pair) (SeenRate, bool) {
	return rateOf(r.pairs, pair, nowMs)
}

func rateOf[K comparable](rates map[K]*seenRate, key K, nowMs float64) (SeenRate, bool) {
	s := rates[key]
	if s == nil || nowMs-s.AtMs > RateKeptMs {
		return SeenRate{}, false
	}
	return s.SeenRate, true
}

// Measured puts what was seen into a path, in place of what is declared or
// assumed, once enough transfers were seen: those of the pair, else those of
// its link.
func (r *LinkRates) Measured(nowMs float64, pair Pair, path Path) Path {
	s, ok := r.OfPair(nowMs, pair)
	if !ok || s.Transfers < MeasuredTransfers {
		s, ok = r.OfLink(nowMs, path.Link)
	}
	if ok && s.Transfers >= MeasuredTransfers {
		path.BytesPerMs, path.Figure = s.BytesPerMs, FigureMeasured
	}
	return path
}

// Pairs lists the pairs of which transfers were seen lately.
func (r *LinkRates) Pairs(nowMs float64) map[Pair]SeenRate {
	out := map[Pair]SeenRate{}
	for pair := range r.pairs {
		if s, ok := r.OfPair(nowMs, pair); ok {
			out[pair] = s
		}
	}
	return out
}

// Price is what moving tokens of a prompt from one worker to another costs,
// beside computing them there.
type Price struct {
	// TransferMs is the time on the way; NaN: it cannot be told.
	TransferMs float64
	// ComputeMs is the time of computing them on an idle worker.
	ComputeMs float64
}

// PriceTransfer prices moving tokens over a path, alone on it, and says why
// nothing can be pulled; PullNone: it can.
func PriceTransfer(policy *Policy, from, to *Worker, path *Path, tokens int) (Price, PullNote) {
	p := pricer{policy: policy}
	price := Price{TransferMs: math.NaN(), ComputeMs: to.Steps.PrefillMs(0, tokens)}
	if from.Transfer != nil && from.Transfer.BytesPerToken > 0 && path.BytesPerMs > 0 {
		alone := *path
		alone.UnderWay = 0
		price.TransferMs, _ = p.transferMs(&Source{Worker: from}, &alone, tokens)
	}
	return price, eligible(to, from, path)
}
