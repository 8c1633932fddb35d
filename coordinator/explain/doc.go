// Package explain keeps the decisions a coordinator took: why each request
// went where it went, and what became of it. Entries are found by placement
// id, by request id, or newest first through filters; outcomes are joined to
// them and get a class of package outcome.
//
// A Store is bounded in bytes and age: the oldest entries go first. Above a
// rate of full entries only their summary is kept, so that outcomes still find
// what was expected. A Journal keeps the same on disk, as a ring of segment
// files that survives a restart; without a writable disk the store goes on in
// memory alone, and says so.
//
// An entry holds figures, names and prefix matches, never a prompt or a token
// id; of the prompt it knows at most the one keyed hash that breaks ties.
//
// Terms are not stored: a full entry holds the decision's inputs, and deciding
// again from them gives the same terms.
package explain
