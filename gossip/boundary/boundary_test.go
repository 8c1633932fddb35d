package boundary

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waypost/gossip/prefix"
)

var hasher = NewHasher(prefix.ClusterKey{7})

// ids are the hashes of words, one token each; "*" is a masked one.
func ids(words string) (out []Token) {
	for _, w := range strings.Fields(words) {
		if w == "*" {
			out = append(out, Masked)
			continue
		}
		n := uint32(0)
		for _, r := range w {
			n = n*31 + uint32(r)
		}
		out = append(out, hasher.Hash([]uint32{n})...)
	}
	return out
}

func TestFirstDifference(t *testing.T) {
	for _, c := range []struct {
		a, b   string
		at     int
		differ bool
	}{
		{"a b c", "a b c", 3, false},
		{"a b c", "a x c", 1, true},
		{"a b", "a b c", 2, true},
		{"a b c", "a b", 2, true},
		{"", "", 0, false},
		{"bos a", "a", 0, true},
		// Dates of other lengths, masked on one side or on both.
		{"a * * c", "a 1 may c", 0, false},
		{"a * * c", "a 30 september 20 26 c", 0, false},
		{"a 1 may c", "a * c", 0, false},
		{"a * c", "a * * * c", 0, false},
		{"a * c", "a c", 0, false},
		{"* * a", "1 may a", 0, false},
		{"a * *", "a 1", 0, false},
		{"a * b * c", "a 1 b 2 c", 0, false},
		// What stands behind a date must agree all the same.
		{"a * c d", "a 1 c x", 3, true},
		{"x * c", "a 1 c", 0, true},
		// And a date is no room for a system prompt.
		{"a * c", "a 1 2 3 4 5 6 c", 2, true},
	} {
		at, differ := firstDifference(ids(c.a), ids(c.b))
		if differ != c.differ || differ && at != c.at {
			t.Errorf("%q, %q: %d %v, want %d %v", c.a, c.b, at, differ, c.at, c.differ)
		}
		if _, back := firstDifference(ids(c.b), ids(c.a)); back != c.differ {
			t.Errorf("%q, %q: %v the other way round", c.b, c.a, back)
		}
	}
}

// Unmasked sequences differ where a plain loop says so, through the walk with
// masks as well.
func TestMasksDoNotHideOtherTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SliceOfN(rapid.Uint32Range(1, 4), 1, 24)
		a, b := hasher.Hash(text.Draw(t, "a")), hasher.Hash(text.Draw(t, "b"))
		at, differ := firstDifference(a, b)
		if differ != !slices.Equal(a, b) || differ && at < min(len(a), len(b)) && (a[at] == b[at] || !slices.Equal(a[:at], b[:at])) {
			t.Fatalf("%v %v: %d %v", a, b, at, differ)
		}
		// A date behind both changes nothing of it.
		date := []Token{Masked, Masked}
		if _, masked := firstDifference(append(slices.Clone(a), date...), append(slices.Clone(b), date...)); !differ && masked {
			t.Fatalf("%v %v differ with a date behind them", a, b)
		}
		i := rapid.IntRange(0, len(a)-1).Draw(t, "masked")
		hidden := slices.Clone(a)
		hidden[i] = Masked
		if _, differ := firstDifference(hidden, a); differ {
			t.Fatalf("%v differs from itself with token %d masked", a, i)
		}
	})
}

func TestMaskDates(t *testing.T) {
	text := DateText(time.Date(2026, 11, 30, 23, 59, 0, 0, time.UTC))
	for _, day := range []string{"2026-11-29", "30 Nov 2026", "December 1, 2026"} {
		if !strings.Contains(text, day) {
			t.Errorf("%q is not in the date text", day)
		}
	}
	runes := func(s string) (out []Token) {
		for _, r := range s {
			out = append(out, hasher.Hash([]uint32{uint32(r)})...)
		}
		return out
	}
	dates := runes(text)
	for _, c := range []struct {
		text string
		from string // what is masked
	}{
		{"Today Date: 30 Nov 2026\n\nYou", "30 Nov 2026"},
		{"Current date: 2026-12-01 end", "2026-12-01"},
		{"The tool takes a member, 4096 of them", ""},
		{"Cutting Knowledge Date: November 2023", ""},
		{"Today Date: 14 Mar 2025\n\nYou", ""},
	} {
		got := runes(c.text)
		found := MaskDates(got, dates)
		if found != (c.from != "") {
			t.Errorf("%q: %v", c.text, found)
			continue
		}
		if at := strings.Index(c.text, c.from); found {
			for i, tok := range got {
				if i >= at && i < at+len(c.from) && tok != Masked || (i < at || i >= at+len(c.from)) && tok == Masked {
					t.Errorf("%q: token %d is %v", c.text, i, tok)
				}
			}
		}
	}
}

func TestMaskChanged(t *testing.T) {
	for _, c := range []struct {
		former, now, want string
		ok                bool
	}{
		{"a 1 may c", "a 2 may c", "a * may c", true},
		{"a 31 may c", "a 1 june c", "a * * c", true},
		{"a * may c", "a 9 may c", "a * may c", true},
		{"a 1 0 c", "a 2 c", "a * c", true},
		{"a 0 c", "a c", "a * c", true},
		{"a" + strings.Repeat(" x", 30), "a" + strings.Repeat(" y", 30), "", false},
	} {
		got, ok := MaskChanged(ids(c.former), ids(c.now))
		if ok != c.ok || !slices.Equal(got, ids(c.want)) {
			t.Errorf("%q → %q: %v %v, want %q", c.former, c.now, got, ok, c.want)
		}
	}
}

func vector(run uint32, probes ...string) *Vector {
	v := &Vector{Sets: []int{1, 2}, KeyID: 1}
	for _, p := range probes {
		part, text, _ := strings.Cut(p, " ")
		n := 1
		fmt.Sscanf(part[len(part)-1:], "%d", &n)
		v.Probes = append(v.Probes, Measurement{Part: Part(part[:len(part)-1]), Number: n, Run: run, Tokens: ids(text)})
	}
	v.Sort()
	return v
}

func TestCompare(t *testing.T) {
	other := vector(1, "raw1 a b")
	other.KeyID = 2
	named, omitted := vector(1, "raw1 a b"), vector(1, "raw1 a b")
	named.Rule, omitted.Rule = "named", "omitted"
	for name, c := range map[string]struct {
		a, b *Vector
		want Relation
		says string
	}{
		"equal":                       {vector(1, "raw1 a b", "chat1 c"), vector(9, "chat1 c", "raw1 a b"), Agree, ""},
		"the cause is named first":    {vector(1, "raw1 a b", "chat1 c"), vector(1, "raw1 a x", "chat1 y"), Differ, "raw text tokenisation, probe 1, token 1"},
		"template":                    {vector(1, "raw1 a b", "chat1 c d", "chat3 e f"), vector(1, "raw1 a b", "chat1 c d", "chat3 e x"), Differ, "chat rendering, probe 3, token 1"},
		"begin of sequence":           {vector(1, "raw1 a", "completions1 a"), vector(1, "raw1 a", "completions1 bos a"), Differ, "completions rendering, probe 1, token 0"},
		"a build with one more probe": {vector(1, "raw1 a", "chat4 x"), vector(1, "raw1 a"), Agree, ""},
		"a part of a newer build":     {vector(1, "raw1 a", "vision1 x"), vector(1, "raw1 a", "vision1 y"), Differ, "vision, probe 1, token 0"},
		"no probe in common":          {vector(1, "raw1 a"), vector(1, "raw2 b"), Unknown, ""},
		"other cluster keys":          {vector(1, "raw1 z"), other, Unknown, ""},
		"not measured":                {nil, vector(1, "raw1 a"), Unknown, ""},
		"declared alike":              {&Vector{Declared: "x"}, &Vector{Declared: "x"}, Agree, ""},
		"declared otherwise":          {&Vector{Declared: "x"}, &Vector{Declared: "y"}, Differ, "declared boundary"},
		"declared and measured":       {&Vector{Declared: "x"}, vector(1, "raw1 a"), Unknown, ""},
		"rules":                       {named, omitted, Differ, "adapter and salt rule"},
		"a rule that is not seen yet": {named, vector(1, "raw1 a b"), Agree, ""},
	} {
		got, d := Compare(c.a, c.b)
		if got != c.want || got == Differ && place(d) != c.says {
			t.Errorf("%s: %v %q, want %v %q", name, got, place(d), c.want, c.says)
		}
	}
}

// The probe sets of two builds always have one in common, and no number is
// given to two texts.
func TestSets(t *testing.T) {
	if len(Probes(NewestSet)) <= len(Probes(OldestSet)) || len(Probes(NewestSet+1)) != 0 || len(Probes(OldestSet-1)) != 0 {
		t.Errorf("%d probes in the newest set, %d in the oldest", len(Probes(NewestSet)), len(Probes(OldestSet)))
	}
	seen := map[string]bool{}
	for _, p := range Published() {
		key := fmt.Sprint(p.Part, p.Number)
		if seen[key] || (p.Text == "") == (p.ChatJSON == nil) {
			t.Errorf("%s is there twice, or is no text or chat", key)
		}
		seen[key] = true
	}
	// What the build before published, it published with the same numbers.
	for _, p := range Probes(OldestSet) {
		if !seen[fmt.Sprint(p.Part, p.Number)] {
			t.Errorf("%s %d is not published any more", p.Part, p.Number)
		}
	}
}

func TestValidate(t *testing.T) {
	long := strings.Repeat("x", MaxTextBytes+1)
	for field, v := range map[string]*Vector{
		"sets":             {Sets: make([]int, maxSets+1)},
		"declared":         {Declared: long},
		"rule":             {Rule: long},
		"probes: ":         {Probes: make([]Measurement, MaxProbes+1)},
		"probes[0].part":   {Probes: []Measurement{{Number: 1}}},
		"probes[0].probe":  {Probes: []Measurement{{Part: PartRaw}}},
		"probes[0].tokens": {Probes: []Measurement{{Part: PartRaw, Number: 1, Tokens: make([]Token, MaxProbeTokens+1)}}},
		"probes[1]":        {Probes: []Measurement{{Part: PartRaw, Number: 1}, {Part: PartRaw, Number: 1}}},
	} {
		if err := v.Validate(); !errors.Is(err, ErrVector) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	if err := vector(1, "raw1 a", "chat2 b").Validate(); err != nil {
		t.Error(err)
	}
}

func TestFingerprint(t *testing.T) {
	a := vector(1, "raw1 a", "chat1 b * c")
	if b := vector(5, "raw1 a", "chat1 b * * c"); a.Fingerprint() != b.Fingerprint() {
		t.Error("dates of other lengths have other fingerprints")
	}
	if b := vector(1, "raw1 a", "chat1 b * d"); a.Fingerprint() == b.Fingerprint() {
		t.Error("another template has the same fingerprint")
	}
	if !a.DateDependent() || vector(1, "raw1 a").DateDependent() {
		t.Error("not marked by its date")
	}
	if f := (&Vector{}).Fingerprint(); f != "" {
		t.Errorf("nothing has the fingerprint %q", f)
	}
}
