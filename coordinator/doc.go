// Package coordinator is the service that answers placements: Raft holds what
// operators want, lanes bring what agents see, and the packages below decide.
// Its root wires them and speaks for them; where things are:
//
//   - wiring and life: coordinator.go, run.go, config.go, command.go, metrics.go
//   - a placement from request to outcome: place.go, input.go, tenants.go,
//     slots.go, outcomes.go, evidence.go, trust.go; transfer.go and
//     transferword.go on package transfers
//   - agents: lanes.go, agentasks.go, hello.go, hearing.go, ledger.go, gpus.go,
//     drains.go, boundary.go; of their caches, package views; of engines that
//     span hosts, groups.go on package group
//   - other coordinators: peers.go, peercopy.go, peerplaces.go, and package
//     exchange, which tells them of what was done here
//   - prompts that come as text: memos.go, tokenizing.go, stored.go, memoshare.go,
//     memometrics.go, on package memo
//   - what operators ask: operator.go, status.go, doctor.go, inspect.go,
//     topology.go, linkprobe.go, watch.go, on package events
//   - decision records: records.go, why.go, effect.go, recordmetrics.go, on
//     package explain
//   - what operators want, applied: intent.go, on packages replica and registry
package coordinator
