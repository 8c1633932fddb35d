package poller

import (
	"context"
	"errors"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/promtext"
)

// LearnModels fills in what an engine's list at /v1/models tells: the first that
// is no adapter of another one is the served model, the others are aliases.
func LearnModels(ctx context.Context, c *enginehttp.Client, f *engine.Facts) error {
	var models struct {
		Data []struct {
			ID     string           `json:"id"`
			Parent *string          `json:"parent"`
			MaxLen promtext.Reading `json:"max_model_len"`
		} `json:"data"`
	}
	if err := c.GetJSON(ctx, "/v1/models", &models); err != nil {
		return err
	}
	for _, m := range models.Data {
		if m.Parent == nil && f.Model == "" {
			f.Model, f.MaxModelTokens = m.ID, m.MaxLen.Whole(engine.MaxTokens)
			continue
		}
		f.Aliases = append(f.Aliases, m.ID)
	}
	if f.Model == "" {
		return errors.New("/v1/models lists no model")
	}
	return nil
}
