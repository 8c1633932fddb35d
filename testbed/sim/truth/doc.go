// Package truth is the simulated engines: a first-come-first-served scheduler
// with chunked prefill over a paged, prefix-sharing KV pool, and the models of
// how long its steps take. It knows nothing of agents, coordinators or rules,
// and those see of it only what the simulator tells them.
//
// With the step times of Mocker it is engine model T2: the mock engine of
// NVIDIA Dynamo 1.6 at its defaults, found by feeding that engine crafted
// traces. Times are ms of virtual time.
package truth
