package enginefaults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"waypost/systemd/daemon"
	"waypost/testbed/emulator/faults"
)

func TestFaultsAreListed(t *testing.T) {
	var out bytes.Buffer
	if err := printFaults(&out, true); err != nil {
		t.Fatal(err)
	}
	var v struct {
		Faults []struct{ Name, Kind, What, Want string }
	}
	if err := json.Unmarshal(out.Bytes(), &v); err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, f := range v.Faults {
		if f.Name == "" || f.Kind == "" || f.What == "" || f.Want == "" || names[f.Name] {
			t.Errorf("fault %+v: a name is missing or taken twice", f)
		}
		names[f.Name] = true
	}
	if len(names) < 61 {
		t.Errorf("%d faults", len(names))
	}
	out.Reset()
	if err := printFaults(&out, false); err != nil || strings.Count(out.String(), "\n") != len(names)+1 {
		t.Errorf("%v: %s", err, out.String())
	}
}

func TestEngineOptions(t *testing.T) {
	for _, test := range []struct {
		o     engineOptions
		field string
		says  string
	}{
		{engineOptions{kind: "tgi"}, "--kind", "use vllm, sglang"},
		{engineOptions{kind: "sglang", version: "9"}, "--version", "0.5.18"},
		{engineOptions{kind: "vllm", version: "0.5.18"}, "--version", "0.32.0"},
		{engineOptions{kind: "vllm", fault: "no"}, "--fault", "waypost testbed faults"},
		{engineOptions{kind: "vllm", fault: "second-reader"}, "--fault", "--kind trtllm"},
	} {
		_, err := test.o.run()
		var field *daemon.FieldError
		if !errors.As(err, &field) || field.Field != test.field || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%+v: %v, want %s and %q", test.o, err, test.field, test.says)
		}
	}
	for _, kind := range []string{"vllm", "sglang", "trtllm", "llamacpp"} {
		for _, version := range append(versionsOf(kind), "") {
			e, err := engineOptions{kind: kind, version: version, model: "tiny", listen: "127.0.0.1:0"}.run()
			if err != nil {
				t.Fatalf("%s %s: %v", kind, version, err)
			}
			e.Close()
		}
	}
}

// A running fault is looked at and switched over HTTP, and the engine prints
// what an agent's configuration needs.
func TestEngineIsControlled(t *testing.T) {
	out, in := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- engineOptions{kind: "sglang", model: "tiny", listen: "127.0.0.1:0", fault: "stale-page"}.serve(ctx, in)
		in.Close()
	}()
	text := make([]byte, 1024)
	n, err := out.Read(text)
	if err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, out)
	url := strings.Split(string(text[:n]), `"`)[3]
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ask := func(method, body string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), method, url+faults.ControlPath, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	for _, test := range []struct {
		method, body string
		status       int
		says         string
	}{
		{"GET", "", 200, `"on":true`},
		{"POST", `{"on": false}`, 200, `"on":false`},
		{"GET", "", 200, `"on":false`},
		{"POST", `{"of": 1}`, 400, `want {"on": true}`},
	} {
		if status, body := ask(test.method, test.body); status != test.status || !strings.Contains(body, test.says) {
			t.Errorf("%s %s: %d %s", test.method, test.body, status, body)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
