package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
)

// events renders a report: "action package test output" a line, "-" for none.
func events(lines ...string) string {
	var b strings.Builder
	for _, l := range lines {
		f := strings.SplitN(l, " ", 4)
		for len(f) < 4 {
			f = append(f, "")
		}
		for i := range f {
			if f[i] == "-" {
				f[i] = ""
			}
		}
		if f[3] != "" {
			f[3] += "\n"
		}
		fmt.Fprintf(&b, "{\"Action\":%q,\"Package\":%q,\"Test\":%q,\"Output\":%q}\n", f[0], f[1], f[2], f[3])
	}
	return b.String()
}

func TestReport(t *testing.T) {
	skipping := []string{
		"run p TestA", "output p TestA === RUN   TestA", "output p TestA     a_test.go:3: needs a tool", "output p TestA --- SKIP: TestA", "skip p TestA",
		"output p - PASS", "output p - ok  \tp\t0.1s", "pass p",
	}
	for _, c := range []struct {
		name   string
		in     string
		allow  string
		out    string
		err    error
		reason string
	}{
		{"all is well", events("output p TestA === RUN   TestA", "output p TestA words", "pass p TestA", "output p - PASS", "output p - ok  \tp\t0.1s", "pass p"), "", "ok  \tp\t0.1s\nskipped: 0\n", nil, ""},
		{"a skip that nobody allowed", events(skipping...), "another reason", "ok  \tp\t0.1s\nskipped: 1\n  p TestA: a_test.go:3: needs a tool\n", errSkipped, "p TestA: a_test.go:3: needs a tool"},
		{"a skip that is allowed", events(skipping...), "needs a", "ok  \tp\t0.1s\nskipped: 1\n  p TestA: a_test.go:3: needs a tool\n", nil, ""},
		{"a skip without a word", events("skip p TestA", "output p - ok  \tp\t0.1s", "pass p"), "needs a", "ok  \tp\t0.1s\nskipped: 1\n  p TestA: \n", errSkipped, "p TestA:"},
		{"a skipped test of a package that fails", events("output p TestA needs a tool", "skip p TestA", "output p TestB why", "fail p TestB", "output p - FAIL\tp\t0.1s", "fail p"), "", "needs a tool\nwhy\nFAIL\tp\t0.1s\nskipped: 1\n  p TestA: needs a tool\n", errSkipped, "TestA"},
		{"a failure beside another package", events("output p TestA === RUN   TestA", "output q TestQ noise", "output p TestA why", "pass q TestQ", "fail p TestA", "output q - ok  \tq\t0.1s", "pass q", "output p - FAIL", "output p - FAIL\tp\t0.1s", "fail p"), "", "ok  \tq\t0.1s\nwhy\nFAIL\nFAIL\tp\t0.1s\nskipped: 0\n", nil, ""},
		{"the compiler's words", events("build-output - - p.go:1: no", "build-fail -", "output p - FAIL\tp [build failed]", "fail p") + "go: no such flag\n", "", "p.go:1: no\nFAIL\tp [build failed]\ngo: no such flag\nskipped: 0\n", nil, ""},
		{"no test of that name", events("output p - ok  \tp\t0.1s [no tests to run]", "pass p"), "", "ok  \tp\t0.1s [no tests to run]\nskipped: 1\n  p (all): no test has such a name\n", errSkipped, "no test has such a name"},
		{"a package without tests", events("output p - ?   \tp\t[no test files]", "skip p"), "", "?   \tp\t[no test files]\nskipped: 0\n", nil, ""},
		{"cut short", events("output p TestA === RUN   TestA"), "", "skipped: 0\n", errCut, "1 packages"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var allowed []*regexp.Regexp
			if c.allow != "" {
				allowed = append(allowed, regexp.MustCompile(c.allow))
			}
			var out strings.Builder
			err := report(strings.NewReader(c.in), &out, allowed)
			if !errors.Is(err, c.err) || err != nil && !strings.Contains(err.Error(), c.reason) {
				t.Errorf("error %v, want %v with %q", err, c.err, c.reason)
			}
			if out.String() != c.out {
				t.Errorf("printed %q, want %q", out.String(), c.out)
			}
		})
	}
}
