package engines

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// Answer is what an engine answered.
type Answer struct {
	// Text is the answer.
	Text string
	// Prompt and Output are lengths in tokens, Cached what was reused of the
	// prompt; -1: the engine did not say.
	Prompt, Output, Cached int
	// TokenIDs and PromptIDs are the ids of answer and prompt, if asked for.
	TokenIDs, PromptIDs []uint32
	// FinishReason is the engine's word for why it ended.
	FinishReason string
}

// Client places requests with a coordinator and sends them to engines as their
// placements say.
type Client struct {
	// Placement is the coordinator.
	Placement waypostv1.PlacementServiceClient
	// HTTP sends the requests to the engines.
	HTTP *http.Client
}

// Request is one request.
type Request struct {
	// ID is its request id.
	ID string
	// Tokens are the token ids of its prompt.
	Tokens []uint32
	// Adapter and Salt are as in the API; empty: none.
	Adapter, Salt string
	// Path is where it is sent, "/v1/completions" for example, Body what is
	// sent; the placement's body patch and streaming are added.
	Path string
	Body map[string]any
	// Stream asks for the answer as a stream.
	Stream bool
	// Output is the number of tokens asked for.
	Output int
}

// Place asks the coordinator for a worker.
func (c *Client) Place(ctx context.Context, r *Request) (*waypostv1.Placement, error) {
	resp, err := c.Placement.Place(ctx, &waypostv1.PlaceRequest{
		RequestId: &r.ID, Input: &waypostv1.Input{TokenIds: r.Tokens}, Adapter: &r.Adapter, CacheSalt: &r.Salt,
		OutputTokensMax: proto.Uint32(uint32(max(1, r.Output))), Explain: proto.String("terms"),
	})
	if err != nil {
		return nil, err
	}
	if resp.GetPlacement() == nil {
		return nil, fmt.Errorf("refused: %s: %s", resp.GetRefused().GetReason(), resp.GetRefused().GetDetail())
	}
	return resp.GetPlacement(), nil
}

// Expects is the reuse that would be expected now, without a reservation; -1:
// unknown or refused.
func (c *Client) Expects(ctx context.Context, tokens []uint32, salt string) int {
	resp, err := c.Placement.Place(ctx, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens}, CacheSalt: &salt, Reserve: proto.Bool(false)})
	if err != nil || resp.GetPlacement().GetExpected() == nil || resp.GetPlacement().GetExpected().ReuseTokens == nil {
		return -1
	}
	return int(resp.GetPlacement().GetExpected().GetReuseTokens())
}

// Send sends a request to the worker of its placement and reads the answer.
func (c *Client) Send(ctx context.Context, p *waypostv1.Placement, r *Request) (Answer, error) {
	out := Answer{Cached: -1}
	body := maps.Clone(r.Body)
	if r.Stream {
		body["stream"], body["stream_options"] = true, map[string]any{"include_usage": true}
	}
	maps.Copy(body, p.GetWorker().GetBodyPatch().AsMap())
	b, err := json.Marshal(body)
	if err != nil {
		return out, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.GetWorker().GetUrl()+r.Path, bytes.NewReader(b))
	if err != nil {
		return out, err
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range p.GetWorker().GetHeaders() {
		req.Header.Set(k, v)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return out, fmt.Errorf("%s answered %d: %s", r.Path, resp.StatusCode, text)
	}
	if !r.Stream {
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			return out, err
		}
		return out, out.take(raw)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 0, 64<<10), 8<<20)
	for lines.Scan() {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok && data != "[DONE]" {
			if err := out.take([]byte(data)); err != nil {
				return out, err
			}
		}
	}
	return out, lines.Err()
}

// take reads an answer or a chunk of one.
func (a *Answer) take(raw []byte) error {
	var c struct {
		Choices []struct {
			Text     string   `json:"text"`
			TokenIDs []uint32 `json:"token_ids"`
			Prompt   []uint32 `json:"prompt_token_ids"`
			Message  struct {
				Content string `json:"content"`
			} `json:"message"`
			Delta struct {
				Content string `json:"content"`
			} `json:"delta"`
			Finish *string `json:"finish_reason"`
		} `json:"choices"`
		Usage *struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Details    *struct {
				Cached *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	for _, ch := range c.Choices {
		a.Text += ch.Text + ch.Message.Content + ch.Delta.Content
		a.TokenIDs = append(a.TokenIDs, ch.TokenIDs...)
		a.PromptIDs = append(a.PromptIDs, ch.Prompt...)
		if ch.Finish != nil {
			a.FinishReason = *ch.Finish
		}
	}
	if u := c.Usage; u != nil {
		a.Prompt, a.Output = u.Prompt, u.Completion
		if u.Details != nil && u.Details.Cached != nil {
			a.Cached = *u.Details.Cached
		}
	}
	return nil
}

// Report tells the coordinator how a request ended and returns the class it
// gives to the difference.
func (c *Client) Report(ctx context.Context, p *waypostv1.Placement, a *Answer, sent error) (class string, err error) {
	req := &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: proto.String("done")}
	if sent != nil {
		req.Result, req.ErrorClass = proto.String("failed"), proto.String("worker")
	} else {
		req.PromptTokens, req.OutputTokens = proto.Uint32(uint32(a.Prompt)), proto.Uint32(uint32(a.Output))
		if a.Cached >= 0 {
			req.CachedTokens = proto.Uint32(uint32(a.Cached))
		}
	}
	resp, err := c.Placement.ReportOutcome(ctx, req)
	if err != nil {
		return "", err
	}
	return resp.GetReuseClass(), nil
}

// Serve places, sends and reports a request. An error of the engine is reported
// as a failure and returned.
func (c *Client) Serve(ctx context.Context, r *Request) (Answer, *waypostv1.Placement, string, error) {
	p, err := c.Place(ctx, r)
	if err != nil {
		return Answer{}, nil, "", fmt.Errorf("place: %w", err)
	}
	a, sent := c.Send(ctx, p, r)
	class, err := c.Report(ctx, p, &a, sent)
	if sent != nil {
		return a, p, class, sent
	}
	return a, p, class, err
}

// Ask posts JSON to an engine itself, past any placement, and reads its JSON
// answer; a nil answer is not read.
func (c *Client) Ask(url string, body, answer any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	resp, err := c.HTTP.Post(url, "application/json", bytes.NewReader(b))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: status %d: %.300s", url, resp.StatusCode, raw)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(raw, answer)
}
