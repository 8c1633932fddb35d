// Package explain keeps the decisions a coordinator took: why each request
// went where it went, and what became of it. Entries are found by placement
// id, by request id, or newest first through filters; outcomes are joined to
// them, and Classify gives every outcome exactly one class.
//
// A Store is bounded in bytes and age: the oldest entries go first. Above a
// rate of full entries only their summary is kept, so that outcomes still find
// what was expected. An entry holds figures, names and prefix matches, never a
// prompt, a token id or a prefix key.
//
// Terms are not stored: a full entry holds the decision's inputs, and deciding
// again from them gives the same terms.
package explain
