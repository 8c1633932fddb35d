package registry

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"testing"
)

func FuzzApply(f *testing.F) {
	for _, body := range []Body{
		InitCluster{"c", "default"},
		PutFleet{"[[pool]]\nname = \"p\"\nmodel = \"m\"\n", 0, "m"},
		SetCordon{"h/e/0", "r", true, nil, ""},
		RemoveCordon{"h", "r"},
		RegisterCoordinator{"i", "n", "h:1", "h:2", true},
		RemoveCoordinator{"i"},
		SetFeatureLevel{1},
	} {
		f.Add(encode(f, "1", body))
	}
	f.Add([]byte("\x01" + `{"kind":"put_fleet","request_id":"1","at_ms":0,"by":"a","body":{"toml":"[[[","base_version":0}}`))
	start := sample(f)
	f.Fuzz(func(t *testing.T, cmd []byte) {
		s, r := start.Apply(cmd)
		if r.Code == "" || (r.Err() != nil) == (r.Code == CodeOK) {
			t.Fatalf("result %+v", r)
		}
		if (r.Code == CodeInvalid || r.Code == CodeUnknown) && s != start {
			t.Fatalf("%+v, but the state is another one", r)
		}
		back, err := DecodeSnapshot(s.AppendSnapshot(nil))
		if err != nil {
			t.Fatalf("a state that Apply made does not restore: %v", err)
		}
		if back.Hash() != s.Hash() {
			t.Fatal("a restored state is another one")
		}
		if again, r2 := s.Apply(cmd); s != start && (!r2.Duplicate || again != s) {
			t.Fatalf("a retry is not one: %+v", r2)
		}
		encoded, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeResult(encoded); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzParseFleet(f *testing.F) {
	f.Add(readTestdata(f, "operator.toml"))
	f.Add("[[link]]\nbetween = [\"zone:a\", \"zone:b\"]\n[[zone]]\nname=\"a\"\nhosts=[\"[1-3,05-09]*?[!a]\"]\nnetworks=[\"::/0\"]")
	f.Add("a = [{b = [[[1]]]}]\n[x.y]\nz.w = 1\n[[x.v]]\n[[x.v]]\n[x.v.u]")
	f.Add("policy.gpu.exclude = ['xid:1']\npool = [{name = 'p', model = 'm', slo.ttft = '1s'}]")
	f.Fuzz(func(t *testing.T, text string) {
		fleet, err := ParseFleet("fleet.toml", text)
		if _, lenient := parseFleet("fleet.toml", text, true); err == nil && lenient != nil {
			t.Fatalf("strict takes it, lenient does not: %v", lenient)
		}
		if err != nil {
			var fe *FleetError
			if !errors.As(err, &fe) || len(fe.Problems) == 0 || len(fe.Problems) > maxProblems || err.Error() == "" {
				t.Fatalf("error %#v", err)
			}
			lines := bytes.Count([]byte(text), []byte("\n")) + 1
			for _, p := range fe.Problems {
				if p.Line < 0 || p.Line > lines || p.Detail == "" {
					t.Fatalf("problem %+v in a file of %d lines", p, lines)
				}
			}
			return
		}
		if d := Diff(fleet, fleet); len(d) > 0 {
			t.Fatalf("it differs from itself: %v", d)
		}
		Diff(EmptyFleet(), fleet)
		for _, host := range []string{"gpu-01", "", "a/b", "x\xff", "09"} {
			place := fleet.HostPlace(host)
			if p := fleet.Link(host, "gpu-02"); p.BandwidthBytesPerSec.Value == 0 || p.Latency.Value < 0 || p.Name == "" {
				t.Fatalf("path from %+v is %+v", place, p)
			}
			if p := fleet.PoolOf(host+"/vllm-8000/0", "m"); p != nil && p.Model != "m" {
				t.Fatalf("pool %+v", p)
			}
		}
	})
}

func FuzzDecodeSnapshot(f *testing.F) {
	f.Add(sample(f).AppendSnapshot(nil))
	f.Add(Empty().AppendSnapshot(nil))
	f.Add([]byte(snapshotHeader + `{"feature_level":1,"next_number":1,"cordons":[{"selector":"a","by":"","at_ms":0,"reason":""}]}`))
	cmd := encode(f, "fuzz", SetCordon{Selector: "h", Reason: "r"})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := DecodeSnapshot(b)
		if err != nil {
			if !errors.Is(err, ErrSnapshot) {
				t.Fatal(err)
			}
			return
		}
		once := s.AppendSnapshot(nil)
		again, err := DecodeSnapshot(once)
		if err != nil {
			t.Fatalf("what it encodes to does not decode: %v", err)
		}
		if !bytes.Equal(again.AppendSnapshot(nil), once) {
			t.Fatal("encoding is not stable")
		}
		s.Apply(cmd)
		s.CordonsFor("h/e/0", "m", []string{"GPU-8a1f0000-0000-0000-0000-000000000001"})
	})
}

func FuzzPattern(f *testing.F) {
	f.Add("gpu-0[1-3]*", "gpu-01")
	f.Add("[01-12]?[!a-z]*", "09\xff")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		w, err := ParseWorkerPattern(pattern)
		if err != nil {
			return
		}
		if w.String() != pattern {
			t.Fatalf("%q reads back as %q", pattern, w)
		}
		w.Match(name)
	})
}

// TestHostileFleets: files made to be slow end in bounded work.
func TestHostileFleets(t *testing.T) {
	fill := func(f func(i int) string) string {
		var b strings.Builder
		for i := 0; b.Len() < MaxFleetBytes-200; i++ {
			b.WriteString(f(i))
		}
		return b.String()
	}
	for name, tt := range map[string]struct{ text, want string }{
		"deep key":     {strings.Repeat("a.", MaxFleetBytes/2-2) + "a=1", "nested more than 16 deep"},
		"deep table":   {"x=1\n[" + strings.Repeat("a.", MaxFleetBytes/2-6) + "a]", "fleet.toml:2: keys and values are nested"},
		"deep list":    {"a=" + strings.Repeat("[", 9999) + strings.Repeat("]", 9999), "nested more than 16 deep"},
		"deep inline":  {"a=" + strings.Repeat("{a=", 20) + "1" + strings.Repeat("}", 20), "nested more than 16 deep"},
		"many tables":  {strings.Repeat("[[rack]]\n", MaxFleetBytes/9), "rack: there are 58254, at most 4096"},
		"many keys":    {fill(func(i int) string { return sprint("k%d=1\n", i) }), "more than 256 keys"},
		"one table":    {"[rack]\n" + fill(func(i int) string { return sprint("rack.k%d=1\n", i) }), "more than 256 keys"},
		"many names":   {fill(func(i int) string { return sprint("[k%d]\n", i) }), "more than 256 keys"},
		"many inline":  {"x=[{" + fill(func(i int) string { return sprint("k%d=1,", i) }) + "z=1}]", "more than 256 keys"},
		"many hosts":   {"[[rack]]\nhosts=[" + fill(func(i int) string { return sprint("'h%d',", i) }) + "]", "rack.name: it is missing"},
		"many unknown": {fill(func(i int) string { return sprint("[[rack]]\nk%d=1\n", i) }), "rack: there are "},
		"many links": {fill(func(i int) string {
			if i >= 1500 {
				return "#\n"
			}
			return sprint("[[rack]]\nname='h%d'\nzone='z'\nhosts=['*%d']\n[[link]]\nbetween=['host:h%d','rack:i%d']\n", i, i, i, i)
		}), "no [[rack]] is named"},
		"too long": {strings.Repeat("\n", MaxFleetBytes+1), "it has 524289 bytes"},
	} {
		var err error
		objects := mallocs(func() { _, err = ParseFleet("fleet.toml", tt.text) })
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
		if most := uint64(4 * MaxFleetBytes); objects > most {
			t.Errorf("%s: %d allocations for %d bytes, want at most %d", name, objects, len(tt.text), most)
		}
	}
}

// mallocs counts the allocations of one call.
func mallocs(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.Mallocs - before.Mallocs
}
