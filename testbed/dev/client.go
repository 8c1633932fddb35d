package dev

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// answer is what a streamed completion told.
type answer struct {
	firstToken   time.Duration
	took         time.Duration
	promptTokens int
	outputTokens int
	// cachedTokens is nil if the engine did not say.
	cachedTokens *int
}

// engineClient calls engines as an application would.
type engineClient struct {
	http  *http.Client
	model string
}

func newEngineClient(model string) *engineClient {
	t := &http.Transport{MaxIdleConnsPerHost: 512, MaxIdleConns: 4096, IdleConnTimeout: 30 * time.Second, DisableCompression: true}
	return &engineClient{http: &http.Client{Transport: t}, model: model}
}

func (c *engineClient) close() { c.http.CloseIdleConnections() }

// complete sends a body and reads the stream to its end. Times
// count from arrival, which may be before the call: placing is part of what a
// user waits for.
func (c *engineClient) complete(ctx context.Context, url string, headers map[string]string, body []byte, arrival time.Time) (answer, error) {
	var out answer
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return out, err
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return out, err
	}
	// The stream is read to its end or given up; closing has nothing to add.
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return out, fmt.Errorf("engine answered %d: %s", resp.StatusCode, b)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 0, 64<<10), 4<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		if out.firstToken == 0 {
			out.firstToken = time.Since(arrival)
		}
		if err := out.takeUsage(data); err != nil {
			return out, err
		}
	}
	out.took = time.Since(arrival)
	return out, lines.Err()
}

// takeUsage reads the usage that only the last chunk carries.
func (a *answer) takeUsage(chunk string) error {
	if !strings.Contains(chunk, `"prompt_tokens"`) {
		return nil
	}
	var c struct {
		Usage *struct {
			PromptTokens     int `json:"prompt_tokens"`
			CompletionTokens int `json:"completion_tokens"`
			Details          *struct {
				CachedTokens *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal([]byte(chunk), &c); err != nil {
		return fmt.Errorf("stream chunk: %w", err)
	}
	if c.Usage == nil {
		return nil
	}
	a.promptTokens, a.outputTokens = c.Usage.PromptTokens, c.Usage.CompletionTokens
	if c.Usage.Details != nil {
		a.cachedTokens = c.Usage.Details.CachedTokens
	}
	return nil
}

// body is a request with a prompt of token ids, and what the placement adds.
func (c *engineClient) body(tokens []uint32, outputTokens int, patch map[string]any) []byte {
	b := make([]byte, 0, 8*len(tokens)+200)
	b = append(b, `{"model":`...)
	b = strconv.AppendQuote(b, c.model)
	b = append(b, `,"prompt":[`...)
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(t), 10)
	}
	b = append(b, `],"max_tokens":`...)
	b = strconv.AppendInt(b, int64(outputTokens), 10)
	for name, v := range patch {
		value, err := json.Marshal(v)
		if err != nil {
			continue // what came as JSON is JSON
		}
		b = append(strconv.AppendQuote(append(b, ','), name), ':')
		b = append(b, value...)
	}
	return append(b, `,"ignore_eos":true,"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`...)
}
