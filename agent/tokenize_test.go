package agent

import (
	"strings"
	"testing"
	"time"
)

// Engines are asked about a burst of long texts, then about a tenth of a core's
// worth each second; what is refused costs nothing.
func TestTokenizingIsBudgetedBySize(t *testing.T) {
	var a allowance
	now := time.Now()
	const text = 256 << 10
	asked := 0
	for range 100 {
		if a.take(now, text) {
			asked++
		}
	}
	if asked != tokenizeBurstBytes/text {
		t.Errorf("%d texts at once, want %d", asked, tokenizeBurstBytes/text)
	}
	for i := range 600 {
		if a.take(now.Add(time.Duration(i+1)*100*time.Millisecond), text) {
			asked++
		}
	}
	if most := (tokenizeBurstBytes + 60*tokenizeBytesPerSec) / text; asked > most || asked < most-2 {
		t.Errorf("%d texts within a minute, want %d", asked, most)
	}
	if a.take(now.Add(time.Hour), tokenizeBurstBytes+1) {
		t.Error("a text above the burst is asked about")
	}
	if !a.take(now.Add(time.Hour), tokenizeBurstBytes) {
		t.Error("the allowance does not come back")
	}
}

// A question that is refused, for want of a place or of budget, takes neither.
func TestRefusedQuestionsCostNothing(t *testing.T) {
	h := newLanes(nil)
	now := time.Now()
	for range tokenizeAtOnce {
		if why := h.mayAsk(now, 1); why != "" {
			t.Fatal(why)
		}
	}
	for range 100 {
		if why := h.mayAsk(now, tokenizeBurstBytes/4); !strings.HasPrefix(why, "busy") {
			t.Fatalf("refused because %q", why)
		}
	}
	for range tokenizeAtOnce {
		<-h.asks
	}
	if why := h.mayAsk(now, tokenizeBurstBytes); !strings.HasPrefix(why, "over budget") {
		t.Fatalf("refused because %q", why)
	}
	if why := h.mayAsk(now, tokenizeBurstBytes-tokenizeAtOnce); why != "" {
		t.Errorf("what was refused was paid for: %s", why)
	}
	if n := len(h.asks); n != 1 {
		t.Errorf("%d places are taken by one question", n)
	}
}
