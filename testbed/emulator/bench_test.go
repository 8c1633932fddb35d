package emulator

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"testing"
)

// benchEngine takes no time for its steps: what is left is the emulator's own.
func benchEngine(b *testing.B) (*Engine, *http.Client) {
	o := Options{Model: "tiny", Speed: 1e6}
	e, err := Start(o)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(e.Close)
	tr := &http.Transport{MaxIdleConnsPerHost: 64}
	b.Cleanup(tr.CloseIdleConnections)
	return e, &http.Client{Transport: tr}
}

func benchRequests(b *testing.B, promptTokens, outputTokens int, stream bool) {
	e, c := benchEngine(b)
	prompt := ids(0, promptTokens)
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			body, err := json.Marshal(object{"prompt": prompt, "max_tokens": outputTokens, "ignore_eos": true, "stream": stream})
			if err != nil {
				b.Error(err)
				return
			}
			resp, err := c.Post(e.URL()+"/v1/completions", "application/json", bytes.NewReader(body))
			if err != nil {
				b.Error(err)
				return
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
				b.Errorf("status %d, %v", resp.StatusCode, err)
			}
			resp.Body.Close()
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
}

// BenchmarkLongPrompt is the cost of a cached prompt of 12,000 ids.
func BenchmarkLongPrompt(b *testing.B) { benchRequests(b, 12000, 1, false) }

// BenchmarkStream is the cost of 200 streamed tokens.
func BenchmarkStream(b *testing.B) { benchRequests(b, 100, 200, true) }

func BenchmarkTokenIDs(b *testing.B) {
	raw, err := json.Marshal(ids(100000, 12000))
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tokenIDs(raw); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkMetricsPage(b *testing.B) {
	e, c := benchEngine(b)
	b.ReportAllocs()
	for b.Loop() {
		resp, err := c.Get(e.URL() + "/metrics")
		if err != nil {
			b.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}
