package memo

import (
	"testing"

	"waypost/gossip/prefix"
)

// What an engine stored of prompts teaches nearly what their ids would, though
// their last tokens are missing, and nothing that is not so.
func TestStoredPromptsTeach(t *testing.T) {
	if testing.Short() {
		t.Skip("left out with -short: several replays of one workload")
	}
	shape := defaultMix()
	shape.conversations /= 3
	for _, c := range []struct {
		render string
		block  int
		cover  float64
	}{{"append only", 16, .93}, {"append only", 128, .9}, {"empty think block in the last turn", 32, .93}} {
		p := replay{memos: []*Memo{newMemo(t)}, block: c.block}
		got := p.run(t, workload(3, shape, rendererOf(c.render)))
		t.Logf("%s, blocks of %d: %s", c.render, c.block, got)
		if got.cover() < c.cover || got.overShare() > .001 {
			t.Errorf("%s, blocks of %d: cover %.4f, want %.2f; over %.5f", c.render, c.block, got.cover(), c.cover, got.overShare())
		}
	}
}

// Blocks that end before what is known of a prompt say nothing against it.
func TestStoredPromptThatEndsEarlyChangesNothing(t *testing.T) {
	m := newMemo(t)
	d := talk("system:"+someText(rng(1), 1500), "user:hello")
	ids := words(appendOnly(d))
	teach(t, m, d, ids)
	var rd Reader
	r, err := rd.Chat(vectorKey, "p", m.Epoch(), d.body())
	if err != nil {
		t.Fatal(err)
	}
	var p, q Prediction
	m.Lookup(r, &p)
	m.LearnStored(r, prefix.PointsOf(nil, ids[:1024]), &p)
	m.Lookup(r, &q)
	if q.Tokens != p.Tokens || p.Tokens <= 1024 || m.Stats().Disagreements > 0 || m.Stats().Wrong > 0 {
		t.Errorf("%d tokens known, before %d: %+v", q.Tokens, p.Tokens, m.Stats())
	}
	check(t, m)
}
