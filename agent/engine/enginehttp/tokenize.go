package enginehttp

import (
	"context"
	"encoding/json"
	"errors"
)

// TokenIDs posts a body to /tokenize and returns the token ids of the answer.
func (c *Client) TokenIDs(ctx context.Context, body any) ([]uint32, error) {
	var answer struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := c.PostJSON(ctx, "/tokenize", body, &answer); err != nil {
		return nil, err
	}
	if answer.Tokens == nil {
		return nil, errors.New("/tokenize: answer has no tokens")
	}
	return answer.Tokens, nil
}

// ChatFields are those of the named fields that a chat request has, as they
// stand there. Errors quote nothing of the request.
func ChatFields(chatJSON []byte, names []string) (map[string]json.RawMessage, error) {
	var chat map[string]json.RawMessage
	if json.Unmarshal(chatJSON, &chat) != nil {
		return nil, errors.New("chat request: is no JSON object")
	}
	if len(chat["messages"]) == 0 {
		return nil, errors.New("chat request: messages is missing")
	}
	fields := map[string]json.RawMessage{}
	for _, name := range names {
		if v, ok := chat[name]; ok {
			fields[name] = v
		}
	}
	return fields, nil
}
