package ledger

import (
	"errors"
	"math"
	"strings"
	"testing"

	"waypost/gossip/prefix"
)

func goodOffer(seq uint64) Offer {
	return Offer{AgeMs: 5, Claim: Claim{
		Seq: seq, EngineProcess: 9, PromptTokens: 1000, UncachedTokens: 400, OutputTokens: 50, Sequences: 1,
		Keys: []prefix.Key{1, 2}, KeyDepths: []uint32{616, 992},
	}}
}

func TestFramesNameTheField(t *testing.T) {
	for field, change := range map[string]func(*ClaimFrame){
		"coordinator":                  func(f *ClaimFrame) { f.Coordinator = 0 },
		"claims: 5000":                 func(f *ClaimFrame) { f.Offers = make([]Offer, 5000) },
		"claims[0].seq: 3":             func(f *ClaimFrame) { f.Prev = 3 },
		"claims[1].seq: 3":             func(f *ClaimFrame) { f.Offers = append(f.Offers, goodOffer(3)) },
		"engineProcess":                func(f *ClaimFrame) { f.Offers[0].EngineProcess = 0 },
		"ageMs: NaN":                   func(f *ClaimFrame) { f.Offers[0].AgeMs = math.NaN() },
		"ageMs: -1":                    func(f *ClaimFrame) { f.Offers[0].AgeMs = -1 },
		"promptTokens":                 func(f *ClaimFrame) { f.Offers[0].PromptTokens = 1 << 25 },
		"points":                       func(f *ClaimFrame) { f.Offers[0].Points = make([]prefix.Key, 63) },
		"uncachedTokens":               func(f *ClaimFrame) { f.Offers[0].UncachedTokens = 1001 },
		"outputTokens":                 func(f *ClaimFrame) { f.Offers[0].OutputTokens = math.Inf(1) },
		"n: 1000":                      func(f *ClaimFrame) { f.Offers[0].Sequences = 1000 },
		"keyDepths: 2 depths":          func(f *ClaimFrame) { f.Offers[0].Keys = f.Offers[0].Keys[:1] },
		"keyDepths[1]: 616":            func(f *ClaimFrame) { f.Offers[0].KeyDepths[1] = 616 },
		"keyDepths[1]: 1001":           func(f *ClaimFrame) { f.Offers[0].KeyDepths[1] = 1001 },
		"claims[0]: bad ledger frame:": func(f *ClaimFrame) { f.Offers[0].KeyDepths[0] = 0 },
	} {
		f := ClaimFrame{Coordinator: 1, Agent: 2, Offers: []Offer{goodOffer(3)}}
		if err := f.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&f)
		if err := f.Validate(); !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
	for field, change := range map[string]func(*MarkFrame){
		"coordinator":            func(f *MarkFrame) { f.Coordinator = 0 },
		"marks: 5000":            func(f *MarkFrame) { f.Marks = make([]Marked, 5000) },
		"marks[0].seq":           func(f *MarkFrame) { f.Marks[0].Seq = 0 },
		"marks[0].what":          func(f *MarkFrame) { f.Marks[0].What = "finished" },
		"marks[0].ageMs":         func(f *MarkFrame) { f.Marks[0].AgeMs = 1e9 },
		"marks[0].cachedTokens":  func(f *MarkFrame) { f.Marks[0].CachedTokens = new(-1) },
		"marks[0].outputTokens":  func(f *MarkFrame) { f.Marks[0].OutputTokens = -1 },
		"learnt: 5000":           func(f *MarkFrame) { f.Learnt = make([]LearntPrompt, 5000) },
		"learnt[0].seq":          func(f *MarkFrame) { f.Learnt = []LearntPrompt{{PromptTokens: 16}} },
		"learnt[0].promptTokens": func(f *MarkFrame) { f.Learnt = []LearntPrompt{{Seq: 1}} },
		"learnt[0].points": func(f *MarkFrame) {
			f.Learnt = []LearntPrompt{{Seq: 1, PromptTokens: 31, Points: make([]prefix.Key, 2)}}
		},
	} {
		f := MarkFrame{Coordinator: 1, Marks: []Marked{{Seq: 1, What: MarkDone, OutputTokens: 7}}}
		if err := f.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&f)
		if err := f.Validate(); !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
	for field, change := range map[string]func(*Placed){
		"worker: is empty": func(p *Placed) { p.Worker = "" },
		"tenant":           func(p *Placed) { p.Tenant = strings.Repeat("x", 2000) },
		"requestId":        func(p *Placed) { p.RequestID = strings.Repeat("x", 2000) },
		"seq":              func(p *Placed) { p.Seq = 0 },
	} {
		p := Placed{Worker: "h/e/0", Offer: goodOffer(1)}
		if err := p.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&p)
		if err := p.Validate(); !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
}

func TestOfferTurnsAgeIntoTheReceiversTime(t *testing.T) {
	o := goodOffer(4)
	o.Sequences, o.MadeMs = 0, 1e9
	if c := o.Received(2000); c.MadeMs != 1995 || c.Sequences != 1 || c.Seq != 4 {
		t.Errorf("received as %+v", c)
	}
}
