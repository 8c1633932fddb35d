package enginehttp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"
)

// completeTimeout bounds one completion beside the caller's own bound.
const completeTimeout = time.Minute

// Complete asks for one token after a prompt, at /v1/completions, and returns
// the usage: the prompt's tokens, 0 if not told, and those that were reused, -1
// if not told. An empty model is left to the engine; headers are sent besides the
// client's own.
func (c *Client) Complete(ctx context.Context, model, prompt string, headers map[string]string) (promptTokens, cachedTokens int, err error) {
	request := map[string]any{"prompt": prompt, "max_tokens": 1, "temperature": 0}
	if model != "" {
		request["model"] = model
	}
	body, err := json.Marshal(request)
	if err != nil {
		return 0, 0, err
	}
	var buf bytes.Buffer
	if _, err := c.Ask(ctx, Question{Method: http.MethodPost, Path: "/v1/completions", Body: body, Headers: headers, Timeout: completeTimeout}, &buf); err != nil {
		return 0, 0, err
	}
	var answer struct {
		Usage struct {
			PromptTokens int `json:"prompt_tokens"`
			Details      *struct {
				CachedTokens *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if json.Unmarshal(Finite(buf.Bytes()), &answer) != nil {
		return 0, 0, errors.New("/v1/completions: answer is not the JSON that belongs there")
	}
	u := &answer.Usage
	cachedTokens = -1
	if u.Details != nil && u.Details.CachedTokens != nil && *u.Details.CachedTokens >= 0 {
		cachedTokens = *u.Details.CachedTokens
	}
	return max(0, u.PromptTokens), cachedTokens, nil
}
