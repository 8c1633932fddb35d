package memo

import (
	"fmt"
	"strings"
	"testing"
)

// A boundary that failed too often is not believed for what comes behind it
// either: a system text of which the middle changes from time to time was shared
// as a whole by the last two prompts, which says nothing of the next one, however
// often a message behind it was seen.
func TestDistrustReachesWhatIsBehind(t *testing.T) {
	m := newMemo(t)
	front, back := someText(rng(1), 170), someText(rng(2), 70)
	minute := 0
	render := func(d *dialogue) []uint32 {
		return words(each(d.Messages, func(i int, m turn) string {
			if i == 0 {
				return fmt.Sprintf(" <|system|> %s minute%d %s <|end|>", front, minute, back)
			}
			return plain(m)
		}) + ask)
	}
	system := "system:" + front + back
	for i := range 24 {
		minute = i / 2
		d := talk(system, "user:"+someText(rng(uint64(10+i)), 20))
		teach(t, m, d, render(d))
	}
	// What is behind the message is long by what its bytes may be, so that only the
	// system text could tell how far the prompts are alike up to the message.
	long := strings.Repeat("1234567890123456789 ", 200)
	d := talk(system, "user:the same", "assistant:"+long, "user:one")
	teach(t, m, d, render(d))
	minute++
	d = talk(system, "user:the same", "assistant:other words", "user:two")
	var p Prediction
	var rd Reader
	q, err := rd.Chat(vectorKey, "p", m.Epoch(), d.body())
	if err != nil {
		t.Fatal(err)
	}
	if m.Lookup(q, &p) && p.Tokens > len(words(front))+8 {
		t.Errorf("%d tokens predicted, of which %d are shared by all", p.Tokens, len(words(front)))
	}
}
