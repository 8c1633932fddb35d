package registry

import (
	"bytes"
	"crypto/sha256"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// drawBody makes commands over few names, so that they meet each other.
func drawBody(t *rapid.T) Body {
	host := rapid.SampledFrom([]string{"gpu-01", "gpu-02", "gpu-01/vllm-8000", "gpu-01/vllm-8000/0", "GPU-8a1f0000-0000-0000-0000-000000000001"}).Draw(t, "selector")
	id := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "id")
	switch rapid.IntRange(0, 6).Draw(t, "kind") {
	case 0:
		return InitCluster{id, "default"}
	case 1:
		text := rapid.SampledFrom([]string{"", "# a", "[policy]\nobjective = \"throughput\"\n", "[[pool]]\nname = \"p\"\nmodel = \"m\"\n"}).Draw(t, "toml")
		return PutFleet{text, uint32(rapid.IntRange(0, 6).Draw(t, "base")), id}
	case 2:
		return SetCordon{Selector: host, Reason: id, Drain: rapid.Bool().Draw(t, "drain")}
	case 3:
		return RemoveCordon{Selector: host}
	case 4:
		address := rapid.SampledFrom([]string{"h1:1", "h2:1", "h3:1"}).Draw(t, "address")
		return RegisterCoordinator{ID: id, Name: "n" + id, ClusterAddress: address, Voter: rapid.Bool().Draw(t, "voter")}
	case 5:
		return RemoveCoordinator{id}
	}
	return SetFeatureLevel{1}
}

// TestReplicasAgree: the same commands give the same state on every replica,
// whenever it was restored from a snapshot, and the same answers; states that
// readers hold do not change; a revision moves if and only if the result says
// that something changed.
func TestReplicasAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := Empty(), Empty()
		type held struct {
			state *State
			hash  [sha256.Size]byte
		}
		var readers []held
		for range rapid.IntRange(1, 60).Draw(t, "commands") {
			// Few request ids: retries, and ids used for something else, occur.
			id := rapid.StringMatching(`[a-z]{1,2}`).Draw(t, "request")
			cmd, err := Encode(stamp(id), drawBody(t))
			if err != nil {
				t.Fatal(err)
			}
			if rapid.IntRange(0, 9).Draw(t, "damage") == 0 {
				cmd = cmd[:rapid.IntRange(0, len(cmd)-1).Draw(t, "cut")]
			}
			readers = append(readers, held{a, a.Hash()})
			if rapid.IntRange(0, 4).Draw(t, "restore") == 0 {
				bytesOfB := b.AppendSnapshot(nil)
				if b, err = DecodeSnapshot(bytesOfB); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(b.AppendSnapshot(nil), bytesOfB) {
					t.Fatal("a restored state has another snapshot")
				}
			}
			before := a.Revision()
			var ra, rb Result
			a, ra = a.Apply(cmd)
			b, rb = b.Apply(cmd)
			if d := cmp.Diff(ra, rb); d != "" {
				t.Fatalf("answers differ: %s", d)
			}
			if moved := a.Revision() != before; moved != (ra.Changed && !ra.Duplicate) {
				t.Fatalf("revision %d → %d, result %+v", before, a.Revision(), ra)
			}
			if a.Hash() != b.Hash() {
				t.Fatal("states differ")
			}
		}
		for i, r := range readers {
			if r.state.Hash() != r.hash {
				t.Fatalf("the state after %d commands changed later", i)
			}
		}
		checkInvariants(t, a)
	})
}

func checkInvariants(t *rapid.T, s *State) {
	numbers, ids, names, addresses := map[uint32]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, c := range s.Coordinators() {
		if numbers[c.Number] || ids[c.ID] || names[c.Name] || addresses[c.ClusterAddress] {
			t.Fatalf("catalogue holds something twice: %+v", s.Coordinators())
		}
		numbers[c.Number], ids[c.ID], names[c.Name], addresses[c.ClusterAddress] = true, true, true, true
	}
	if s.FleetProblem() != nil {
		t.Fatalf("a file that was checked cannot be read: %v", s.FleetProblem())
	}
	for _, c := range s.Cordons() {
		sel, err := ParseSelector(c.Selector)
		if err != nil {
			t.Fatal(err)
		}
		worker, gpus := c.Selector, []string(nil)
		switch sel.Kind {
		case SelectsHost:
			worker += "/e/0"
		case SelectsEngine:
			worker += "/0"
		case SelectsGPU:
			worker, gpus = "h/e/0", []string{c.Selector}
		}
		found := false
		for _, hit := range s.CordonsFor(worker, "", gpus) {
			found = found || hit.Selector == c.Selector
		}
		if !found {
			t.Fatalf("cordon %q does not meet %s", c.Selector, worker)
		}
	}
}

// TestBranches: two commands applied to one state do not meet each other.
func TestBranches(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Empty()
		for i := range rapid.IntRange(0, 130).Draw(t, "before") {
			s, _ = s.Apply(mustEncode(t, sprint("%d", i), SetCordon{Selector: sprint("h%d", i%5), Reason: "r"}))
		}
		left, _ := s.Apply(mustEncode(t, "left", SetCordon{Selector: "left", Reason: "r"}))
		leftHash := left.Hash()
		right, r := s.Apply(mustEncode(t, "right", SetCordon{Selector: "right", Reason: "r"}))
		if left.Hash() != leftHash || len(left.CordonsFor("right/e/0", "", nil)) > 0 || len(right.CordonsFor("left/e/0", "", nil)) > 0 || r.Duplicate {
			t.Fatal("two states made of one share what differs")
		}
	})
}

func mustEncode(t *rapid.T, id string, body Body) []byte {
	cmd, err := Encode(stamp(id), body)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

// TestRing: it holds what a list would, and never changes an older one.
func TestRing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 200).Draw(t, "limit")
		n := rapid.IntRange(0, 300).Draw(t, "n")
		r := newRing[int](limit)
		if k := rapid.IntRange(0, limit).Draw(t, "restored"); k > 0 {
			entries := make([]int, k)
			for i := range entries {
				entries[i] = i - k
			}
			r = ringOf(limit, entries)
		}
		list := r.slice(limit)
		for i := range n {
			old, oldList := r, list
			r = r.push(i)
			if list = append(slices.Clone(list), i); len(list) > limit {
				list = list[1:]
			}
			if !slices.Equal(oldList, old.slice(limit)) {
				t.Fatal("push changed the ring it was called on")
			}
		}
		if !slices.Equal(list, r.slice(limit)) || r.size != len(list) {
			t.Fatalf("list %v, ring %v", list, r.slice(limit))
		}
		if most := limit/ringChunk + 2; len(r.chunks) > most {
			t.Fatalf("%d chunks for %d entries", len(r.chunks), r.size)
		}
	})
}
