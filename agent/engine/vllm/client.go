package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// The bounds of answers and of the time they may take.
const (
	maxPageBytes   = 8 << 20
	maxFactsBytes  = 4 << 20
	maxTokensBytes = 32 << 20
	maxErrorBytes  = 512

	pageTimeout  = time.Second // unless the options say otherwise
	factsTimeout = 5 * time.Second
)

var (
	errTooLarge   = errors.New("answer too large")
	errCompressed = errors.New("answer is compressed though that was not asked for")
	errRedirect   = errors.New("answer redirects elsewhere")
)

// statusError is an answer other than 200.
type statusError struct {
	path string
	code int
	body string
}

func (e *statusError) Error() string {
	s := fmt.Sprintf("%s answered %d", e.path, e.code)
	if e.body != "" {
		s += ": " + e.body
	}
	return s
}

// statusOf gives the status of a statusError, else 0.
func statusOf(err error) int {
	var s *statusError
	if errors.As(err, &s) {
		return s.code
	}
	return 0
}

// client talks to one engine. It follows no redirects, uses no proxy, takes no
// compression and reads no more than it is told to.
type client struct {
	base *url.URL
	key  string
	http *http.Client
}

func newClient(target, key string, dialTimeout time.Duration) (*client, error) {
	u, err := url.Parse(target)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("engine URL is %q: must be http://host:port", target)
	}
	u.Path, u.RawQuery, u.Fragment = strings.TrimRight(u.Path, "/"), "", ""
	return &client{
		base: u, key: strings.TrimSpace(key),
		http: &http.Client{
			Transport: &http.Transport{
				DialContext:            (&net.Dialer{Timeout: dialTimeout}).DialContext,
				DisableCompression:     true,
				MaxIdleConnsPerHost:    4,
				IdleConnTimeout:        time.Minute,
				MaxResponseHeaderBytes: 64 << 10,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

func (c *client) close() { c.http.CloseIdleConnections() }

// get reads a path into buf, which it may replace by a larger one.
func (c *client) get(ctx context.Context, path string, buf *bytes.Buffer, limit int64) error {
	return c.do(ctx, http.MethodGet, path, nil, buf, limit)
}

// getJSON reads a path into v.
func (c *client) getJSON(ctx context.Context, path string, v any) error {
	ctx, cancel := context.WithTimeout(ctx, factsTimeout)
	defer cancel()
	var buf bytes.Buffer
	if err := c.get(ctx, path, &buf, maxFactsBytes); err != nil {
		return err
	}
	if err := json.Unmarshal(buf.Bytes(), v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func (c *client) do(ctx context.Context, method, path string, body []byte, buf *bytes.Buffer, limit int64) error {
	var in io.Reader
	if body != nil {
		in = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base.String()+path, in)
	if err != nil {
		return err
	}
	req.Header.Set("Accept-Encoding", "identity")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		return fmt.Errorf("%s: %w", path, errRedirect)
	case resp.StatusCode != http.StatusOK:
		text, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBytes))
		return &statusError{path: path, code: resp.StatusCode, body: strings.ToValidUTF8(strings.TrimSpace(string(text)), "?")}
	}
	if e := resp.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		return fmt.Errorf("%s: %w", path, errCompressed)
	}
	buf.Reset()
	n, err := buf.ReadFrom(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if n > limit {
		return fmt.Errorf("%s: %w: more than %d bytes", path, errTooLarge, limit)
	}
	return nil
}

// tokenize posts a body to /tokenize.
func (c *client) tokenize(ctx context.Context, body any) ([]uint32, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	if err := c.do(ctx, http.MethodPost, "/tokenize", b, &buf, maxTokensBytes); err != nil {
		return nil, err
	}
	var answer struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := json.Unmarshal(buf.Bytes(), &answer); err != nil {
		return nil, fmt.Errorf("/tokenize: %w", err)
	}
	if answer.Tokens == nil {
		return nil, errors.New("/tokenize: answer has no tokens")
	}
	return answer.Tokens, nil
}

// templateFields are the fields of a chat request that decide its rendering.
var templateFields = []string{
	"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
}

// renderBody makes the body for /tokenize of a chat request: the same fields
// that generation would render, and those that reach the template under other
// names.
func renderBody(chatJSON []byte) (map[string]json.RawMessage, error) {
	var chat map[string]json.RawMessage
	if err := json.Unmarshal(chatJSON, &chat); err != nil {
		return nil, fmt.Errorf("chat request: %w", err)
	}
	if len(chat["messages"]) == 0 {
		return nil, errors.New("chat request: messages is missing")
	}
	body := map[string]json.RawMessage{}
	for _, f := range templateFields {
		if v, ok := chat[f]; ok {
			body[f] = v
		}
	}
	effort, ok := chat["reasoning_effort"]
	if !ok || string(effort) == "null" {
		return body, nil
	}
	kwargs := map[string]json.RawMessage{}
	if v, ok := body["chat_template_kwargs"]; ok && string(v) != "null" {
		if err := json.Unmarshal(v, &kwargs); err != nil {
			return nil, fmt.Errorf("chat request: chat_template_kwargs: %w", err)
		}
	}
	if _, ok := kwargs["reasoning_effort"]; !ok {
		kwargs["reasoning_effort"] = effort
	}
	var err error
	body["chat_template_kwargs"], err = json.Marshal(kwargs)
	return body, err
}
