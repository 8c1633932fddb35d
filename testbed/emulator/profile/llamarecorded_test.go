package profile

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// llamaPrompts are the token ids of the recorded conversations, as the real
// server's tokenizer gave them, and of its answers.
func llamaPrompts(t *testing.T) map[string][]uint32 {
	t.Helper()
	b, err := os.ReadFile("testdata/llamacpp-prompts.json")
	if err != nil {
		t.Fatal(err)
	}
	var out map[string][]uint32
	if err := json.Unmarshal(b, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// What a real server said of each request: the tokens it reused, then what each
// slot held, "-" if it was never used. Both builds said the same.
var llamaRecorded = []struct {
	name    string
	options slotOptions
	script  string
}{
	{"four slots", slotOptions{slots: 4, similarity: .1, hostTokens: 30_000_000}, `
		A1     0    - - - 476
		A2     476  - - - 498
		A2     494  - - - 498
		A2     494  - - - 498
		A2     494  - - - 498
		A2     494  - - - 498
		AP     495  - - - 859
		A2     494  - - - 498
		B1     0    - - 520 498
		A3     495  - - 520 512
		B2     520  - - 538 512
		C0     0    - 474 538 512
		C1     0    474 474 538 512
		C2     3    474 474 538 474
		C3     3    474 474 474 474
		A3     508  474 512 474 474
		B2     534  538 512 474 474
		AB     178  538 476 474 474
		A3     508  538 512 474 474
		A3@2   495  538 512 512 474
		A3@99  508  538 512 512 512
		A3!    0    538 512 512 512`},
	{"no host cache", slotOptions{slots: 4, similarity: .1}, `
		C0 0  - - - 474
		C1 0  - - 474 474
		C2 0  - 474 474 474
		C3 0  474 474 474 474
		C4 4  474 474 474 474
		C5 4  474 474 474 474
		C0 4  474 474 474 474`},
	{"one buffer, idle slots saved", slotOptions{slots: 4, similarity: .1, hostTokens: 30_000_000, unified: true}, `
		C0 0    - - - 474
		C1 0    - - 474 0
		C2 0    - 474 0 0
		C3 0    474 0 0 0
		C4 0    0 0 0 474
		C5 0    0 0 474 0
		C0 470  0 474 0 0
		C4 470  474 0 0 0`},
}

func TestLlamaCppRecordings(t *testing.T) {
	prompts := llamaPrompts(t)
	answer := prompts["answerA"]
	for _, test := range llamaRecorded {
		t.Run(test.name, func(t *testing.T) {
			c := newSlotCache(test.options)
			var want, got []string
			for line := range strings.Lines(test.script) {
				f := strings.Fields(line)
				if len(f) == 0 {
					continue
				}
				want = append(want, strings.Join(f, " "))
				name, pin, reuse := f[0], -1, true
				if n, p, ok := strings.Cut(name, "@"); ok {
					name = n
					fmt.Sscan(p, &pin)
				}
				if n, ok := strings.CutSuffix(name, "!"); ok {
					name, reuse = n, false
				}
				prompt := prompts[name]
				if prompt == nil {
					t.Fatalf("no prompt %q", name)
				}
				h, ok := c.begin(prompt, pin, reuse)
				if !ok {
					t.Fatalf("%s: no slot", f[0])
				}
				c.end(&h, append(append([]uint32(nil), prompt...), answer...))
				s := fmt.Sprintf("%s %d", f[0], h.cached)
				for i := range c.slots {
					if c.slots[i].used == 0 {
						s += " -"
					} else {
						s += fmt.Sprintf(" %d", len(c.slots[i].tokens))
					}
				}
				got = append(got, s)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("(-engine +emulator):\n%s", d)
			}
		})
	}
}
