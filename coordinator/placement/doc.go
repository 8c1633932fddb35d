// Package placement is the rule: which worker gives a request a useful answer
// soonest, and why. Decide is a pure function of the request, the candidates,
// the policy and the moment; the same inputs give the same choice on every
// coordinator and in a replay.
//
// Every candidate is priced in milliseconds of first-token time:
//
//	start     when this request's prefill begins: the worker's waiting prefills
//	          replayed step by step, with the request added at the end
//	prefill   P(n − reuse | reuse), chunked into the worker's steps, attention
//	          to the reused tokens included
//	load      reading back what of the reuse is in host memory: its bytes over
//	          the way to the GPU, never more than it saves
//	pull      transfer of saved KV from the best source over its share of the
//	          link, then the prefill of the rest; on average, for an engine with
//	          a source moves what of its own turns out to be gone as well
//	room      wait for KV blocks or a batch slot when the pool or batch is full
//	doubt     allowance for age, loss and past error, see Policy
//	distance  network round trip and operator surcharge
//	hand-over of a prefilled prompt to the decode worker of a pair
//	own       = start + prefill or pull + load + room + doubt + distance + hand-over
//	queue     λ · prefill · max(backlog, prefill/2): delay of those who arrive
//	          while the backlog drains
//	gap       this request's own token gap after admission
//	stall     prefill × live requests / mean answer: what the prefill does to
//	          the gaps of the others
//	total     = own + queue + θ·(gap + stall) + what unknown gaps were taken as
//
// The smallest total wins among workers whose own time is within the policy's
// limit of the best. Equal totals, or with a policy's tie above 0 close ones,
// are ranked by more reuse, then by a rendezvous hash of the deepest shared
// prefix key (else the request id) and the worker's name.
//
// NaN is unknown. An unknown term is shown as unknown and never counts as
// zero beside known ones: it is taken as the mean of the candidates where it
// is known, and distance as the farthest.
//
// A Board holds the workers of a large pool for a bounded search: one pass over
// lower bounds, then full prices for those that could win. Its choice is that
// of pricing everybody; what was not priced is counted.
//
// Two kinds of constraint exclude workers. Will (cordon, request, tenant,
// adapter, topology rule, length of the model) is never relaxed, and a refusal
// names it. Observation (stall, fault, silence) yields: when silence would exclude
// more than half of the pool it is ignored, and when nothing else is left a
// doubted worker is given as a last resort; both are marked.
package placement
