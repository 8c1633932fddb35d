package enginehttp

import (
	"encoding/json"
	"net/http"
	"testing"
)

// The usage of one token is read as engines write it, and what is not told stays
// unknown.
func TestComplete(t *testing.T) {
	for name, c := range map[string]struct {
		answer         string
		prompt, cached int
		fails          bool
	}{
		"llama.cpp":       {`{"usage":{"completion_tokens":4,"prompt_tokens":10,"total_tokens":14,"prompt_tokens_details":{"cached_tokens":7}}}`, 10, 7, false},
		"details off":     {`{"usage":{"prompt_tokens":10,"prompt_tokens_details":null}}`, 10, -1, false},
		"none are cached": {`{"usage":{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":0}}}`, 10, 0, false},
		"lies":            {`{"usage":{"prompt_tokens":-10,"prompt_tokens_details":{"cached_tokens":-7}}}`, 0, -1, false},
		"no usage":        {`{}`, 0, -1, false},
		"no JSON":         {`<html>`, 0, 0, true},
	} {
		var asked map[string]any
		client, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/base/v1/completions" || json.NewDecoder(r.Body).Decode(&asked) != nil {
				t.Errorf("%s: %s", name, r.URL.Path)
			}
			if r.Header.Get("X-Rank") != "3" {
				t.Errorf("%s: the rank is not named: %v", name, r.Header)
			}
			_, _ = w.Write([]byte(c.answer))
		})
		prompt, cached, err := client.Complete(t.Context(), "m", "hi", map[string]string{"X-Rank": "3"})
		if (err != nil) != c.fails || prompt != c.prompt || cached != c.cached {
			t.Errorf("%s: %d %d %v", name, prompt, cached, err)
		}
		if asked["model"] != "m" || asked["prompt"] != "hi" || asked["max_tokens"] != 1. {
			t.Errorf("%s: asked %v", name, asked)
		}
	}
}
