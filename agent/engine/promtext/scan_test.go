package promtext

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func describe(page string) (out []string) {
	for s := NewScanner([]byte(page)); s.Next(); {
		line := string(s.Name())
		for s.Label() {
			line += fmt.Sprintf(" %s=%s", s.LabelName(), s.LabelValue())
		}
		v, ok := s.Value()
		if again, same := s.Value(); ok && v != again || ok != same {
			line += " (another number when asked again)"
		}
		out = append(out, fmt.Sprintf("%s: %v %v", line, v, ok))
	}
	return out
}

func TestScan(t *testing.T) {
	for page, want := range map[string][]string{
		"":                                 nil,
		"# HELP x y\n\n  \n":               nil,
		"x 1\t1700000000":                  {"x: 1 true"},
		"x 1":                              {"x: 1 true"},
		"x{} 1\r\ny\t2 1700000000\n":       {"x: 1 true", "y: 2 true"},
		`x{a="b",c="d\"}\\",} 3`:           {`x a=b c=d\"}\\: 3 true`},
		"x{a=\"b} 3\ny 1":                  {"x: 0 false", "y: 1 true"},
		"x{a} 3":                           {"x: 0 false"},
		"x NaN\nx -1\nx +Inf\nx 1e300\nx ": {"x: 0 false", "x: 0 false", "x: 0 false", "x: 0 false", "x: 0 false"},
		"x 9.3e18\nx 9.2e18":               {"x: 0 false", "x: 9.2e+18 true"},
	} {
		got := describe(page)
		for i := range got {
			if strings.HasSuffix(got[i], " false") { // the number itself does not matter
				got[i] = got[i][:strings.LastIndex(got[i], ":")] + ": 0 false"
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: %s", page, diff)
		}
	}
}

// Skip passes over what follows under the same name, and over nothing else.
func TestSkip(t *testing.T) {
	for page, want := range map[string]string{
		"x 1\nx 2\ny 3\nx 4\nx":                    "x y x",
		"x{a=\"1\"} 1\nx{a=\"2\"} 2\nx\t3\nx 4\ny": "x",
		"x 1\nxy 2\nx{} 3\n":                       "x xy x",
		"x 1\n# x 2\nx 3\n\nx 4\ny 5":              "x x x y",
		"x 1\nx\ny 2":                              "x y",
		"x 1\nx\r\nx 3":                            "x x",
	} {
		var got []string
		for s := NewScanner([]byte(page)); s.Next(); {
			got = append(got, string(s.Name()))
			s.Skip()
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q: %q, want %s", page, got, want)
		}
	}
	s := NewScanner([]byte("x 1\nx 2\n"))
	s.Next()
	s.Skip()
	if v, ok := s.Value(); v != 1 || !ok {
		t.Errorf("the series itself has %v, %v", v, ok)
	}
}

// others are the series that have another name than one, where those of it are
// passed over or not.
func others(page []byte, name string, skip bool) (out []string) {
	for s := NewScanner(page); s.Next(); {
		if string(s.Name()) != name {
			v, ok := s.Value()
			out = append(out, fmt.Sprintf("%s %x %v", s.Name(), v, ok))
		} else if skip {
			s.Skip()
		}
	}
	return out
}

func TestReading(t *testing.T) {
	var r Reading
	if r.Float() != nil || r.Count() != nil || r.Share() != nil || r.Whole(10) != 0 {
		t.Error("what was not told is known")
	}
	r.Add(1, true)
	r.Add(2, true)
	if *r.Float() != 3 || *r.Count() != 3 || r.Share() != nil || r.Whole(3) != 3 || r.Whole(2) != 0 {
		t.Errorf("%+v", r)
	}
	r.Add(0, false)
	r.Add(5, true)
	if r.Float() != nil {
		t.Error("one that cannot be does not spoil the sum")
	}
	if (Reading{V: 1 << 40, Known: true}).Count() != nil || (Reading{V: 1.5, Known: true}).Whole(10) != 0 {
		t.Error("a count that is none")
	}
}

func TestSmall(t *testing.T) {
	for text, want := range map[string]int{"0": 0, "7": 7, "255": 255, "256": -1, "": -1, "-1": -1, "0007": -1, "x": -1} {
		if got := Small([]byte(text), 256); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}

// Whatever a page holds, only plausible numbers come out of it.
func FuzzScan(f *testing.F) {
	f.Add([]byte("# TYPE x gauge\nx{a=\"b\"} 1\nx 2\n"))
	f.Add([]byte("x{a=\"\\\\\\\"\",b=\"c\"} 1e5 123\n"))
	f.Add([]byte("x{a=\"b\"} 1\nx 2\nx\ny\t3\n#x\nx{} 4\nxy 5\nx"))
	f.Fuzz(func(t *testing.T, page []byte) {
		series := 0
		for line := range bytes.SplitSeq(page, []byte("\n")) {
			if got, want := nameEnd(line), bytes.IndexAny(line, "{ \t"); got != want {
				t.Fatalf("%q: the name ends at %d, want %d", line, got, want)
			}
		}
		if s := NewScanner(page); s.Next() {
			if diff := cmp.Diff(others(page, string(s.Name()), false), others(page, string(s.Name()), true)); diff != "" {
				t.Fatalf("%q passed over: %s", s.Name(), diff)
			}
		}
		for s := NewScanner(page); s.Next(); {
			series++
			for s.Label() {
				if len(s.LabelName())+len(s.LabelValue()) > len(page) {
					t.Fatal("a label longer than the page")
				}
			}
			if v, ok := s.Value(); ok && !Plausible(v) {
				t.Fatalf("%v is told as a number", v)
			}
		}
		if series > len(page) {
			t.Fatalf("%d series in %d bytes", series, len(page))
		}
	})
}
