// Command skips stands behind `go test -json` in the whole check of this
// repository. It prints the report as `go test` does without -json, lists every test
// that was skipped with its reason, and fails where a reason is not allowed: a
// check that lacks a tool would otherwise pass by testing less.
//
//	go test -json ./... | skips [-allow REGEXP]...
//
// That a test failed it shows, and leaves the verdict to the exit status of
// `go test`, which the shell's pipefail keeps.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
)

func main() {
	var allowed []*regexp.Regexp
	flag.Func("allow", "a `regexp` of reasons to skip a test; may be given several times", func(s string) error {
		re, err := regexp.Compile(s)
		allowed = append(allowed, re)
		return err
	})
	flag.Parse()
	if err := report(os.Stdin, os.Stdout, allowed); err != nil {
		fmt.Fprintln(os.Stderr, "skips:", err)
		os.Exit(1)
	}
}

// event is one line of `go test -json` (see `go doc test2json`). What the
// compiler says comes without a package.
type event struct {
	Action, Package, Test, Output string
}

var (
	errSkipped = errors.New("not allowed to be skipped")
	errCut     = errors.New("the report of go test ends early")
)

// report copies in to out as `go test` prints it, then lists the skips.
func report(in io.Reader, out io.Writer, allowed []*regexp.Regexp) error {
	running := map[string]*packageRun{}
	var skips, refused []string
	for lines := bufio.NewReader(in); ; {
		text, err := lines.ReadBytes('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		var e event
		switch {
		case len(text) == 0:
		case json.Unmarshal(text, &e) != nil || e.Action == "": // the go command's own words
			fmt.Fprint(out, string(text))
		case e.Package == "":
			fmt.Fprint(out, e.Output)
		default:
			run := running[e.Package]
			if run == nil {
				run = &packageRun{ended: map[string]string{}}
				running[e.Package] = run
			}
			if !run.take(e) {
				break
			}
			delete(running, e.Package)
			if _, err := io.WriteString(out, run.shown(e.Action)); err != nil {
				return err
			}
			for _, s := range run.skipped() {
				skip := fmt.Sprintf("%s %s: %s", e.Package, s.test, s.text)
				skips = append(skips, skip)
				if !slices.ContainsFunc(allowed, func(re *regexp.Regexp) bool { return re.MatchString(s.text) }) {
					refused = append(refused, skip)
				}
			}
		}
		if err != nil {
			break
		}
	}
	fmt.Fprintf(out, "skipped: %d\n", len(skips))
	for _, s := range skips {
		fmt.Fprintln(out, "  "+s)
	}
	switch {
	case len(refused) > 0:
		return fmt.Errorf("%w:\n  %s", errSkipped, strings.Join(refused, "\n  "))
	case len(running) > 0:
		return fmt.Errorf("%w: %d packages have not ended", errCut, len(running))
	}
	return nil
}

// packageRun is what is known of a package under test.
type packageRun struct {
	lines []testLine
	ended map[string]string // how each test ended: pass, fail or skip
}

// testLine is what a test wrote, or its package where test is empty.
type testLine struct{ test, text string }

// take takes in an event and says whether the package has ended with it.
func (r *packageRun) take(e event) (ended bool) {
	switch e.Action {
	case "output":
		r.lines = append(r.lines, testLine{e.Test, e.Output})
	case "pass", "fail", "skip":
		if e.Test == "" {
			return true
		}
		r.ended[e.Test] = e.Action
	}
	return false
}

// shown is what is printed of a package that ended so: the line of its result
// where all is well, else every word of its tests.
func (r *packageRun) shown(ended string) string {
	var b strings.Builder
	for i, l := range r.lines {
		frame := strings.HasPrefix(l.text, "=== ") || strings.HasPrefix(strings.TrimSpace(l.text), "--- PASS")
		if ended == "fail" && !frame || l.test == "" && i == len(r.lines)-1 {
			b.WriteString(l.text)
		}
	}
	return b.String()
}

// skipped returns the tests that were skipped, with their reasons, and, where
// not one test was chosen in a package that was to run some, that.
func (r *packageRun) skipped() []testLine {
	var skips []testLine
	reasons := map[string]string{}
	for _, l := range r.lines {
		text := strings.TrimSpace(l.text)
		switch {
		case l.test == "" && strings.HasSuffix(text, "[no tests to run]"):
			skips = append(skips, testLine{"(all)", "no test has such a name"})
		case !strings.HasPrefix(text, "=== ") && !strings.HasPrefix(text, "--- "):
			reasons[l.test] += text + " "
		}
	}
	for test, end := range r.ended {
		if end == "skip" {
			skips = append(skips, testLine{test, strings.TrimSpace(reasons[test])})
		}
	}
	slices.SortFunc(skips, func(a, b testLine) int { return strings.Compare(a.test, b.test) })
	return skips
}
