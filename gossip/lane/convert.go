package lane

import (
	"google.golang.org/protobuf/proto"

	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// WorkerLoadOf turns a load report into its wire form. Unknown fields stay
// unset.
func WorkerLoadOf(index uint32, l *ledger.Load) *waypostv1.WorkerLoad {
	w := &waypostv1.WorkerLoad{
		Index: &index, EngineProcess: &l.EngineProcess, State: proto.String(string(l.State)), StateReason: &l.StateReason,
		AgeMs: l.AgeMs, QueueMs: l.QueueMs, OpenTokens: l.OpenTokens, Decoding: l.Decoding, ContextTokens: l.ContextTokens, GapMs: l.GapMs,
		Live: l.Live, HeldBlocks: l.HeldBlocks, Foreign: l.Foreign, MeanOutputTokens: l.MeanOutputTokens, Running: l.Running, Waiting: l.Waiting,
		CountersAgeMs: l.CountersAgeMs, KvUsedRatio: l.KVUsedRatio, FinishPerSec: l.FinishPerSec, CachedBlocks: l.CachedBlocks,
		EvictionAgeMs: l.EvictionAgeMs,
	}
	if l.GPUVerdict != "" {
		w.GpuVerdict = &l.GPUVerdict
	}
	if l.Coverage != "" {
		w.Coverage = &l.Coverage
	}
	if l.QueueBasis != "" {
		w.QueueBasis = proto.String(string(l.QueueBasis))
	}
	for _, e := range l.Echo {
		w.Echo = append(w.Echo, &waypostv1.Echo{Coordinator: &e.Coordinator, Upto: &e.Upto})
	}
	return w
}

// LoadOf turns the wire form of a load report back. Check it with Validate
// before use: it comes from another process.
func LoadOf(w *waypostv1.WorkerLoad) ledger.Load {
	l := ledger.Load{
		EngineProcess: w.GetEngineProcess(), State: ledger.State(w.GetState()), StateReason: w.GetStateReason(),
		AgeMs: w.AgeMs, QueueMs: w.QueueMs, OpenTokens: w.OpenTokens, Decoding: w.Decoding, ContextTokens: w.ContextTokens, GapMs: w.GapMs,
		Live: w.Live, HeldBlocks: w.HeldBlocks, Foreign: w.Foreign, MeanOutputTokens: w.MeanOutputTokens, Running: w.Running, Waiting: w.Waiting,
		CountersAgeMs: w.CountersAgeMs, KVUsedRatio: w.KvUsedRatio, FinishPerSec: w.FinishPerSec, CachedBlocks: w.CachedBlocks,
		EvictionAgeMs: w.EvictionAgeMs, GPUVerdict: w.GetGpuVerdict(), Coverage: w.GetCoverage(),
		QueueBasis: ledger.Basis(w.GetQueueBasis()),
	}
	for _, e := range w.GetEcho() {
		l.Echo = append(l.Echo, ledger.Echo{Coordinator: e.GetCoordinator(), Upto: e.GetUpto()})
	}
	return l
}

// StepModelOf turns a step model into its wire form.
func StepModelOf(m *ledger.StepModel) *waypostv1.StepModel {
	return &waypostv1.StepModel{
		P0Ms: &m.P0Ms, P1MsPerToken: &m.P1MsPerToken, QMsPerToken2: &m.QMsPerToken2, P2MsPerToken2: &m.P2MsPerToken2,
		D0Ms: &m.D0Ms, D1MsPerRequest: &m.D1MsPerRequest, D2MsPerToken: &m.D2MsPerToken, D3Ms: &m.D3Ms, Source: proto.String(string(m.Source)),
	}
}

// ModelOf turns the wire form of a step model back. Check it with Validate
// before use.
func ModelOf(m *waypostv1.StepModel) ledger.StepModel {
	return ledger.StepModel{
		P0Ms: m.GetP0Ms(), P1MsPerToken: m.GetP1MsPerToken(), QMsPerToken2: m.GetQMsPerToken2(), P2MsPerToken2: m.GetP2MsPerToken2(),
		D0Ms: m.GetD0Ms(), D1MsPerRequest: m.GetD1MsPerRequest(), D2MsPerToken: m.GetD2MsPerToken(), D3Ms: m.GetD3Ms(), Source: ledger.Source(m.GetSource()),
	}
}
