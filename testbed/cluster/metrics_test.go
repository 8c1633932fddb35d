package cluster

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// promised are the series of a section of testdata/metrics.txt.
func promised(t *testing.T, sections ...string) (out []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "metrics.txt"))
	if err != nil {
		t.Fatal(err)
	}
	in, seen := false, 0
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "["):
			if in = slices.Contains(sections, strings.Trim(line, "[]")); in {
				seen++
			}
		case in:
			out = append(out, line)
		}
	}
	if seen != len(sections) {
		t.Fatalf("%d of the sections %q are in the list", seen, sections)
	}
	return out
}

var (
	sampleLine = regexp.MustCompile(`^(waypost_\w+)(?:\{(.*)\})? (\S+)$`)
	labelPair  = regexp.MustCompile(`(\w+)="(?:[^"\\]|\\.)*"`)
)

// servedBy are the series of a page of metrics, each name with its labels, and how
// many samples there are.
func servedBy(page string) (out map[string]bool, samples int) {
	types, out := map[string]string{}, map[string]bool{}
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		if f := strings.Fields(line); len(f) == 4 && f[1] == "TYPE" {
			types[f[2]] = f[3]
			continue
		}
		m := sampleLine.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		samples++
		name := m[1]
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if base, ok := strings.CutSuffix(name, suffix); ok && (types[base] == "histogram" || types[base] == "summary") {
				name = base
			}
		}
		var labels []string
		for _, l := range labelPair.FindAllStringSubmatch(m[2], -1) {
			if l[1] != "le" && l[1] != "quantile" {
				labels = append(labels, l[1])
			}
		}
		out[named(name, labels)] = true
	}
	return out, samples
}

// named is a series' name with its labels in the order of the alphabet.
func named(name string, labels []string) string {
	if len(labels) == 0 {
		return name
	}
	slices.Sort(labels)
	return name + "{" + strings.Join(labels, ",") + "}"
}

// missing are the promised series that a page lacks.
func missing(page string, want []string) (out []string) {
	have, _ := servedBy(page)
	for _, w := range want {
		name, labels, ok := strings.Cut(strings.TrimSuffix(w, "}"), "{")
		if ok {
			w = named(name, strings.Split(labels, ","))
		}
		if !have[w] {
			out = append(out, w)
		}
	}
	return out
}

func page(client *http.Client, url string) (string, error) {
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.200s", resp.Status, b)
	}
	return string(b), err
}

// What operators are promised to see is served by the real program, with these
// labels, once there was something to see.
func TestPromisedMetricsAreServed(t *testing.T) {
	t.Parallel()
	withGPUs := false
	p := startProcesses(t, 1, func(p *processes) {
		p.ranks = 2 // between one there is no choice
		if _, err := fakeDriver(); err == nil {
			_, helper := newGPUs(t, os.Getpid())
			p.gpu, withGPUs = fmt.Sprintf("enabled = \"auto\"\npoll = \"200ms\"\nhelper = %q", helper), true
		}
	})
	p.formed()
	p.client = &http.Client{Transport: &http.Transport{}, Timeout: patience}
	api := &http.Client{Transport: &http.Transport{TLSClientConfig: p.api, ForceAttemptHTTP2: true}, Timeout: patience}
	defer p.client.CloseIdleConnections()
	defer api.CloseIdleConnections()

	// A prompt that is served twice: the second time there is reuse to be right
	// about. Then nobody may take one, and the host is taken out.
	for range 2 {
		a := ask{tokens: tokens(5, 640), output: 4}
		var placed *waypostv1.Placement
		p.eventually("the coordinator does not place", func() string { // it learns its number
			var err error
			if placed, err = p.place(0, a); err != nil {
				return err.Error()
			}
			return ""
		})
		cached, _, err := p.send(placed, a)
		if err != nil {
			t.Fatal(err)
		}
		p.outcome(placed, a, cached, 50*time.Millisecond)
		p.eventually("the prompt is not in the view", func() string {
			if n := max(p.expectsNow(0, WorkerName(0, 0), a), p.expectsNow(0, WorkerName(0, 1), a)); n < 600 {
				return fmt.Sprint(n)
			}
			return ""
		})
	}
	if _, err := p.place(0, ask{tokens: tokens(6, 64), exclude: []string{WorkerName(0, 0), WorkerName(0, 1)}}); err == nil {
		t.Error("placed though all workers were excluded")
	}
	// One that goes on: only a batch that runs has a gap between tokens.
	long := ask{tokens: tokens(7, 64), output: 100_000}
	placed, err := p.place(0, long)
	if err != nil {
		t.Fatal(err)
	}
	running, end := context.WithCancel(t.Context())
	var sent sync.WaitGroup
	defer sent.Wait()
	defer end()
	sent.Go(func() {
		if _, _, err := p.sendContext(running, placed, long); running.Err() == nil {
			t.Errorf("a request of 100,000 tokens ended: %v", err)
		}
	})
	want := promised(t, "everywhere", "coordinator")
	without := slices.DeleteFunc(slices.Clone(want), func(s string) bool { return strings.HasPrefix(s, "waypost_workers_excluded{") })
	url := "https://" + p.API(0) + "/metrics"
	complete := func(what string, client *http.Client, url string, want []string) {
		t.Helper()
		p.eventually("metrics of the "+what, func() string {
			text, err := page(client, url)
			if err != nil {
				return err.Error()
			}
			return strings.Join(missing(text, want), " ")
		})
	}
	complete("coordinator", api, url, without)
	agent := promised(t, "everywhere", "agent")
	if withGPUs {
		agent = append(agent, promised(t, "agent with GPUs")...)
	}
	complete("agent", p.client, "http://"+p.metrics+"/metrics", agent)

	if _, err := p.Operator(0).CordonTarget(t.Context(), &waypostv1.CordonTargetRequest{
		Selector: proto.String(HostName(0)), Reason: proto.String("fan"), RequestId: proto.String("m"),
	}); err != nil {
		t.Fatal(err)
	}
	complete("coordinator of a cordoned host", api, url, []string{"waypost_workers_excluded{pool,reason}"})
	text, err := page(api, url)
	if err != nil {
		t.Fatal(err)
	}
	// Nothing is labelled by worker, host or request at a coordinator.
	have, samples := servedBy(text)
	for name := range have {
		if _, labels, ok := strings.Cut(strings.TrimSuffix(name, "}"), "{"); ok {
			for _, l := range strings.Split(labels, ",") {
				if l == "worker" || l == "host" || l == "request" {
					t.Errorf("%s is labelled by %s", name, l)
				}
			}
		}
	}
	if samples > 5000 {
		t.Errorf("%d series of one host with one worker", samples)
	}
}
