package enginefaults

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/kvevents"
	"waypost/testbed/emulator/faults"
)

// exact is the check of faults that must not show: the view is full and says of
// every prompt what the engine reuses, also of what a late agent replays and
// after everything has been given up once.
func exact(r *rig) {
	before := r.drive()
	r.watch()
	r.full()
	r.agree(before, question{}, false)
	after := r.drive()
	r.agree(after, question{}, false)
	r.fill()
	r.agree(before, question{}, false)
	r.full()
	r.never(kvevents.CountMalformed)
	r.never(kvevents.CountDamaged)
}

// bounded is the check of faults that cost knowledge: the view never says more
// than the engine reuses.
func bounded(r *rig) {
	before := r.drive()
	r.watch()
	r.agree(before, question{}, true)
	after := r.drive()
	r.fill()
	r.agree(append(before, after...), question{}, true)
	r.Await("yet something is known", func() bool {
		for _, p := range before {
			if r.Of(0).Table.Match(p, "", "") > 0 {
				return true
			}
		}
		return false
	})
}

// blind is the check of engines that tell nothing.
func blind(says string) func(*rig) {
	return func(r *rig) {
		r.watch()
		prompts := r.drive()
		r.covered(engine.CoverageNone, says)
		r.none(prompts)
	}
}

// checks is what an agent must do about each fault of the library. The number is
// that of the list of engine faults that the library follows.
var checks = []struct {
	number, fault string
	check         func(*rig)
}{
	{"1", "array-events", exact},
	{"2", "replay-without-topic", exact},
	{"3", "publisher-unset", blind("--kv-events-config")},
	{"4", "publisher-null", blind("publisher")},
	{"5", "endpoint-connects", func(r *rig) {
		r.watch()
		r.Await("the engine's publisher is taken in", func() bool { return r.vllm.Subscribers(0) > 0 })
		r.agree(r.drive(), question{}, false)
	}},
	{"6", "late-subscriber", func(r *rig) {
		before := r.drive()
		r.watch()
		r.Await("subscribed", func() bool { return r.vllm.Subscribers(0) > 0 })
		r.drive() // only a number beyond 0 tells that there was a past
		r.covered(engine.CoveragePartial, "replay_endpoint")
		r.agree(before, question{}, true)
	}},
	{"7", "tail-dropped", func(r *rig) {
		r.watch()
		r.full()
		r.agree(r.drive(), question{}, false)
		r.counted(kvevents.CountTail, 1)
	}},
	{"8", "short-ring", func(r *rig) {
		before := r.drive()
		r.watch()
		r.covered(engine.CoveragePartial, "buffer_steps")
		r.agree(before, question{}, true)
	}},
	{"9", "flood", func(r *rig) {
		r.watch()
		r.full()
		prompts := r.drive()
		r.agree(prompts, question{}, true)
		r.never(kvevents.CountMissing)
	}},
	{"10", "burnt-number", func(r *rig) {
		r.watch()
		r.full()
		prompts := r.drive()
		r.counted(kvevents.CountLost, 1)
		r.covered(engine.CoveragePartial, "buffer_steps")
		r.agree(prompts, question{}, true)
		r.Mu.Lock()
		defer r.Mu.Unlock()
		if n := r.Of(0).Counts[kvevents.CountGaps]; n != 1 {
			r.Errorf("%d gaps of one lost number", n)
		}
	}},
	{"11", "nothing-encodes", silent},
	{"12", "duplicate-stores", exact},
	{"13", "removal-of-last-copy", bounded},
	{"14", "window-skips-hashes", bounded},
	{"15", "groups-of-sizes", bounded},
	{"16", "small-hybrid-pool", func(r *rig) {
		r.watch()
		r.Await("the pool as it is", func() bool { return r.Known.PoolBlocks > 0 && r.Known.PoolBlocks == (poolTokens/blockTokens+1)*2/3-1 })
		r.agree(r.drive(), question{}, false)
	}},
	{"17", "inflated-blocks", func(r *rig) {
		r.watch()
		r.full()
		r.Await("block size", func() bool { return r.Known.BlockTokens == 528 })
		short := r.prompt(400)
		r.ask(short, question{})
		r.none([][]uint32{short})
		r.agree([][]uint32{short, r.prompt(1200)}, question{}, false)
	}},
	{"18", "long-hashes", exact},
	{"19", "last-block-recomputed", func(r *rig) {
		r.watch()
		r.Await("known before a request", func() bool { return r.Known.Capabilities.Has(engine.RecomputesLastBlock) })
	}},
	{"20", "orphan-parent", func(r *rig) {
		r.watch()
		r.full()
		prompts := r.drive()
		r.agree(prompts, question{}, false)
		r.none([][]uint32{r.prompt(64)})
	}},
	{"21", "sparse-window", func(r *rig) {
		bounded(r)
		r.never(kvevents.CountMissing)
	}},
	{"22", "offload-removals-as-gpu", func(r *rig) {
		r.watch()
		r.covered(engine.CoveragePartial, "SimpleCPUOffloadConnector")
	}},
	{"23", "placeholder-stores", exact},
	{"24", "store-only-tier", exact},
	{"TRU-05", "tier-left-out", func(r *rig) {
		prompts := r.drive()
		r.watch()
		r.covered(engine.CoveragePartial, "tier unknown")
		r.counted(kvevents.CountUnknownTier, 1)
		r.none(prompts)
		// What is told again is credited again.
		r.on.Set(false)
		r.agree(r.drive(), question{}, true)
	}},
	{"25", "foreign-chunks", bounded},
	{"26", "wrong-parent", bounded},
	{"27", "idle-silence", func(r *rig) {
		r.watch()
		prompts := r.drive()
		r.full()
		r.vllm.ClearCache()
		r.Await("still up while nothing comes", func() bool { return r.Up })
		// The next step tells.
		r.ask(r.prompt(40), question{})
		r.none(prompts)
		r.full()
	}},
	{"28", "restart", func(r *rig) {
		r.watch()
		prompts := r.drive()
		r.agree(prompts, question{}, false)
		if err := r.vllm.Restart(0); err != nil {
			r.Fatal(err)
		}
		r.none(prompts)
		r.agree(r.drive(), question{}, false)
		r.full()
	}},
	{"29", "rank-ports-clash", func(r *rig) {
		r.watch()
		r.drive()
		r.Await("events of rank 1 are refused at rank 0", func() bool {
			return r.Of(0).Counts[kvevents.CountWrongRank] > 0 && r.Of(0).Coverage == engine.CoverageNone && strings.Contains(r.Of(0).Hint, "rank 1") && r.Of(0).Batches == 0
		})
	}},
	{"30", "ipc-endpoint", func(r *rig) {
		r.watch()
		r.covered(engine.CoverageNone, "tcp://*:5557")
	}},
	{"31", "every-rank-is-0", exact},
	{"32", "untyped-keys", func(r *rig) {
		r.watch()
		r.full()
		p := r.prompt(200)
		r.agree([][]uint32{p}, question{salt: "tenant-a"}, false)
		r.none([][]uint32{p})
		r.agree([][]uint32{p}, question{model: "sql"}, false)
		r.none([][]uint32{p})
		r.agree([][]uint32{p}, question{model: "sql", salt: "tenant-a"}, false)
		r.agree([][]uint32{p}, question{}, false)
	}},
	{"33", "reports-hits", func(r *rig) {
		a := r.watch()
		r.full()
		r.Mu.Lock()
		r.Of(0).Table.SetPool(poolTokens / blockTokens)
		r.Mu.Unlock()
		prompts := r.drive()
		r.fill()
		r.Await("more copies than the pool holds are noticed", func() bool { return r.Of(0).Table.OverPool() })
		// What the agent does then: read anew and count no copies.
		r.Mu.Lock()
		r.Of(0).Table.CountCopies(false)
		r.Mu.Unlock()
		a.(engine.Resyncer).Resync(0, false)
		r.Await("read anew", func() bool { return len(r.Of(0).Resets) > 0 })
		r.agree(prompts, question{}, true)
	}},
	{"34", "stale-gauges", func(r *rig) {
		r.watch()
		r.agree(r.drive(), question{}, false)
		r.Await("told as they are", func() bool { l := r.Of(0).Load; return l.Running != nil && *l.Running >= 0 })
	}},
	{"35", "counters-stuck", func(r *rig) {
		r.watch()
		r.full()
		r.agree(r.drive(), question{}, false)
		after := time.Now() // a page that is older says nothing of the prompts
		r.Await("counters are told", func() bool { l := r.Of(0).Load; return l.PromptTokens != nil && l.At.After(after) })
		r.Mu.Lock()
		defer r.Mu.Unlock()
		if l := r.Of(0).Load; len(r.Of(0).Resets) > 0 || *l.PromptTokens > 0 {
			r.Errorf("resets %v, load %+v: the counters stand", r.Of(0).Resets, l)
		}
	}},
	{"36", "aborts-uncounted", func(r *rig) {
		r.watch()
		ctx, cancel := context.WithTimeout(r.Context(), 20*time.Millisecond)
		defer cancel()
		r.call(ctx, http.MethodPost, "/v1/completions", []byte(`{"model":"tiny","prompt":[1,2,3],"max_tokens":2000,"ignore_eos":true}`))
		r.agree(r.drive(), question{}, false)
		r.Await("nobody is taken to run", func() bool { l := r.Of(0).Load; return l.Running != nil && *l.Running == 0 })
	}},
	{"37", "negative-load", func(r *rig) {
		r.watch()
		r.Await("unknown, not negative", func() bool { return r.Of(0).Load.Running != nil && r.Of(0).Load.Waiting == nil })
	}},
	{"38", "stale-adapter-series", func(r *rig) {
		r.watch()
		r.Await("load", func() bool { return r.Of(0).Load.Running != nil })
		r.Mu.Lock()
		defer r.Mu.Unlock()
		if len(r.Known.Aliases) > 0 {
			r.Errorf("adapters %v", r.Known.Aliases)
		}
	}},
	{"39", "livelock", func(r *rig) {
		r.watch()
		ctx, cancel := context.WithTimeout(r.Context(), time.Second)
		defer cancel()
		r.call(ctx, http.MethodPost, "/v1/completions", []byte(`{}`))
		r.Await("still watched, nothing finished", func() bool {
			l := r.Of(0).Load
			return r.Up && l.Finished != nil && *l.Finished == 0
		})
	}},
	{"40", "hash-without-place", bounded},
	{"41", "hash-without-salt", func(r *rig) {
		r.watch()
		p := r.prompt(200)
		r.ask(p, question{salt: "tenant-a"})
		r.Await("what events omit is known", func() bool { return r.Known.Capabilities.Has(engine.OmitsSalts) })
		cached := r.ask(p, question{salt: "tenant-b"})
		r.Await("no salted credit", func() bool { return r.Of(0).Table.Match(p, "", "tenant-c") == 0 })
		if cached != 0 {
			r.Errorf("tenants share %d tokens", cached)
		}
	}},
	{"42", "salt-in-a-map", func(r *rig) {
		r.watch()
		r.full()
		p := r.prompt(200)
		r.agree([][]uint32{p}, question{salt: "tenant-a"}, false)
		r.none([][]uint32{p})
		r.never(kvevents.CountDamaged)
	}},
	{"43", "replicas-on-one-port", func(r *rig) {
		r.watch()
		prompts := r.drive()
		r.fill()
		r.agree(prompts, question{}, true)
	}},
	{"44", "release-without-removal", readAnew},
	{"45", "window-evicted-silently", readAnew},
	{"46", "page-on-two-tiers", exact},
	{"47", "no-events-of-this-cache", silent},
	{"48", "one-event-per-page", exact},
	{"49", "page-of-one-token", exact},
	{"50", "slow-health", exact},
	{"51", "stale-page", func(r *rig) {
		r.watch()
		r.drive()
		r.Await("load from its own route", func() bool {
			l := r.Of(0).Load
			return l.Running != nil && l.ComputedPromptTokens != nil && *l.ComputedPromptTokens > 0
		})
	}},
	{"51b", "late-events", func(r *rig) {
		r.watch()
		r.full()
		p := r.prompt(100)
		r.ask(p, question{tokens: 60})
		r.Await("capability", func() bool { return r.Known.Capabilities.Has(engine.StoresLate) })
		r.agree(r.drive(), question{tokens: 20}, false)
	}},
	{"52", "second-reader", damaged},
	{"53", "wrong-parent-hash", bounded},
	{"54", "serialiser-crash", damaged},
	{"55", "several-windows", func(r *rig) {
		r.watch()
		r.full()
		r.agree(r.drive(), question{}, false)
	}},
	{"56", "hexadecimal-hashes", exact},
	{"57", "event-ring-overflow", func(r *rig) {
		before := r.drive()
		r.watch()
		r.covered(engine.CoveragePartial, "")
		r.agree(before, question{}, true)
	}},
	{"57", "polling-answers-nothing", silent},
	{"58", "prompt-counter-changed", func(r *rig) {
		r.watch()
		r.drive()
		r.Await("no count of what is not known", func() bool {
			l := r.Of(0).Load
			return l.GenerationTokens != nil && *l.GenerationTokens > 0 && l.PromptTokens == nil && l.ComputedPromptTokens == nil
		})
	}},
	{"59", "slots-without-content", func(r *rig) {
		r.watch()
		r.covered(engine.CoverageNone, "--slots")
		r.drive()
		r.Await("still up", func() bool { return r.Up && r.Known.MaxRunning == 4 })
		r.never("slotFaults")
	}},
	{"60", "queue-dropped-oldest", func(r *rig) {
		r.watch()
		r.full()
		prompts := r.drive()
		r.counted(kvevents.CountMissing, 65_536)
		r.agree(prompts, question{}, true)
	}},
}

// silent is the check of engines that compute and tell nothing, although nothing
// else is wrong: the agent waits ten seconds before it says so.
func silent(r *rig) {
	r.watch()
	r.Await("counters", func() bool { l := r.Of(0).Load; return l.Finished != nil && l.ComputedPromptTokens != nil })
	prompts := r.drive()
	r.fill()
	r.none(prompts)
	r.covered(engine.CoverageNone, "no event came while the engine computed prompts")
	r.counted(kvevents.CountSilences, 1)
}

// damaged is the check of lost events that nobody can replay.
func damaged(r *rig) {
	r.watch()
	r.full()
	prompts := r.drive()
	r.covered(engine.CoveragePartial, "")
	r.agree(prompts, question{}, true)
}

// readAnew is the check of losses that only answers can show: the adapter reads
// the view again when it is told that it proved wrong.
func readAnew(r *rig) {
	a := r.watch()
	prompts := r.drive()
	r.agree(prompts, question{}, false)
	r.fill()
	again, ok := a.(engine.Resyncer)
	if !ok {
		r.Fatal("the adapter cannot read its view again")
	}
	r.on.Set(false)
	again.Resync(0, false)
	r.Await("the view was begun anew", func() bool { return len(r.Of(0).Resets) > 0 })
	r.full()
}

func TestFaults(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range checks {
		f, err := faults.Named(c.fault)
		if err != nil {
			t.Fatal(err)
		}
		seen[c.fault] = true
		t.Run(c.number+" "+c.fault, func(t *testing.T) {
			t.Parallel()
			c.check(newRig(t, f))
		})
	}
	for _, f := range faults.List() {
		if !seen[f.Name] {
			t.Errorf("fault %s has no check", f.Name)
		}
	}
}
