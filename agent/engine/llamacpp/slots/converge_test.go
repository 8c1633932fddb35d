package slots

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/ledger"
)

// fault is what goes wrong on the way between a server, its callers and the
// replay, in the first part of a run.
type fault struct {
	// lateMs is how late what is told comes at most.
	lateMs int
	// noClaim, noEnd and untold are the shares of requests whose beginning or
	// end is never told, and of those that nobody knows of.
	noClaim, noEnd, untold float64
	// noTask says that the pages name neither prompts nor requests.
	noTask bool
	// texts is the share of requests of which a part is known only while they
	// run, noIDs that of those whose ids never come.
	texts, noIDs float64
	// viewMs is how old the view is at most of which a caller is promised.
	viewMs int
	// settles says that a caller goes on when its request's end was told.
	settles bool
}

// scene is callers at a server, and a replay that is told of them.
type scene struct {
	t       interface{ Fatalf(string, ...any) }
	rng     *rand.Rand
	server  *server
	replay  *Replay
	told    *mirror
	fault   fault
	now     int // ms
	events  eventQueue
	n       uint64
	streams [2]int // when what a coordinator told last arrives
	chats   map[int][]uint32

	measured bool
	// loose says that system texts end between two points, are common to all
	// callers, and what follows them may begin alike; quick divides what requests
	// and callers take.
	loose                bool
	quick                int
	prompts, reused      int
	promised, over, kept int
}

type event struct {
	at, order int
	do        func()
}

type eventQueue []event

func (q eventQueue) Len() int { return len(q) }
func (q eventQueue) Less(i, k int) bool {
	return q[i].at < q[k].at || q[i].at == q[k].at && q[i].order < q[k].order
}
func (q eventQueue) Swap(i, k int) { q[i], q[k] = q[k], q[i] }
func (q *eventQueue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *eventQueue) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

func (s *scene) after(ms int, do func()) {
	s.n++
	heap.Push(&s.events, event{s.now + ms, int(s.n), do})
}

// tell delivers what a coordinator tells, in its order.
func (s *scene) tell(coordinator int, do func()) {
	at := max(s.streams[coordinator], s.now+2+s.rng.IntN(1+s.fault.lateMs))
	s.streams[coordinator] = at
	s.after(at-s.now, do)
}

// look is a page of the server, which arrives some time later.
func (s *scene) look() {
	page := s.server.page()
	if s.fault.noTask {
		for i := range page {
			page[i].Prompt, page[i].Task = 0, 0
		}
	}
	s.after(s.rng.IntN(1+s.fault.lateMs/2), func() { s.replay.Observe(page) })
	s.after(500, s.look)
}

// request sends one turn of a chat; then is called at its end.
func (s *scene) request(chat int, then func()) {
	prompt := s.chats[chat]
	if len(prompt) == 0 || len(prompt) > 2400 {
		if prompt = text(fmt.Sprintf("sys%d", chat%3), 256); s.loose {
			prompt = append(text(fmt.Sprintf("sys%d", (chat+chat/3)%3), 266), text("first words", s.rng.IntN(12))...)
		}
		prompt = append(prompt, s.words(300+s.rng.IntN(900))...)
	} else {
		prompt = append(prompt[:len(prompt):len(prompt)], s.words(20+s.rng.IntN(200))...)
	}
	output := s.words(2 + s.rng.IntN(30))
	s.chats[chat] = append(prompt[:len(prompt):len(prompt)], output...)

	promised := s.told.match(prompt)
	if promised <= len(prompt)/10 {
		promised = 0 // as a coordinator takes it
	}
	s.after(s.rng.IntN(1+s.fault.viewMs), func() { s.send(chat, prompt, output, promised, then) })
}

// send sends a request of which so much was promised.
func (s *scene) send(chat int, prompt, output []uint32, promised int, then func()) {
	measured := s.measured
	s.n++
	id := ledger.ClaimID{Coordinator: uint64(chat % 2), Seq: s.n}
	untold := s.rng.Float64() < s.fault.untold
	if !untold && s.rng.Float64() >= s.fault.noClaim {
		keys, known, guess := keysOf(prompt), 0, len(prompt)
		if text := s.rng.Float64() < s.fault.texts; text {
			known, guess = s.rng.IntN(len(keys)), len(prompt)+s.rng.IntN(400)-200
		} else {
			known = len(keys)
		}
		s.tell(chat%2, func() { s.replay.Begin(id, keys[:known], max(guess, known*ledger.PointTokens), -1) })
		if known < len(keys) && s.rng.Float64() >= s.fault.noIDs {
			s.tell(chat%2, func() { s.replay.Learn(id, keys, len(prompt)) })
		}
	}
	s.after(3+s.rng.IntN(1+s.fault.lateMs/4), func() {
		t := s.server.arrive(prompt, output)
		var run func()
		run = func() {
			if t.slot < 0 {
				s.after(5, run)
				return
			}
			ms := (20 + (len(prompt)-t.reused)/8) / s.quick
			s.after(ms, func() {
				s.server.generate(t, 1)
				s.after(5*len(output)/s.quick, func() {
					s.server.finish(t)
					next := func() { s.after(5+s.rng.IntN(120/s.quick), then) }
					if !untold && s.rng.Float64() >= s.fault.noEnd {
						s.tell(chat%2, func() {
							s.replay.Done(id, len(output), t.reused)
							if s.fault.settles {
								next()
							}
						})
					} else if s.fault.settles {
						next()
					}
					if measured {
						s.prompts += len(prompt)
						s.reused += t.reused
						s.promised += promised
						s.over += max(0, promised-t.reused)
						s.kept += min(promised, t.reused)
					}
					if !s.fault.settles {
						next()
					}
				})
			})
		}
		run()
	})
}

func (s *scene) words(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = s.rng.Uint32()
	}
	return out
}

// run lets callers send so many requests each, over chats of their own.
func (s *scene) run(callers, requests, chats int) {
	left := callers
	for k := range callers {
		done := 0
		var next func()
		next = func() {
			if done++; done > requests {
				left--
				return
			}
			s.request(k+callers*s.rng.IntN(1+s.rng.IntN(chats)), next)
		}
		next()
	}
	s.until(func() bool { return left == 0 })
}

// touch sends a request of each chat, one after the other.
func (s *scene) touch(chats int) {
	at, done := 0, false
	var next func()
	next = func() {
		if at == chats {
			done = true
			return
		}
		at++
		s.request(at-1, next)
	}
	next()
	s.until(func() bool { return done })
}

func (s *scene) until(over func() bool) {
	for !over() {
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		entries, changes := slices.Clone(s.replay.cache.entries), s.replay.cache.changes
		e.do()
		if c := &s.replay.cache; c.changes == changes && !slices.Equal(c.entries, entries) {
			s.t.Fatalf("the host cache was changed without being counted")
		}
	}
}

// calm ends what goes wrong, once all that was told has arrived.
func (s *scene) calm() {
	until := s.now + 2*s.fault.lateMs
	s.fault = fault{lateMs: 2, noTask: s.fault.noTask, texts: s.fault.texts}
	s.until(func() bool { return s.now >= until })
}

// newScene makes a server and a replay that follows it, which does not know
// whether the slots share a buffer.
func newScene(t interface{ Fatalf(string, ...any) }, seed uint64, slots, hostTokens int, shared bool) *scene {
	s := &scene{t: t, rng: rand.New(rand.NewPCG(5, seed)), server: newServer(slots, hostTokens, shared), quick: 1, chats: map[int][]uint32{}}
	s.told = newMirror(t)
	s.replay = New(Options{Slots: slots, HostTokens: hostTokens, HostKnown: true, Listener: s.told})
	s.told.replay = s.replay
	return s
}

func (s *scene) recall() float64  { return share(s.kept, s.reused) }
func (s *scene) tooMany() float64 { return share(s.over, s.prompts) }

// troubled is a server of which much went wrong on the way.
type troubled struct {
	host           int // tokens
	shared         bool
	seed           uint64
	slots, callers int
	fault          fault
}

// comesBack is the troubled server's scene once all is quiet again. Now and then one
// takes longer: the order of what a full host cache holds may be another, so that what
// was let go of a moment before is promised, and a limit that was doubted for what
// nobody told of grows again step by step.
func (c troubled) comesBack(t interface{ Fatalf(string, ...any) }) *scene {
	s := newScene(t, c.seed, c.slots, c.host, c.shared)
	s.fault = c.fault
	s.look()
	s.run(c.callers, 12, 3)
	s.calm()
	// The first turn of a chat tells what it is, the second drives out of the
	// host cache what nobody knows of.
	s.touch(12)
	s.touch(12)
	s.measured = true
	s.run(1, 200, 12)
	least, most := .9, .02
	if c.host == 0 {
		least = .85 // which slot was overwritten is often known only by the next page
	}
	if s.recall() < least || s.tooMany() > most || s.reused == 0 {
		t.Fatalf("%.2f %% of %d reused tokens found, %.2f %% of %d prompt tokens too many", 100*s.recall(), s.reused, 100*s.tooMany(), s.prompts)
	}
	return s
}

// The view of a server comes back by itself: whatever was late, lost or told by
// nobody, and whichever way things overtook each other, some quiet requests later
// nearly all that the server reuses is expected again, and next to nothing more.
func TestViewComesBack(t *testing.T) {
	var sum scene
	rapid.Check(t, func(t *rapid.T) {
		host := rapid.SampledFrom([]int{0, 23_000, 1 << 20}).Draw(t, "host")
		part := rapid.SampledFrom([]float64{0, .05, .2})
		s := troubled{
			host: host, shared: host > 0 && rapid.Bool().Draw(t, "shared"),
			seed: rapid.Uint64().Draw(t, "seed"), slots: rapid.IntRange(2, 6).Draw(t, "slots"),
			fault: fault{
				lateMs: rapid.SampledFrom([]int{8, 100, 600, 1500}).Draw(t, "late"), noClaim: part.Draw(t, "no claim"), noEnd: part.Draw(t, "no end"),
				untold: part.Draw(t, "untold"), noTask: rapid.Bool().Draw(t, "no task"),
				texts: rapid.SampledFrom([]float64{0, .3, 1}).Draw(t, "texts"), noIDs: rapid.SampledFrom([]float64{0, .3, 1}).Draw(t, "no ids"),
			},
			callers: rapid.IntRange(1, 6).Draw(t, "callers"),
		}.comesBack(t)
		sum.prompts, sum.reused, sum.over, sum.kept = sum.prompts+s.prompts, sum.reused+s.reused, sum.over+s.over, sum.kept+s.kept
	})
	if text := fmt.Sprintf("all together: %.2f %% found, %.3f %% too many", 100*sum.recall(), 100*sum.tooMany()); sum.recall() < .97 || sum.tooMany() > .001 {
		t.Error(text)
	} else {
		t.Log(text)
	}
}

// A text of which no more than the system prompt was ever known stays idle in a
// slot: the server saves it anew whenever its host cache lets go of it, though
// every other chat begins as it does.
func TestViewComesBackBesideAPartlyKnownText(t *testing.T) {
	troubled{
		host: 23_000, seed: 0x1abd, slots: 6, callers: 6,
		fault: fault{lateMs: 8, untold: .2, noTask: true, texts: .3, noIDs: .3},
	}.comesBack(t)
}

// Callers at once are promised what a request gets that comes after those that are
// on their way: the host cache is full, so the oldest of what it holds goes with
// every request, and what others' requests left is copied there between a promise
// and its request. The scenes are drawn once and for all.
func TestCallersAtOnceAreNotPromisedTooMuch(t *testing.T) {
	if testing.Short() {
		t.Skip("left out with -short: dozens of scenes")
	}
	const scenes = 20
	for _, c := range []struct {
		shared bool
		lateMs int
		most   float64
	}{{false, 8, .0025}, {false, 100, .01}, {true, 8, .0025}, {true, 100, .01}} {
		expectOfCallers(t, fmt.Sprintf("shared %v, %d ms late", c.shared, c.lateMs), scenes, 4, .95, c.most, func(seed uint64) *scene {
			s := newScene(t, seed, 4, 23_000, c.shared)
			s.fault = fault{lateMs: c.lateMs, viewMs: c.lateMs, settles: true}
			return s
		})
	}
}

// expectOfCallers runs scenes of so many callers, after one has shown the server
// what there is: of the tokens that are reused the least share is found, and at most
// a share of the prompts' tokens is promised in vain.
func expectOfCallers(t *testing.T, name string, scenes, callers int, least, most float64, made func(seed uint64) *scene) {
	t.Helper()
	var sum scene
	for seed := range uint64(scenes) {
		s := made(seed)
		s.look()
		s.run(1, 60, 14)
		s.measured = true
		s.run(callers, 30, 6)
		sum.prompts, sum.reused, sum.over, sum.kept = sum.prompts+s.prompts, sum.reused+s.reused, sum.over+s.over, sum.kept+s.kept
	}
	text := fmt.Sprintf("%s: %.2f %% of %d reused tokens found, %.2f %% of %d prompt tokens too many", name, 100*sum.recall(), sum.reused, 100*sum.tooMany(), sum.prompts)
	t.Log(text)
	if sum.recall() < least || sum.tooMany() > most {
		t.Errorf("%s; wanted at least %.2f %% and at most %.2f %%", text, 100*least, 100*most)
	}
}

// Without a host cache what a request overwrites is lost. With more callers than
// slots those that wait take every slot that gets idle, so nothing is promised; with
// fewer most is. As many callers as slots are between: a request that reaches
// the server between a promise and its request takes what was promised.
func TestCallersAtOnceWithoutAHostCache(t *testing.T) {
	if testing.Short() {
		t.Skip("left out with -short: dozens of scenes")
	}
	for _, c := range []struct {
		callers, lateMs int
		least, most     float64
	}{{2, 8, .9, .005}, {4, 8, .7, .0125}, {6, 8, 0, .01}, {6, 100, 0, .01}} {
		expectOfCallers(t, fmt.Sprintf("%d callers, %d ms late", c.callers, c.lateMs), 10, c.callers, c.least, c.most, func(seed uint64) *scene {
			s := newScene(t, seed, 4, 0, false)
			s.fault = fault{lateMs: c.lateMs, viewMs: c.lateMs, settles: true}
			return s
		})
	}
}

// Where what lies between two points decides which slot a request goes to, or which
// of two slots became idle first, what either held is promised no more until the
// server's word tells which it was, or what the request reused does.
func TestSlotsThatMayBeTaken(t *testing.T) {
	if testing.Short() {
		t.Skip("left out with -short: dozens of scenes")
	}
	for _, c := range []struct {
		callers, quick int
		least, most    float64
	}{{1, 1, .95, .001}, {1, 3, .95, .001}, {2, 1, .9, .01}, {3, 1, .7, .01}, {4, 1, .7, .01}} {
		expectOfCallers(t, fmt.Sprintf("%d callers, %d times as quick", c.callers, c.quick), 10, c.callers, c.least, c.most, func(seed uint64) *scene {
			s := newScene(t, seed, 4, 0, false)
			s.loose, s.quick = true, c.quick
			s.fault = fault{lateMs: 8, viewMs: 8, settles: true}
			return s
		})
	}
}

// Requests whose ids never come are known by their lengths alone: less is found
// the more of them there are, and next to nothing is promised in vain. The scenes
// are drawn once and for all: nothing was, and a percent more was found.
func TestTextsWithoutIDs(t *testing.T) {
	for _, host := range []int{23_000, 1 << 20} {
		for share, least := range map[float64]float64{.05: .95, .3: .86, 1: .58} {
			s := newScene(t, 1, 4, host, false)
			s.fault = fault{lateMs: 8, texts: share, noIDs: 1}
			s.look()
			s.run(3, 20, 3)
			s.measured = true
			s.run(3, 150, 3)
			if s.recall() < least || s.tooMany() > .001 || s.reused == 0 {
				t.Errorf("host cache of %d tokens, %.0f %% texts: %.1f %% of %d reused tokens found, %.2f %% of the prompts' too many", host, 100*share, 100*s.recall(), s.reused, 100*s.tooMany())
			}
		}
	}
}
