package vllm

import (
	"bytes"
	"math"
	"strconv"
	"time"

	"waypost/agent/engine"
)

// maxRanks bounds the data-parallel ranks behind one endpoint.
const maxRanks = 256

// reading is one number of a page; a family that is absent or whose value
// cannot be one is not known, which is never zero.
type reading struct {
	v     float64
	known bool
	bad   bool
}

// add sums the series of one family and rank, which differ in labels that do
// not matter here.
func (r *reading) add(v float64, ok bool) {
	if !ok || r.bad {
		*r = reading{bad: true}
		return
	}
	r.v, r.known = r.v+v, true
}

func (r reading) float() *float64 {
	if !r.known {
		return nil
	}
	return &r.v
}

func (r reading) count() *int {
	if !r.known || r.v > math.MaxInt32 {
		return nil
	}
	n := int(r.v)
	return &n
}

// rankReadings is what a page says about one rank.
type rankReadings struct {
	seen                              bool
	running, waiting                  reading
	kvUsed, kvUsedOld                 reading
	prompt, promptComputed, promptHit reading
	generated                         reading
	firstTokenSum, firstTokenCount    reading
	finished, preempted               reading
	asleep                            reading
	blockTokens, poolBlocks           reading
	poolOverride, poolTokens          reading
	attentionBlockTokens              reading
}

// metricsPage is a scanned page of /metrics. Only the families that the agent
// uses are looked at. It keeps its memory from page to page.
type metricsPage struct {
	ranks        []rankReadings // of the ranks that were seen, in order
	startSeconds reading
	faults       int // values that cannot be
	lines        int
}

// scan reads a page in the Prometheus text format.
func (p *metricsPage) scan(page []byte) {
	p.ranks = p.ranks[:0]
	p.startSeconds, p.faults, p.lines = reading{}, 0, 0
	for len(page) > 0 {
		line := page
		if i := bytes.IndexByte(page, '\n'); i >= 0 {
			line, page = page[:i], page[i+1:]
		} else {
			page = nil
		}
		if len(line) > 0 && (line[0] == 'v' || line[0] == 'p') {
			p.line(line)
		}
	}
	// A server that is one of several ranks shows its own only, under the
	// number it has among them.
	seen := p.ranks[:0]
	for _, r := range p.ranks {
		if r.seen {
			seen = append(seen, r)
		}
	}
	p.ranks = seen
}

// The families by name. The two that tell several numbers by a label are
// handled where their labels are read.
const (
	familyNone = iota
	familyStart
	familyRunning
	familyWaiting
	familyKVUsed
	familyKVUsedOld
	familyPrompt
	familyPromptBySource
	familyPromptCached
	familyGenerated
	familyFirstTokenSum
	familyFirstTokenCount
	familyFinished
	familyPreempted
	familySleep
	familyCacheConfig
)

func familyOf(name []byte) int {
	if name[0] == 'p' {
		if string(name) == "process_start_time_seconds" {
			return familyStart
		}
		return familyNone
	}
	const prefix = "vllm:"
	if len(name) < len(prefix) || string(name[:len(prefix)]) != prefix {
		return familyNone
	}
	switch string(name[len(prefix):]) {
	case "num_requests_running":
		return familyRunning
	case "num_requests_waiting":
		return familyWaiting
	case "kv_cache_usage_perc":
		return familyKVUsed
	case "gpu_cache_usage_perc":
		return familyKVUsedOld
	case "prompt_tokens_total":
		return familyPrompt
	case "prompt_tokens_by_source_total":
		return familyPromptBySource
	case "prompt_tokens_cached_total":
		return familyPromptCached
	case "generation_tokens_total":
		return familyGenerated
	case "time_to_first_token_seconds_sum":
		return familyFirstTokenSum
	case "time_to_first_token_seconds_count":
		return familyFirstTokenCount
	case "request_success_total":
		return familyFinished
	case "num_preemptions_total":
		return familyPreempted
	case "engine_sleep_state":
		return familySleep
	case "cache_config_info":
		return familyCacheConfig
	}
	return familyNone
}

// line reads name{labels} value, perhaps with a timestamp behind.
func (p *metricsPage) line(line []byte) {
	end := bytes.IndexAny(line, "{ \t")
	if end <= 0 {
		return
	}
	family := familyOf(line[:end])
	if family == familyNone {
		return
	}
	p.lines++
	l := labels{rest: line[end:]}
	rank, source := 0, []byte(nil)
	var config rankReadings
	for l.next() {
		switch string(l.name) {
		case "engine":
			rank = rankOf(l.value)
		case "source", "sleep_state":
			source = l.value
		default:
			if family == familyCacheConfig {
				config.configure(l.name, l.value)
			}
		}
	}
	if l.broken || rank < 0 {
		p.faults++
		return
	}
	v, ok := value(l.rest)
	if !ok {
		p.faults++
	}
	if family == familyStart {
		p.startSeconds.add(v, ok)
		return
	}
	r := p.rank(rank)
	r.take(family, source, v, ok)
	if family == familyCacheConfig {
		r.blockTokens, r.poolBlocks, r.poolOverride = config.blockTokens, config.poolBlocks, config.poolOverride
		r.poolTokens, r.attentionBlockTokens = config.poolTokens, config.attentionBlockTokens
	}
}

func (p *metricsPage) rank(i int) *rankReadings {
	for len(p.ranks) <= i {
		p.ranks = append(p.ranks, rankReadings{})
	}
	p.ranks[i].seen = true
	return &p.ranks[i]
}

func rankOf(v []byte) int {
	n := 0
	if len(v) == 0 || len(v) > 3 {
		return -1
	}
	for _, c := range v {
		if c < '0' || c > '9' {
			return -1
		}
		n = n*10 + int(c-'0')
	}
	if n >= maxRanks {
		return -1
	}
	return n
}

func (r *rankReadings) take(family int, source []byte, v float64, ok bool) {
	switch family {
	case familyRunning:
		r.running.add(v, ok)
	case familyWaiting:
		r.waiting.add(v, ok)
	case familyKVUsed:
		r.kvUsed.add(v, ok)
	case familyKVUsedOld:
		r.kvUsedOld.add(v, ok)
	case familyPrompt:
		r.prompt.add(v, ok)
	case familyPromptBySource:
		if string(source) == "local_compute" {
			r.promptComputed.add(v, ok)
		}
	case familyPromptCached:
		r.promptHit.add(v, ok)
	case familyGenerated:
		r.generated.add(v, ok)
	case familyFirstTokenSum:
		r.firstTokenSum.add(v, ok)
	case familyFirstTokenCount:
		r.firstTokenCount.add(v, ok)
	case familyFinished:
		r.finished.add(v, ok)
	case familyPreempted:
		r.preempted.add(v, ok)
	case familySleep:
		if string(source) != "awake" {
			r.asleep.add(v, ok)
		}
	}
}

// configure takes a label of cache_config_info: Python's text of a setting,
// "None" where it is not set.
func (r *rankReadings) configure(name, text []byte) {
	var to *reading
	switch string(name) {
	case "block_size":
		to = &r.blockTokens
	case "effective_attention_block_size":
		to = &r.attentionBlockTokens
	case "num_gpu_blocks":
		to = &r.poolBlocks
	case "num_gpu_blocks_override":
		to = &r.poolOverride
	case "kv_cache_size_tokens":
		to = &r.poolTokens
	default:
		return
	}
	if v, ok := value(text); ok && v == math.Trunc(v) {
		*to = reading{v: v, known: true}
	}
}

// value reads a number that can be a count, a share or a time: finite, not
// negative and below 2^63, where an overflowed counter ends up.
func value(b []byte) (float64, bool) {
	b = bytes.TrimLeft(b, " \t")
	if i := bytes.IndexAny(b, " \t\r"); i >= 0 {
		b = b[:i]
	}
	if len(b) == 0 || len(b) > 31 { // a longer one would be copied to the heap
		return 0, false
	}
	v, err := strconv.ParseFloat(string(b), 64)
	if err != nil || !(v >= 0 && v < 1<<63) {
		return 0, false
	}
	return v, true
}

// labels walks {name="value",...}; what follows is left in rest.
type labels struct {
	rest        []byte
	open        bool
	broken      bool
	name, value []byte // as written, escapes included
}

func (l *labels) next() bool {
	b := l.rest
	if !l.open {
		if len(b) == 0 || b[0] != '{' {
			return false
		}
		l.open, b = true, b[1:]
	}
	for len(b) > 0 && (b[0] == ',' || b[0] == ' ') {
		b = b[1:]
	}
	if len(b) > 0 && b[0] == '}' {
		l.rest = b[1:]
		return false
	}
	eq := bytes.IndexByte(b, '=')
	if eq < 0 || eq+1 >= len(b) || b[eq+1] != '"' {
		l.broken = true
		return false
	}
	l.name, b = b[:eq], b[eq+2:]
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			l.value, l.rest = b[:i], b[i+1:]
			return true
		}
	}
	l.broken = true
	return false
}

// load turns the readings of one rank into a load.
func (p *metricsPage) load(rank int, at time.Time) engine.Load {
	if rank >= len(p.ranks) {
		return engine.Load{At: at}
	}
	r := &p.ranks[rank]
	used := r.kvUsed
	if !used.known {
		used = r.kvUsedOld
	}
	if used.v > 1 {
		used = reading{}
	}
	computed := r.promptComputed
	if !computed.known && r.prompt.known && r.promptHit.known && r.promptHit.v <= r.prompt.v {
		computed = reading{v: r.prompt.v - r.promptHit.v, known: true}
	}
	l := engine.Load{
		At: at, Running: r.running.count(), Waiting: r.waiting.count(), KVUsedRatio: used.float(),
		PromptTokens: r.prompt.float(), ComputedPromptTokens: computed.float(), GenerationTokens: r.generated.float(),
		FirstTokens: r.firstTokenCount.float(), FirstTokenSeconds: r.firstTokenSum.float(),
		Finished: r.finished.float(), Preemptions: r.preempted.float(),
	}
	if r.asleep.known {
		asleep := r.asleep.v > 0
		l.Sleeping = &asleep
	}
	return l
}

// startMark is the process life, 0 if the page does not tell.
func (p *metricsPage) startMark() uint64 {
	if !p.startSeconds.known || p.startSeconds.v == 0 {
		return 0
	}
	return math.Float64bits(p.startSeconds.v)
}

// blockTokens is the number of tokens per block, 0 if unknown.
func (p *metricsPage) blockTokens() int {
	if len(p.ranks) == 0 {
		return 0
	}
	r := &p.ranks[0]
	if r.blockTokens.known {
		return int(r.blockTokens.v)
	}
	return int(r.attentionBlockTokens.v)
}

// usableBlocks is the number of blocks of one rank that can hold tokens, 0 if
// unknown. One block of the pool never does. With several ranks behind one
// server num_gpu_blocks is their sum, as the size in tokens shows.
func (p *metricsPage) usableBlocks() int {
	if len(p.ranks) == 0 {
		return 0
	}
	r := &p.ranks[0]
	pool := r.poolBlocks.v
	switch n := float64(len(p.ranks)); {
	case r.poolOverride.known:
		pool = r.poolOverride.v
	case n > 1 && r.poolTokens.known && r.blockTokens.known && r.poolTokens.v*n == pool*r.blockTokens.v:
		pool /= n
	}
	return max(0, int(pool)-1)
}
