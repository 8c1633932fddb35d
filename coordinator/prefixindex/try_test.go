package prefixindex

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"waypost/gossip/prefix"
)

// What is found while slots change hands is no answer, and a search that never
// finds one waits for the change to end rather than give what it knows to be
// doubtful.
func TestSearchesWaitForTheEndOfAChange(t *testing.T) {
	x, k := New(Options{}), line(512)
	add(x.WorkerSink(1), k)
	var p prefix.Probe
	k.probe(&p, 16)
	s := x.NewSearcher()
	if !s.try(&p) || len(s.groups) != 1 {
		t.Fatalf("%d groups", len(s.groups))
	}
	x.writer.Lock()
	x.slots.version.Add(1)
	if s.try(&p) {
		t.Error("an answer in the middle of a change is taken")
	}
	done := make(chan []Group, 1)
	go func() { done <- s.Search(&p) }()
	waits := func() bool {
		stacks := make([]byte, 1<<20)
		for one := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(one, "sync.Mutex.Lock") && strings.Contains(one, "(*Searcher).Search(") {
				return true
			}
		}
		return false
	}
	for began := time.Now(); !waits(); time.Sleep(time.Millisecond) {
		if len(done) > 0 || time.Since(began) > 30*time.Second {
			t.Error("a search does not wait for the end of a change")
			break
		}
	}
	x.slots.version.Add(1)
	x.writer.Unlock()
	if groups := <-done; len(groups) != 1 {
		t.Errorf("%d groups after the change", len(groups))
	}
}
