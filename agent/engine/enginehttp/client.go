package enginehttp

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"waypost/gossip/nonblock"
)

// The bounds of answers, in bytes, and of the time they may take.
const (
	MaxPageBytes   = 8 << 20
	MaxFactsBytes  = 4 << 20
	MaxTokensBytes = 32 << 20

	// FactsTimeout bounds a question about what seldom changes.
	FactsTimeout = 5 * time.Second

	// MaxMembers bounds each list and each object of an answer: what is decoded of
	// one takes many times the bytes of an empty member.
	MaxMembers = 1 << 16

	// bytesPerToken is what an answer has at most for a byte that was sent: the id
	// of a token of its own, and what parts it from the next.
	bytesPerToken = 16

	maxErrorBytes  = 512
	maxHeaderBytes = 64 << 10
	maxNesting     = 10_000 // as encoding/json has it
	maxConnections = 8
)

// The reasons for refusing an answer.
var (
	ErrTooLarge   = errors.New("answer too large")
	ErrCompressed = errors.New("answer is compressed though that was not asked for")
	ErrRedirect   = errors.New("answer redirects elsewhere")
	ErrTooMany    = errors.New("answer lists too much")
	// ErrNotHTTP stands for what the transport says of an answer to a question
	// with a prompt: it may quote the answer.
	ErrNotHTTP = errors.New("answer cannot be read as HTTP")
)

// StatusError is an answer other than 200.
type StatusError struct {
	// Path is the path that was asked.
	Path string
	// Code is the HTTP status.
	Code int
	// Text is the beginning of the answer. It is empty for all but GET: engines
	// repeat the prompt in what they complain about.
	Text string
}

// Error implements error.
func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s answered %d", e.Path, e.Code)
	if e.Text != "" {
		s += ": " + e.Text
	}
	return s
}

// Status is the status of a StatusError, else 0.
func Status(err error) int {
	var s *StatusError
	if errors.As(err, &s) {
		return s.Code
	}
	return 0
}

// Missing says that an engine does not have a route, or not for us.
func Missing(err error) bool {
	code := Status(err)
	return code == http.StatusNotFound || code == http.StatusForbidden || code == http.StatusMethodNotAllowed
}

// Options configures a Client.
type Options struct {
	// URL is the engine's base URL, "http://host:port" with a path or none.
	URL string
	// APIKey is sent as a bearer token; empty: none.
	APIKey string
	// DialTimeout bounds one attempt to connect. 1 s.
	DialTimeout time.Duration
}

// Client asks one engine. It follows no redirects, uses no proxy, takes no
// compression and reads no more than it is told to. It is safe for concurrent
// use.
type Client struct {
	base string
	host string
	key  string
	http *http.Client
	// odd counts answers with a value that its field cannot have.
	odd atomic.Int64
}

// New makes a client; it opens nothing.
func New(o Options) (*Client, error) {
	u, err := url.Parse(o.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("engine URL is %q: must be http://host:port", o.URL)
	}
	u.Path, u.RawQuery, u.Fragment = strings.TrimRight(u.Path, "/"), "", ""
	if o.DialTimeout <= 0 {
		o.DialTimeout = time.Second
	}
	return &Client{
		base: u.String(), host: u.Hostname(), key: strings.TrimSpace(o.APIKey),
		http: &http.Client{
			Transport: &http.Transport{
				DialContext:            nonblock.Dial(&net.Dialer{Timeout: o.DialTimeout}),
				TLSHandshakeTimeout:    FactsTimeout,
				DisableCompression:     true,
				MaxConnsPerHost:        maxConnections,
				MaxIdleConnsPerHost:    4,
				IdleConnTimeout:        time.Minute,
				MaxResponseHeaderBytes: maxHeaderBytes,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

// Host is the host of the engine's URL, without the port.
func (c *Client) Host() string { return c.host }

// Close closes the idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Question is one request to an engine.
type Question struct {
	// Method is GET if empty.
	Method string
	// Path is below the base URL, with a query or none.
	Path string
	// Body is sent as JSON; nil: none.
	Body []byte
	// Headers are sent besides the client's own; nil: none.
	Headers map[string]string
	// MaxBytes bounds the answer. 4 MiB.
	MaxBytes int64
	// Timeout bounds the question with its answer. 5 s.
	Timeout time.Duration
}

// Ask reads the answer to a question into buf and returns its header. Anything
// but status 200 is an error.
func (c *Client) Ask(ctx context.Context, q Question, buf *bytes.Buffer) (http.Header, error) {
	if q.Method == "" {
		q.Method = http.MethodGet
	}
	if q.MaxBytes <= 0 {
		q.MaxBytes = MaxFactsBytes
	}
	if q.Timeout <= 0 {
		q.Timeout = FactsTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, q.Timeout)
	defer cancel()
	var in io.Reader
	if q.Body != nil {
		in = bytes.NewReader(q.Body)
	}
	req, err := http.NewRequestWithContext(ctx, q.Method, c.base+q.Path, in)
	if err != nil {
		return nil, err
	}
	for name, value := range q.Headers {
		req.Header.Set(name, value)
	}
	req.Header.Set("Accept-Encoding", "identity")
	if q.Body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, q.failure(err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		return nil, fmt.Errorf("%s: %w", q.Path, ErrRedirect)
	case resp.StatusCode != http.StatusOK:
		e := &StatusError{Path: q.Path, Code: resp.StatusCode}
		if q.Method == http.MethodGet {
			text, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBytes))
			e.Text = strings.ToValidUTF8(strings.TrimSpace(string(text)), "?")
		}
		return nil, e
	}
	if e := resp.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		return nil, fmt.Errorf("%s: %w", q.Path, ErrCompressed)
	}
	buf.Reset()
	n, err := buf.ReadFrom(io.LimitReader(resp.Body, q.MaxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", q.Path, q.failure(err))
	}
	if n > q.MaxBytes {
		return nil, fmt.Errorf("%s: %w: more than %d bytes", q.Path, ErrTooLarge, q.MaxBytes)
	}
	return resp.Header, nil
}

// failure is an error of the transport, without what it may quote of the answer
// if that may repeat a prompt.
func (q *Question) failure(err error) error {
	if q.Method == http.MethodGet {
		return err
	}
	cause := err
	var asked *url.Error // says of itself that it is an error of the network
	if errors.As(err, &asked) {
		cause = asked.Err
	}
	for _, known := range []error{context.Canceled, io.EOF, io.ErrUnexpectedEOF} {
		if errors.Is(cause, known) {
			return err
		}
	}
	var network net.Error
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.As(cause, &network), errors.As(cause, &certificate):
		return err
	case asked != nil:
		return &url.Error{Op: asked.Op, URL: asked.URL, Err: ErrNotHTTP}
	}
	return ErrNotHTTP
}

// GetJSON reads the JSON at a path into v, as Decode does.
func (c *Client) GetJSON(ctx context.Context, path string, v any) error {
	return c.askJSON(ctx, Question{Path: path}, v)
}

// PostJSON sends a body as JSON and reads the answer into v. The answer may be
// as large as the token ids of what was sent, with a template around it.
func (c *Client) PostJSON(ctx context.Context, path string, body, v any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	most := min(MaxFactsBytes/4+bytesPerToken*int64(len(b)), MaxTokensBytes)
	return c.askJSON(ctx, Question{Method: http.MethodPost, Path: path, Body: b, MaxBytes: most}, v)
}

func (c *Client) askJSON(ctx context.Context, q Question, v any) error {
	var buf bytes.Buffer
	if _, err := c.Ask(ctx, q, &buf); err != nil {
		return err
	}
	if q.Body != nil {
		if json.Unmarshal(Finite(buf.Bytes()), v) != nil {
			// The decoder's own text may quote what was sent.
			return fmt.Errorf("%s: answer is not the JSON that belongs there", q.Path)
		}
		return nil
	}
	odd, err := Decode(buf.Bytes(), v)
	if odd {
		c.odd.Add(1)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", q.Path, err)
	}
	return nil
}

// Odd is how many answers to GetJSON held a value that its field cannot have,
// since the last call.
func (c *Client) Odd() int { return int(c.odd.Swap(0)) }

// Decode reads JSON into v. A value that its field cannot have, such as a count of
// 2^63, is left out and reported as odd: it must not take the rest of an answer
// along. NaN and Infinity are read as -1. No list may have more than [MaxMembers].
func Decode(b []byte, v any) (odd bool, err error) {
	if err := Widest(b, MaxMembers); err != nil {
		return false, err
	}
	err = json.Unmarshal(Finite(b), v)
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) && wrong.Field != "" {
		return true, nil // the decoder went on behind it
	}
	return false, err
}

// Widest refuses JSON in which a list or an object has more members than most.
func Widest(b []byte, most int) error {
	var members []int // of what is open, the outermost first
	for _, c := range outsideTexts(b) {
		switch {
		case c == '[' || c == '{':
			if len(members) == maxNesting {
				return fmt.Errorf("%w: it nests deeper than %d", ErrTooMany, maxNesting)
			}
			members = append(members, 1)
		case c == ']' || c == '}':
			members = members[:max(0, len(members)-1)]
		case c == ',' && len(members) > 0:
			n := len(members) - 1
			if members[n]++; members[n] > most {
				return fmt.Errorf("%w: more than %d members", ErrTooMany, most)
			}
		}
	}
	return nil
}

// Finite replaces, in place, the words NaN and Infinity by -1, which is no count,
// share or time either: Python writes them as JSON, where one of them would spoil
// the whole answer.
func Finite(b []byte) []byte {
	for i, c := range outsideTexts(b) {
		switch {
		case c == 'N' && bytes.HasPrefix(b[i:], []byte("NaN")):
			copy(b[i:], "-1 ")
		case c == 'I' && bytes.HasPrefix(b[i:], []byte("Infinity")):
			if i > 0 && b[i-1] == '-' {
				b[i-1] = ' '
			}
			copy(b[i:], "-1      ")
		}
	}
	return b
}

// outsideTexts are the bytes of JSON, with their places, that are in no text.
func outsideTexts(b []byte) iter.Seq2[int, byte] {
	return func(yield func(int, byte) bool) {
		inText := false
		for i := 0; i < len(b); i++ {
			switch c := b[i]; {
			case inText && c == '\\':
				i++
			case c == '"':
				inText = !inText
			case !inText && !yield(i, c):
				return
			}
		}
	}
}
