package engine

import (
	"errors"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestCapabilities(t *testing.T) {
	c := ReportsCachedTokens | OmitsSalts
	if diff := cmp.Diff([]string{"cached-tokens", "omits-salts"}, c.Names()); diff != "" {
		t.Error(diff)
	}
	if !c.Has(OmitsSalts) || c.Has(OmitsSalts|OmitsAdapters) || c.With(OmitsSalts, false) != ReportsCachedTokens {
		t.Errorf("%v", c)
	}
	if ReadsHostTier.String() != capabilityNames[len(capabilityNames)-1] {
		t.Errorf("the last name is not that of the last capability: %v", ReadsHostTier)
	}
	if got := len(Capability(math.MaxUint32).Names()); got != len(capabilityNames) {
		t.Errorf("%d names", got)
	}
}

// What no engine can have is unknown, whoever says it.
func TestBounded(t *testing.T) {
	long := strings.Repeat("x", MaxNameBytes+1)
	lie := Facts{
		Version: long, Model: long, Aliases: append([]string{long, "a"}, make([]string, 5*MaxNames)...), Ranks: math.MaxInt, BlockTokens: -1, PoolBlocks: math.MaxInt,
		MaxModelTokens: math.MaxInt, MaxRunning: -5, StepTokens: math.MinInt, RankHeader: long,
		PerRank: append(make([]RankFacts, 5*MaxRanks), RankFacts{}), Transfer: Transfer{BytesPerToken: math.NaN()},
	}
	lie.PerRank[0] = RankFacts{BlockTokens: math.MaxInt, PoolBlocks: -1}
	got := lie.Bounded()
	want := Facts{Aliases: []string{"a"}, Ranks: MaxRanks, PerRank: make([]RankFacts, MaxRanks)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	honest := Facts{Version: "1", Model: "m", Ranks: 2, BlockTokens: 1, PoolBlocks: 1 << 20, MaxModelTokens: 1 << 20, MaxRunning: 1024, StepTokens: 8192, Transfer: Transfer{BytesPerToken: 1e5}}
	if diff := cmp.Diff(honest, honest.Bounded()); diff != "" {
		t.Error(diff)
	}
}

func TestFactsOfARank(t *testing.T) {
	f := Facts{BlockTokens: 16, PoolBlocks: 100, Capabilities: TokenizesText, PerRank: []RankFacts{{}, {PoolBlocks: 90, Capabilities: ReplaysEvents}}}
	for rank, want := range []Facts{
		{BlockTokens: 16, PoolBlocks: 100, Capabilities: TokenizesText},
		{BlockTokens: 16, PoolBlocks: 90, Capabilities: TokenizesText | ReplaysEvents},
		{BlockTokens: 16, PoolBlocks: 100, Capabilities: TokenizesText},
	} {
		if diff := cmp.Diff(want, f.Of(rank)); diff != "" {
			t.Errorf("rank %d: %s", rank, diff)
		}
	}
}

func TestOptions(t *testing.T) {
	if _, err := (Options{}).WithDefaults(); !errors.Is(err, ErrNoLogger) {
		t.Error(err)
	}
	o, err := Options{Logger: slog.New(slog.DiscardHandler), LoadEvery: time.Millisecond}.WithDefaults()
	if err != nil || o.LoadEvery != MinLoadEvery || o.FactsEvery != DefaultFactsEvery || o.PageTimeout != DefaultPageTimeout {
		t.Errorf("%v %+v", err, o)
	}
}
