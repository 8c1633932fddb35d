package coordinator

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/events"
	waypostv1 "waypost/proto/waypost/v1"
)

// The kinds that can be watched.
const (
	kindWorkers = "workers"
	kindMembers = "members"
	kindFleet   = "fleet"
	kindEvents  = "events"
	// kindSynced and kindRestart are signs about the stream.
	kindSynced  = "synced"
	kindRestart = "restart"
)

var watchKinds = []string{kindWorkers, kindMembers, kindFleet, kindEvents}

const (
	// lookEvery is how often what is watched is compared with what was told, and
	// lookOld how old the look of another watcher may be to serve as well.
	lookEvery = 500 * time.Millisecond
	lookOld   = lookEvery / 2
	// keptGone bounds the names of a kind that are remembered to be gone.
	keptGone    = 4096
	maxWatching = 64
)

// board is what watchers are told from: the newest state of each thing with the
// place in the stream at which it became so. A slow watcher finds what changed
// since its place, however often it did; it costs no memory.
type board struct {
	c      *Coordinator
	events events.Ring
	// rev is the last place given.
	rev      atomic.Uint64
	watching atomic.Int32

	mu    sync.Mutex
	kinds map[string]*kindState
}

// kindState is all things of one kind by name.
type kindState struct {
	looked time.Time // when they were last compared; zero: never
	things map[string]*thing
	// gone are names by the place at which they went, lost the newest of those
	// that are forgotten.
	gone []gone
	lost uint64
}

type thing struct {
	rev uint64
	// told is what all watchers get, same what decides whether it is another.
	told *waypostv1.WatchResponse
	same proto.Message
}

type gone struct {
	name string
	rev  uint64
}

func newBoard(c *Coordinator) *board {
	b := &board{c: c, kinds: map[string]*kindState{}}
	for _, k := range watchKinds[:3] {
		b.kinds[k] = &kindState{things: map[string]*thing{}}
	}
	return b
}

func (b *board) next() uint64 { return b.rev.Add(1) }

// keep takes an event of the log.
func (b *board) keep(e *events.Event) { b.events.Add(e, b.next) }

// revText is a place in the stream in words: of which life, and where.
func (b *board) revText(rev uint64) *string {
	return proto.String(fmt.Sprintf("%s.%d", markHex(b.c.process), rev))
}

// parseRev reads a place back; ok is false if it is of another life.
func (b *board) parseRev(s string) (rev uint64, ok bool, err error) {
	life, number, found := strings.Cut(s, ".")
	rev, err = strconv.ParseUint(number, 10, 64)
	if _, lifeErr := strconv.ParseUint(life, 16, 64); !found || err != nil || lifeErr != nil {
		return 0, false, api.BadField("after", fmt.Sprintf("%.80q is no rev that a watch told", s))
	}
	return rev, life == markHex(b.c.process) && rev <= b.rev.Load(), nil
}

// look compares what is with what was told last, unless somebody did so at most a
// time ago: the messages are made once for all who watch.
func (b *board) look(kinds map[string]bool, now time.Time, old time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	due := func(kind string) bool {
		k := b.kinds[kind]
		if !kinds[kind] || !k.looked.IsZero() && now.Sub(k.looked) < old {
			return false
		}
		k.looked = now
		return true
	}
	if due(kindWorkers) {
		state, found := b.c.replica.State(), map[string]bool{}
		for _, w := range b.c.fleet.Workers(now) {
			m := b.c.workerProto(&w, state)
			found[w.Name] = true
			b.put(kindWorkers, w.Name, &waypostv1.WatchResponse{Worker: m}, steadyWorker(m))
		}
		b.sweep(kindWorkers, found)
	}
	if due(kindMembers) {
		found := map[string]bool{}
		for _, m := range b.c.members().GetMembers() {
			found[m.GetName()] = true
			same := proto.CloneOf(m)
			same.SinceMs, same.RttMs = nil, nil
			b.put(kindMembers, m.GetName(), &waypostv1.WatchResponse{Member: m}, same)
		}
		b.sweep(kindMembers, found)
	}
	if due(kindFleet) {
		f := b.c.fleetProto()
		b.put(kindFleet, "", &waypostv1.WatchResponse{Fleet: f}, f)
	}
}

// steadyWorker is a worker without what changes all the time: ages, and what
// fades.
func steadyWorker(w *waypostv1.Worker) *waypostv1.Worker {
	same := proto.CloneOf(w)
	same.UpdatedMs, same.Trust, same.Share = nil, nil, nil
	if l := same.GetLearnt(); l != nil {
		same.Learnt = &waypostv1.Learnt{Breaker: l.Breaker, BiasTokens: l.BiasTokens, Resyncs: l.Resyncs}
	}
	return same
}

// put notes a thing; the lock is held.
func (b *board) put(kind, name string, told *waypostv1.WatchResponse, same proto.Message) {
	k := b.kinds[kind]
	was := k.things[name]
	if was == nil || !proto.Equal(was.same, same) {
		was = &thing{rev: b.next(), same: same}
		k.things[name] = was
	}
	told.Kind, told.Rev = proto.String(kind), b.revText(was.rev)
	was.told = told
}

// sweep notes what is gone; the lock is held.
func (b *board) sweep(kind string, found map[string]bool) {
	k := b.kinds[kind]
	for name := range k.things {
		if !found[name] {
			delete(k.things, name)
			k.gone = append(k.gone, gone{name, b.next()})
		}
	}
	if n := len(k.gone) - keptGone; n > 0 {
		k.lost = k.gone[n-1].rev
		k.gone = slices.Delete(k.gone, 0, n)
	}
}

// news is what changed after a place, in order, and the place after it; whole is
// false if something that changed is forgotten.
func (b *board) news(kinds map[string]bool, after uint64) (out []*waypostv1.WatchResponse, next uint64, whole bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	type at struct {
		rev uint64
		m   *waypostv1.WatchResponse
	}
	var all []at
	next, whole = after, true
	for kind, k := range b.kinds {
		if !kinds[kind] {
			continue
		}
		whole = whole && (after == 0 || after >= k.lost)
		for _, t := range k.things {
			if t.rev > after {
				all = append(all, at{t.rev, t.told})
			}
		}
		for _, g := range k.gone {
			// Who begins needs no word of what is gone.
			if _, back := k.things[g.name]; g.rev > after && after > 0 && !back {
				all = append(all, at{g.rev, &waypostv1.WatchResponse{Kind: proto.String(kind), Rev: b.revText(g.rev), Removed: proto.String(g.name)}})
			}
		}
	}
	if kinds[kindEvents] {
		happened, kept := b.events.After(after)
		whole = whole && (after == 0 || kept)
		for _, e := range happened {
			all = append(all, at{e.Rev, b.eventProto(e)})
		}
	}
	slices.SortFunc(all, func(x, y at) int { return cmp.Compare(x.rev, y.rev) })
	for _, a := range all {
		out, next = append(out, a.m), a.rev
	}
	return out, next, whole
}

func (b *board) eventProto(e *events.Event) *waypostv1.WatchResponse {
	return &waypostv1.WatchResponse{Kind: proto.String(kindEvents), Rev: b.revText(e.Rev), Event: &waypostv1.Event{
		Event: &e.Name, Level: proto.String(e.Level.String()), Message: &e.Message, AgeMs: proto.Float64(max(0, ms(time.Since(e.At)))),
		At: proto.String(e.At.UTC().Format(time.RFC3339)), Fields: e.Fields,
	}}
}

// kindsOf checks what is to be watched.
func kindsOf(list []string) (map[string]bool, error) {
	out := map[string]bool{}
	for _, k := range list {
		if !slices.Contains(watchKinds, k) {
			return nil, api.BadField("kinds", fmt.Sprintf("%.40q: use %s", k, strings.Join(watchKinds, ", ")))
		}
		out[k] = true
	}
	if len(out) == 0 {
		return nil, api.BadField("kinds", "is missing: use "+strings.Join(watchKinds, ", "))
	}
	return out, nil
}

// Watch implements the operator service.
func (o *operators) Watch(req *waypostv1.WatchRequest, stream waypostv1.OperatorService_WatchServer) error {
	b := o.c.board
	kinds, err := kindsOf(req.GetKinds())
	if err != nil {
		return err
	}
	after, known := uint64(0), true
	if req.After != nil {
		if after, known, err = b.parseRev(req.GetAfter()); err != nil {
			return err
		}
	}
	defer b.watching.Add(-1)
	if b.watching.Add(1) > maxWatching {
		return status.Error(codes.ResourceExhausted, "too many watch this coordinator already; ask another one")
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	// Who begins sees what is at that moment.
	old := time.Duration(0)
	for synced := false; ; old = lookOld {
		b.look(kinds, time.Now(), old)
		list, next, whole := b.news(kinds, after)
		if !known || !whole {
			known, synced, after = true, false, 0
			if err := stream.Send(&waypostv1.WatchResponse{Kind: proto.String(kindRestart)}); err != nil {
				return err
			}
			continue
		}
		for _, m := range list {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		after = next
		if !synced {
			synced = true
			if err := stream.Send(&waypostv1.WatchResponse{Kind: proto.String(kindSynced), Rev: b.revText(after)}); err != nil {
				return err
			}
		}
		select {
		case <-o.c.ctx.Done():
			return api.Unavailable("this coordinator stops; watch another one")
		case <-stream.Context().Done():
			return nil
		case <-tick.C:
		}
	}
}
