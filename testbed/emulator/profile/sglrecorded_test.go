package profile

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"waypost/testbed/emulator/internal/recording"

	"github.com/google/go-cmp/cmp"
)

const sglPage, sglPool = 16, 2048 / 16

// sglRun replays the requests of a recording through a cache, in their order,
// and gives the events of each with what was found.
func sglRun(t *testing.T, dir fs.FS, name string) (want, got []string, told []event) {
	t.Helper()
	s, err := recording.Load(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	depth := map[uint64]int{}
	var events []event
	c := newSGLCache(sglPage, sglPool, true, func(e event) { events = append(events, e) })
	at := 0
	for i, r := range s.Requests {
		until := 1e18
		if i+1 < len(s.Requests) {
			until = s.Requests[i+1].SentSeconds
		}
		var batches []recording.Batch
		for ; at < len(s.Batches) && s.Batches[at].AtSeconds < until; at++ {
			if b := s.Batches[at]; b.AtSeconds >= r.SentSeconds {
				batches = append(batches, b)
			}
		}
		// The answer's tokens are those that its stores show.
		all := make([]uint32, r.PromptTokens+r.Completion)
		line := fmt.Sprintf("%d cached %d", i, r.Cached)
		for _, b := range batches {
			for _, e := range b.Events {
				if e.Type == "BlockStored" {
					start := 0
					if e.HasParent {
						start = depth[e.Parent]
					}
					copy(all[start:], e.Tokens)
					for k, h := range e.Hashes {
						depth[h] = start + (k+1)*sglPage
					}
				}
				line += "\n " + describeRecorded(e)
			}
		}
		copy(all, r.Prompt)
		want = append(want, line)

		events = nil
		h, ok := c.begin(r.Salt, r.Salt, all[:r.PromptTokens], 0)
		if !ok {
			t.Fatalf("%s: request %d does not fit", name, i)
		}
		c.keep(&h, all[:r.PromptTokens])
		for n := r.PromptTokens; n < len(all)-1; n++ {
			if !c.grow(&h, n) {
				t.Fatalf("%s: request %d outgrows the pool", name, i)
			}
		}
		c.end(&h, all)
		told = append(told, events...)
		line = fmt.Sprintf("%d cached %d", i, h.cached)
		for _, e := range events {
			line += "\n " + describe(e)
		}
		got = append(got, line)
	}
	return want, got, told
}

func describeRecorded(e recording.Event) string {
	s := e.Type
	for _, h := range e.Hashes {
		s += fmt.Sprintf(" %d", int64(h))
	}
	if e.HasParent {
		s += fmt.Sprintf(" after %d", int64(e.Parent))
	}
	return s + fmt.Sprintf(" %v", e.Tokens)
}

func describe(e event) string {
	s := e.op.String()
	for _, h := range e.hashes {
		s += fmt.Sprintf(" %d", h.first64())
	}
	if e.parent != nil {
		s += fmt.Sprintf(" after %d", e.parent.first64())
	}
	return s + fmt.Sprintf(" %v", e.tokens)
}

// sglRecordings are the recordings at hand: two ship with the source, the others
// lie where all full recordings do.
func sglRecordings(t *testing.T) map[string]fs.FS {
	t.Helper()
	out := map[string]fs.FS{"sglang-salt": os.DirFS("testdata"), "sglang-evict": os.DirFS("testdata")}
	shared, err := recording.Shared(".")
	if err != nil {
		t.Logf("only the recordings that ship with the source: %v", err)
		return out
	}
	full := os.DirFS(filepath.Join(shared, "fixtures", "sglang-0.5.23", "open"))
	for _, name := range []string{"two-turns", "salt", "hot-prefix", "evict", "mix-sequential"} {
		out[name] = full
	}
	return out
}

// What a real SGLang published and reused for the same requests: cached tokens,
// hashes, and which pages it gave up when, each as it was.
func TestSGLangRecordings(t *testing.T) {
	for name, dir := range sglRecordings(t) {
		t.Run(name, func(t *testing.T) {
			want, got, _ := sglRun(t, dir, name)
			for i := range want {
				if want[i] != got[i] {
					t.Fatalf("request %d (-engine +emulator):\n%s", i, cmp.Diff(strings.Split(want[i], "\n"), strings.Split(got[i], "\n")))
				}
			}
		})
	}
}

// The batches that the real engine sent, byte for byte.
func TestSGLangBytes(t *testing.T) {
	for name, dir := range sglRecordings(t) {
		t.Run(name, func(t *testing.T) {
			s, err := recording.Load(dir, name)
			if err != nil {
				t.Fatal(err)
			}
			_, _, events := sglRun(t, dir, name)
			for i, b := range s.Batches {
				if i == 0 && b.Events[0].Type == "AllBlocksCleared" {
					events = append([]event{{op: opCleared}}, events...)
				}
				n := len(b.Events)
				if got := sglBatch(SGMap, events[:n], b.Time, b.Rank); !bytes.Equal(got, b.Payload) {
					t.Fatalf("batch %d: %x, the engine sent %x", b.Seq, got, b.Payload)
				}
				events = events[n:]
			}
		})
	}
}

// The older layouts, as they were written by the engine's own code.
func TestSGLangLayouts(t *testing.T) {
	d := func(b ...byte) (d digest) {
		copy(d[:], b)
		return d
	}
	stored := event{op: opStored, hashes: []digest{d(0xd6)}, tokens: []uint32{1, 128000}, pageSize: 2}
	all := []event{stored, {op: opRemoved, hashes: []digest{d(0xd6)}}, {op: opCleared}}
	for _, test := range []struct {
		layout SGLayout
		want   string
	}{
		{SGArray6, "92cb41da22faa02000009396ab426c6f636b53746f72656491d3d600000000000000c09201ce0001f40002c092ac426c6f636b52656d6f76656491d3d60000000000000091b0416c6c426c6f636b73436c6561726564"},
		{SGRanked, "93cb41da22faa02000009396ab426c6f636b53746f72656491d3d600000000000000c09201ce0001f40002c092ac426c6f636b52656d6f76656491d3d60000000000000091b0416c6c426c6f636b73436c656172656400"},
		{SGMedium, "93cb41da22faa02000009397ab426c6f636b53746f72656491d3d600000000000000c09201ce0001f40002c0a347505593ac426c6f636b52656d6f76656491d3d600000000000000a347505591b0416c6c426c6f636b73436c656172656400"},
	} {
		if got := fmt.Sprintf("%x", sglBatch(test.layout, all, 1754000000.5, 0)); got != test.want {
			t.Errorf("layout %d: %s, want %s", test.layout, got, test.want)
		}
	}
	salted := stored
	salted.salt, salted.hashes = "tenant-7", []digest{d(0, 0, 0, 0, 0, 0, 0, 7)}
	if got, want := fmt.Sprintf("%x", sglArray(nil, SGSalted, &salted)), "98ab426c6f636b53746f7265649107c09201ce0001f40002c0a347505581aa63616368655f73616c74a874656e616e742d37"; got != want {
		t.Errorf("salted: %s, want %s", got, want)
	}
}

// Hashes of the reference function with which the engine's own tests compare.
func TestSGLangHashes(t *testing.T) {
	upTo := func(from, to uint32) (out []uint32) {
		for ; from < to; from++ {
			out = append(out, from)
		}
		return out
	}
	for _, test := range []struct {
		page   int
		salt   string
		tokens []uint32
		want   []int64
	}{
		{16, "", upTo(0, 32), []int64{6738917275443968386, 5080553031686747138}},
		{16, "tenant-7", upTo(0, 32), []int64{-4738586188516808188, -7794174756586210504}},
		{1, "", []uint32{1, 128000}, []int64{7470307888890966271, -1273543200675336331}},
	} {
		var got []int64
		newRadix(test.page, true, sglHash(true), func(e event) {
			for _, h := range e.hashes {
				got = append(got, h.first64())
			}
		}).insert(test.salt, test.salt, test.tokens)
		if d := cmp.Diff(test.want, got); d != "" {
			t.Errorf("page %d, salt %q: %s", test.page, test.salt, d)
		}
	}
}
