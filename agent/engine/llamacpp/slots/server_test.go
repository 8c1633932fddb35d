package slots

import "slices"

// server is a model of a llama.cpp server's caches, made from its published
// rules over whole token sequences. It shares no code with the replay.
type server struct {
	shared bool
	// hostTokens is what the host cache holds; 0: there is none.
	hostTokens int
	slots      []serverSlot
	entries    [][]uint32
	deferred   []*serverTask
	clock      int
	tasks      uint64
}

type serverSlot struct {
	content []uint32
	task    *serverTask // nil: idle
	last    uint64      // the name of the latest task; 0: never used
	release int         // order of the ends; -1: never
}

// serverTask is a request at the server.
type serverTask struct {
	prompt, output []uint32
	name           uint64
	slot           int
	// reused is how much of the prompt was there; -1: it waits.
	reused int
	// generated is how much of the output is there.
	generated int
}

func newServer(n, hostTokens int, shared bool) *server {
	s := &server{shared: shared, hostTokens: hostTokens, slots: make([]serverSlot, n)}
	for i := range s.slots {
		s.slots[i].release = -1
	}
	return s
}

func prefixLen(a, b []uint32) (n int) {
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// arrive takes a request in.
func (s *server) arrive(prompt, output []uint32) *serverTask {
	s.tasks += 2 // questions about the slots have names, too
	t := &serverTask{prompt: prompt, output: output, name: s.tasks, slot: -1, reused: -1}
	if !s.start(t) {
		s.deferred = append(s.deferred, t)
	}
	return t
}

func (s *server) start(t *serverTask) bool {
	at, most := -1, 0.1
	for i := range s.slots {
		if c := &s.slots[i]; c.task == nil && len(c.content) > 0 {
			if similar := float64(prefixLen(c.content, t.prompt)) / float64(len(t.prompt)); similar > most {
				at, most = i, similar
			}
		}
	}
	update := at >= 0 && float64(prefixLen(s.slots[at].content, t.prompt)) < 0.5*float64(len(s.slots[at].content))
	if at < 0 {
		for i := range s.slots {
			if s.slots[i].task == nil && (at < 0 || s.slots[i].release <= s.slots[at].release) {
				at = i
			}
		}
		if at < 0 {
			return false
		}
		update = true
	}
	c := &s.slots[at]
	if update && s.hostTokens > 0 {
		s.save(c.content)
		s.load(c, t.prompt)
	}
	t.reused = min(prefixLen(c.content, t.prompt), len(t.prompt)-1)
	t.slot = at
	c.task, c.last, c.content = t, t.name, t.prompt
	if s.hostTokens > 0 {
		for i := range s.slots {
			if idle := &s.slots[i]; idle.task == nil {
				s.save(idle.content)
				if s.shared {
					idle.content = nil
				}
			}
		}
	}
	return true
}

func (s *server) save(content []uint32) {
	if len(content) == 0 || len(content) > s.hostTokens {
		return
	}
	for _, e := range s.entries {
		if prefixLen(e, content) == len(content) {
			return
		}
	}
	s.entries = slices.DeleteFunc(s.entries, func(e []uint32) bool { return prefixLen(e, content) == len(e) })
	s.entries = append(s.entries, content)
	sum := 0
	for _, e := range s.entries {
		sum += len(e)
	}
	for sum > s.hostTokens {
		sum -= len(s.entries[0])
		s.entries = s.entries[1:]
	}
}

func (s *server) load(c *serverSlot, prompt []uint32) {
	n := prefixLen(c.content, prompt)
	kept, found := -1., float64(n)/float64(len(prompt))
	if len(c.content) > 0 {
		kept = float64(n) / float64(len(c.content))
	}
	best := -1
	for i, e := range s.entries {
		n := float64(prefixLen(e, prompt))
		k, f := n/float64(len(e)), n/float64(len(prompt))
		if k >= 0.25 && k > kept && f > found {
			kept, found, best = k, f, i
		}
	}
	if best >= 0 {
		c.content = s.entries[best]
		s.entries = slices.Delete(s.entries, best, best+1)
	}
}

// generate makes some of the answer of a task that has a slot.
func (s *server) generate(t *serverTask, n int) { t.generated = min(t.generated+n, len(t.output)-1) }

// finish ends a task that has a slot and starts the next that waits.
func (s *server) finish(t *serverTask) {
	c := &s.slots[t.slot]
	// The last token that is sampled is not computed any more.
	c.content = slices.Concat(t.prompt, t.output[:len(t.output)-1])
	s.clock++
	c.task, c.release = nil, s.clock
	if len(s.deferred) > 0 && s.start(s.deferred[0]) {
		s.deferred = s.deferred[1:]
	}
}

// page is what the server tells of its slots.
func (s *server) page() []Seen {
	out := make([]Seen, len(s.slots))
	for i := range s.slots {
		c := &s.slots[i]
		out[i] = Seen{Tokens: len(c.content), Task: c.last}
		switch {
		case c.last == 0:
			out[i].Tokens = -1
		case c.task != nil:
			out[i].Busy, out[i].Tokens = true, len(c.task.prompt)+c.task.generated
			if c.task.generated > 0 {
				out[i].Prompt = len(c.task.prompt)
			}
		}
	}
	return out
}
