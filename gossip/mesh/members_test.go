package mesh

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// TestTable runs the transcripts in testdata/table. Each command is something
// that the list is told, `wait` lets time pass, and the output is the list.
func TestTable(t *testing.T) {
	datadriven.Walk(t, "testdata/table", func(t *testing.T, path string) {
		start := time.Now()
		now := start
		tab := newTable("me", 5)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			arg := func(key, unset string) string {
				if d.HasArg(key) {
					d.ScanArgs(t, key, &unset)
				}
				return unset
			}
			meta := Meta{Role: RoleAgent, Version: arg("version", "1"), Life: 1}.encode()
			if d.HasArg("badmeta") {
				meta = []byte{9}
			}
			n := node{name: arg("name", ""), addr: arg("addr", ""), meta: meta}
			switch d.Cmd {
			case "joined":
				tab.joined(n, now)
			case "updated":
				tab.updated(n)
			case "conflict":
				tab.conflict(n.name, arg("other", ""), now)
			case "udplost":
				tab.udpLost(n.name, now)
			case "answered":
				tab.answered(n.name, 3*time.Millisecond)
			case "refuse":
				tab.refuse(n.addr, arg("reason", ""), now)
			case "wait":
				d, err := time.ParseDuration(arg("for", ""))
				if err != nil {
					t.Fatal(err)
				}
				now = now.Add(d)
				tab.expire(now)
			case "read": // lines: name address state
				var nodes []node
				for _, line := range strings.Split(d.Input, "\n") {
					if f := strings.Fields(line); len(f) == 3 {
						nodes = append(nodes, node{name: f[0], addr: f[1], meta: meta, state: Status(f[2])})
					}
				}
				tab.reconcile(nodes, now)
			default:
				t.Fatalf("unknown command %s", d.Cmd)
			}
			var out strings.Builder
			for _, m := range tab.members() {
				fmt.Fprintf(&out, "%s %s v%s %s for %v", m.Name, m.Address, m.Meta.Version, m.Status, now.Sub(m.Since))
				for _, extra := range []string{m.Other, m.Note} {
					if extra != "" {
						fmt.Fprintf(&out, " (%s)", extra)
					}
				}
				out.WriteString("\n")
			}
			for _, x := range tab.takeLog() {
				fmt.Fprintf(&out, "log: %s %s -> %s\n", x.member.Name, x.from, x.member.Status)
			}
			if tab.dropped > 0 {
				fmt.Fprintf(&out, "dropped %d\n", tab.dropped)
			}
			return out.String()
		})
	})
}

// Whatever it is told, the list stays within its bounds and a reading of the
// library's state makes it agree.
func TestTableProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Now()
		tab := newTable("n0", 6)
		name := rapid.Custom(func(t *rapid.T) string { return fmt.Sprintf("n%d", rapid.IntRange(0, 9).Draw(t, "name")) })
		addr := rapid.Custom(func(t *rapid.T) string { return fmt.Sprintf("10.0.0.%d:1", rapid.IntRange(0, 9).Draw(t, "addr")) })
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			n := node{name: name.Draw(t, "node"), addr: addr.Draw(t, "at"), meta: rapid.SliceOfN(rapid.Byte(), 0, 30).Draw(t, "meta")}
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0:
				tab.joined(n, now)
			case 1:
				tab.updated(n)
			case 2:
				tab.conflict(n.name, n.addr, now)
			case 3:
				tab.refuse(n.addr, "key", now)
			case 4:
				tab.udpLost(n.name, now)
			case 5:
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(30*time.Hour)).Draw(t, "wait")))
				tab.expire(now)
			case 6:
				n.state = rapid.SampledFrom([]Status{StatusAlive, StatusSuspect, StatusLost, StatusLeft}).Draw(t, "state")
				tab.reconcile([]node{n}, now)
				for other, e := range tab.entries {
					if other != n.name && e.alive() {
						t.Fatalf("%s is alive though the library does not know it", other)
					}
				}
				if e := tab.entries[n.name]; e != nil && e.replacedBy == "" && e.raw() != n.state && !(e.Status == StatusConflict && n.state == StatusSuspect) {
					t.Fatalf("%s is %s, the library says %s", n.name, e.Status, n.state)
				}
			}
			if len(tab.entries) > 6 || len(tab.refused) > maxRefused {
				t.Fatalf("%d members, %d refused", len(tab.entries), len(tab.refused))
			}
			for _, m := range tab.members() {
				if m.Since.After(now) || m.Status == "" {
					t.Fatalf("member %+v at %v", m, now)
				}
			}
		}
	})
}

func TestPeersAreCoordinatorsFirst(t *testing.T) {
	tab := newTable("me", 1000)
	now := time.Now()
	for i := range 400 {
		role := RoleAgent
		if i%100 == 99 {
			role = RoleCoordinator
		}
		tab.joined(node{name: fmt.Sprintf("n%03d", i), addr: fmt.Sprintf("10.0.%d.%d:1", i>>8, i&255), meta: Meta{Role: role}.encode()}, now)
	}
	tab.joined(node{name: "me", addr: "10.9.9.9:1", meta: Meta{Role: RoleAgent}.encode()}, now)
	tab.reconcile([]node{{name: "n001", addr: "10.0.0.1:1", state: StatusLeft}, {name: "n099", addr: "10.0.0.99:1", state: StatusAlive, meta: Meta{Role: RoleCoordinator}.encode()}}, now)
	peers := tab.peers()
	if len(peers) != maxPeers {
		t.Fatalf("%d peers, want %d", len(peers), maxPeers)
	}
	for i, want := range []string{"n099", "n199", "n299", "n399", "n000", "n002"} {
		if peers[i].Name != want {
			t.Errorf("peer %d is %s, want %s", i, peers[i].Name, want)
		}
	}
	if slices.ContainsFunc(peers, func(p peer) bool { return p.Name == "me" || p.Name == "n001" }) {
		t.Error("this process, or one that left, is remembered")
	}
}

func TestMetaRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := func(n int) *rapid.Generator[string] { return rapid.StringN(0, n, n) }
		want := Meta{
			Role: rapid.SampledFrom([]Role{RoleAgent, RoleCoordinator}).Draw(t, "role"), Protocol: rapid.Byte().Draw(t, "protocol"),
			Version: text(maxVersionBytes).Draw(t, "version"), Process: rapid.Uint64().Draw(t, "process"), Life: rapid.Uint32().Draw(t, "life"),
			ClusterAddress: text(maxAddressBytes).Draw(t, "cluster"), APIAddress: text(maxAddressBytes).Draw(t, "api"),
			KeyID: rapid.SampledFrom([]string{"", "0000", "9c41"}).Draw(t, "key"),
		}
		b := want.encode()
		if len(b) > 512 {
			t.Fatalf("%d bytes, memberlist takes 512", len(b))
		}
		got, err := decodeMeta(b)
		if err != nil || got != want {
			t.Fatalf("got %+v, %v\nwant %+v", got, err, want)
		}
	})
	typical := Meta{Role: RoleCoordinator, Protocol: 1, Version: "0.12.3", Process: 1, Life: 1, KeyID: "9c41", ClusterAddress: "10.20.30.40:7711", APIAddress: "10.20.30.40:7712"}
	if n := len(typical.encode()); n > 100 {
		t.Errorf("a typical description takes %d bytes, want at most 100", n)
	}
	// A newer member says more; what is known is still read.
	if got, err := decodeMeta(append(typical.encode(), 200, 3, 'n', 'e', 'w')); err != nil || got != typical {
		t.Errorf("with an unknown field: %+v, %v", got, err)
	}
}

func FuzzMeta(f *testing.F) {
	f.Add(Meta{Role: RoleAgent, Version: "0.1.0", KeyID: "9c41"}.encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(b)
		if err != nil {
			return
		}
		again, err := decodeMeta(m.encode())
		if err != nil || again != m {
			t.Fatalf("%+v encodes to %+v, %v", m, again, err)
		}
	})
}

func FuzzSketch(f *testing.F) {
	f.Add(sketchFrame{"gpu-01", 7, 9, []byte("x")}.encode())
	store := newSketchStore(4)
	store.take(sketchFrame{"a", 1, 1, []byte("p")}, 0, 1, true, time.Now())
	f.Add(store.state(maxExchangeBytes, time.Now()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := decodeSketch(b); err == nil {
			again, err := decodeSketch(s.encode())
			if diff := cmp.Diff(s, again, cmp.AllowUnexported(sketchFrame{})); diff != "" || err != nil {
				t.Fatalf("%v %s", err, diff)
			}
		}
		total := 0
		_ = unpackState(b, func(s sketchFrame, _ time.Duration) { total += len(s.payload) })
		if total > len(b) {
			t.Fatalf("%d bytes of payload from %d", total, len(b))
		}
	})
}

func FuzzPeers(f *testing.F) {
	f.Add([]byte(`{"version":1,"peers":[{"name":"a","address":"10.0.0.1:7710","role":"agent"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		peers, err := parsePeers(b)
		if len(peers) > maxPeers || err != nil && peers != nil {
			t.Fatalf("%d peers, %v", len(peers), err)
		}
		for _, p := range peers {
			if checkHostPort(p.Address) != nil {
				t.Fatalf("peer %+v", p)
			}
		}
	})
}

func FuzzKeys(f *testing.F) {
	f.Add([]byte(testKey + "\n"))
	f.Add([]byte("# of the fleet\n\n" + testKey + "\nAAAAAAAAAAAAAAAAAAAAAA==\n"))
	for _, bad := range []string{"", "no key\n", "AAAA\n", testKey + "\n" + testKey + "\n"} {
		f.Add([]byte(bad))
	}
	var many []byte
	for i := range maxKeys + 1 {
		many = append(base64.StdEncoding.AppendEncode(many, bytes.Repeat([]byte{byte(i)}, 16)), '\n')
	}
	f.Add(many)
	f.Fuzz(func(t *testing.T, b []byte) {
		keys, err := parseKeys(b)
		if (err == nil) != (len(keys) > 0) || len(keys) > maxKeys {
			t.Fatalf("%d keys, %v", len(keys), err)
		}
	})
}

func TestSketchStore(t *testing.T) {
	now := time.Now()
	s := newSketchStore(2)
	frame := func(name string, life uint32, seq uint64) sketchFrame { return sketchFrame{name, life, seq, nil} }
	for i, tt := range []struct {
		f       sketchFrame
		present uint32
		known   bool
		news    bool
	}{
		{frame("a", 1, 5), 1, true, true},
		{frame("a", 1, 5), 1, true, false}, // again
		{frame("a", 1, 4), 1, true, false}, // older
		{frame("a", 1, 6), 1, true, true},
		{frame("a", 2, 1), 1, true, true},  // of a life not announced yet: kept beside
		{frame("a", 1, 7), 1, true, true},  // the present one goes on
		{frame("a", 2, 1), 2, true, false}, // now it is the present one
		{frame("a", 3, 1), 2, true, true},  // a third takes the place of the life that is over
		{frame("a", 2, 2), 2, true, true},
		{frame("b", 9, 1), 0, false, true}, // not listed yet
		{frame("c", 1, 1), 1, true, false}, // no room
	} {
		if news := s.take(tt.f, 0, tt.present, tt.known, now); news != tt.news {
			t.Errorf("step %d: news %v, want %v", i, news, tt.news)
		}
	}
	shown := func(life uint32) (seqs []uint64) {
		for _, k := range s.all(func(name string) (uint32, bool) { return life, name == "a" }) {
			seqs = append(seqs, k.Seq)
		}
		return seqs
	}
	for life, want := range map[uint32][]uint64{1: nil, 2: {2}, 3: {1}} {
		if got := shown(life); !slices.Equal(got, want) {
			t.Errorf("in life %d sketches %v are shown, want %v", life, got, want)
		}
	}
	s.keep(func(name string, _ uint32, _ time.Time) bool { return name == "b" })
	if !s.take(frame("c", 1, 1), 0, 1, true, now) {
		t.Error("no room after one was dropped")
	}
}

// A state holds the newest sketches that fit, and neither packing nor waiting at
// another member makes them younger.
func TestSketchStateKeepsAges(t *testing.T) {
	start := time.Now()
	at := func(sec int) time.Time { return start.Add(time.Duration(sec) * time.Second) }
	first := newSketchStore(100)
	for i := range 60 { // of about a kilobyte each, the last one the newest
		first.take(sketchFrame{fmt.Sprintf("n%02d", i), 1, 1, make([]byte, 1000)}, 0, 1, true, at(i))
	}
	second, third := newSketchStore(100), newSketchStore(100)
	handOn := func(from, to *sketchStore, limit int, now time.Time) {
		state := from.state(limit, now)
		if len(state) > limit {
			t.Fatalf("%d bytes, the bound is %d", len(state), limit)
		}
		if err := unpackState(state, func(f sketchFrame, age time.Duration) { to.take(f, age, 1, true, now) }); err != nil {
			t.Fatal(err)
		}
	}
	handOn(first, second, maxExchangeBytes, at(100))
	handOn(second, third, maxStateBytes, at(400))
	got := third.all(func(string) (uint32, bool) { return 1, true })
	slices.SortFunc(got, func(a, b Sketch) int { return strings.Compare(a.Name, b.Name) })
	if len(got) != 16 || got[15].Name != "n59" {
		t.Fatalf("%d sketches, the last one of %s; want the 16 newest of 60", len(got), got[len(got)-1].Name)
	}
	for i, s := range got {
		if want := at(44 + i); !s.Received.Equal(want) {
			t.Errorf("%s was received %s off", s.Name, s.Received.Sub(want))
		}
	}
	// One that has just come may wait for its origin to be listed, however old it is.
	third.keep(func(_ string, _ uint32, came time.Time) bool { return at(400).Sub(came) < sketchOrphanKept })
	if kept := third.all(func(string) (uint32, bool) { return 1, true }); len(kept) != len(got) {
		t.Errorf("%d of %d are kept", len(kept), len(got))
	}
}
