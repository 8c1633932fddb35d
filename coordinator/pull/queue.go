package pull

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Defaults of Options.
const (
	DefaultInFlight     = 32
	DefaultPerHost      = 8
	DefaultAnswerWithin = 3 * time.Second
	DefaultPause        = 200 * time.Millisecond
	DefaultLongestPause = 5 * time.Second
	DefaultMaxWaiting   = 1 << 14
)

// Options configure a [Queue]; zero means the default.
type Options struct {
	// InFlight bounds the pulls under way, PerHost those of one host.
	InFlight, PerHost int
	// AnswerWithin is how long a pull may go without a part of its answer.
	AnswerWithin time.Duration
	// Pause is the least time between two pulls of one stream. It doubles with
	// every pull that did not help, up to LongestPause, and up to a quarter more
	// is added by chance, so that streams that failed together do not come
	// together again.
	Pause, LongestPause time.Duration
	// MaxWaiting bounds the streams that are known here. One more is refused;
	// whoever misses a stream notices it again with the next report.
	MaxWaiting int
	// Seed is of the chance.
	Seed uint64
	// NextID numbers the pulls, never 0; nil: 1, 2, 3, …
	NextID func() uint32
}

// Stream names a prefix stream: the index of a worker on the lane of its host.
type Stream struct {
	Host  string
	Index uint32
}

// Ask is a pull to be sent now.
type Ask struct {
	Stream
	// ID is its number, which the answer repeats.
	ID uint32
	// Reason is why, as the first Want since the last answer said.
	Reason string
}

// Queue is the pulls that are wanted and under way. It is not safe for
// concurrent use.
type Queue struct {
	opt   Options
	rng   *rand.Rand
	hosts map[string]*host
	// turn are the hosts in the order in which they are served.
	turn    []*host
	streams int
	flights map[uint32]*stream
}

// host is a host with its streams.
type host struct {
	name     string
	streams  map[uint32]*stream
	waiting  []*stream // in the order wanted
	inFlight int
}

// stream is one stream that was ever wanted.
type stream struct {
	host   *host
	index  uint32
	reason string
	// id is that of the pull under way; 0: none.
	id      uint32
	waiting bool
	// notBefore is the earliest time of the next pull, answerBy the latest of
	// the next part of an answer.
	notBefore, answerBy time.Time
	pause               time.Duration
}

// New returns an empty queue.
func New(o Options) (*Queue, error) {
	for _, f := range []struct {
		name  string
		value *int
		unset int
	}{{"InFlight", &o.InFlight, DefaultInFlight}, {"PerHost", &o.PerHost, DefaultPerHost}, {"MaxWaiting", &o.MaxWaiting, DefaultMaxWaiting}} {
		if *f.value < 0 {
			return nil, fmt.Errorf("pull queue: %s is negative: %d", f.name, *f.value)
		}
		*f.value = cmp.Or(*f.value, f.unset)
	}
	for _, f := range []struct {
		name  string
		value *time.Duration
		unset time.Duration
	}{{"AnswerWithin", &o.AnswerWithin, DefaultAnswerWithin}, {"Pause", &o.Pause, DefaultPause}, {"LongestPause", &o.LongestPause, DefaultLongestPause}} {
		if *f.value < 0 {
			return nil, fmt.Errorf("pull queue: %s is negative: %v", f.name, *f.value)
		}
		*f.value = cmp.Or(*f.value, f.unset)
	}
	o.LongestPause = max(o.LongestPause, o.Pause)
	if o.NextID == nil {
		last := uint32(0)
		o.NextID = func() uint32 { last = max(1, last+1); return last }
	}
	return &Queue{opt: o, rng: rand.New(rand.NewPCG(o.Seed, 1)), hosts: map[string]*host{}, flights: map[uint32]*stream{}}, nil
}

// Want asks for a stream. atOnce says that its lane is a new one, so
// that no former pull is a reason to wait. It reports false if the stream is
// wanted or under way already, or if there is no room.
func (q *Queue) Want(s Stream, reason string, atOnce bool) bool {
	h := q.hosts[s.Host]
	var st *stream
	if h != nil {
		st = h.streams[s.Index]
	}
	if st == nil {
		if q.streams >= q.opt.MaxWaiting {
			return false
		}
		if h == nil {
			h = &host{name: s.Host, streams: map[uint32]*stream{}}
			q.hosts[s.Host] = h
			q.turn = append(q.turn, h)
		}
		st = &stream{host: h, index: s.Index}
		h.streams[s.Index] = st
		q.streams++
	}
	if atOnce {
		st.notBefore, st.pause = time.Time{}, 0
	}
	if st.waiting || st.id != 0 {
		return false
	}
	st.reason = reason
	q.wait(st)
	return true
}

func (q *Queue) wait(st *stream) {
	st.waiting = true
	st.host.waiting = append(st.host.waiting, st)
}

// Next returns a pull to be sent now. ok is false if there is none: nothing is
// wanted, all that is must wait, or enough is under way.
func (q *Queue) Next(now time.Time) (ask Ask, ok bool) {
	q.expire(now)
	if len(q.flights) >= q.opt.InFlight {
		return Ask{}, false
	}
	for i, h := range q.turn {
		if h.inFlight >= q.opt.PerHost {
			continue
		}
		at := slices.IndexFunc(h.waiting, func(st *stream) bool { return !st.notBefore.After(now) })
		if at < 0 {
			continue
		}
		st := h.waiting[at]
		h.waiting = slices.Delete(h.waiting, at, at+1)
		q.turn = append(slices.Delete(q.turn, i, i+1), h)
		return q.start(st, now), true
	}
	return Ask{}, false
}

func (q *Queue) start(st *stream, now time.Time) Ask {
	st.waiting, st.id = false, q.opt.NextID()
	st.answerBy = now.Add(q.opt.AnswerWithin)
	st.host.inFlight++
	q.flights[st.id] = st
	st.pause = min(max(2*st.pause, q.opt.Pause), q.opt.LongestPause)
	st.notBefore = now.Add(st.pause + time.Duration(q.rng.Int64N(int64(st.pause)/4+1)))
	return Ask{Stream{st.host.name, st.index}, st.id, st.reason}
}

// expire wants again what was not answered in time.
func (q *Queue) expire(now time.Time) {
	var late []*stream
	for _, st := range q.flights {
		if !st.answerBy.After(now) {
			late = append(late, st)
		}
	}
	slices.SortFunc(late, func(a, b *stream) int { return cmp.Compare(a.id, b.id) })
	for _, st := range late {
		q.land(st)
		q.wait(st)
	}
}

func (q *Queue) land(st *stream) {
	delete(q.flights, st.id)
	st.host.inFlight--
	st.id = 0
}

// Progress notes a part of an answer that came for a stream. It reports false for
// a pull that is not under way, or is of another stream: the number of a pull is
// easily guessed, and who guesses it must not keep another's from being repeated.
func (q *Queue) Progress(s Stream, id uint32, now time.Time) bool {
	st := q.flights[id]
	if st == nil || st.host.name != s.Host || st.index != s.Index {
		return false
	}
	st.answerBy = now.Add(q.opt.AnswerWithin)
	return true
}

// Answered notes the end of an answer. helped says that the stream is whole
// now; one that is not, its caller wants again. It reports false for a pull that
// is not under way.
func (q *Queue) Answered(id uint32, helped bool) bool {
	st := q.flights[id]
	if st == nil {
		return false
	}
	q.land(st)
	if helped {
		st.pause = 0
	}
	return true
}

// Drop forgets a host: its lane is gone, and its next one asks again.
func (q *Queue) Drop(name string) {
	h := q.hosts[name]
	if h == nil {
		return
	}
	for _, st := range h.streams {
		if st.id != 0 {
			q.land(st)
		}
	}
	q.streams -= len(h.streams)
	delete(q.hosts, name)
	q.turn = slices.DeleteFunc(q.turn, func(o *host) bool { return o == h })
}

// Due is when Next may have something although nothing was told meanwhile; ok is
// false for never.
func (q *Queue) Due() (due time.Time, ok bool) {
	sooner := func(t time.Time) {
		if !ok || t.Before(due) {
			due, ok = t, true
		}
	}
	for _, st := range q.flights {
		sooner(st.answerBy)
	}
	if len(q.flights) >= q.opt.InFlight {
		return due, ok
	}
	for _, h := range q.turn {
		if h.inFlight >= q.opt.PerHost {
			continue
		}
		for _, st := range h.waiting {
			sooner(st.notBefore)
		}
	}
	return due, ok
}

// Counts are the pulls under way, and the streams that wait for theirs.
func (q *Queue) Counts() (inFlight, waiting int) {
	for _, h := range q.turn {
		waiting += len(h.waiting)
	}
	return len(q.flights), waiting
}
