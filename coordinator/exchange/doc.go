// Package exchange tells the other coordinators what this one did: the
// placements it made and what it learnt of texts, on one stream to each. What is
// lost on the way is not repeated, for it comes back in what agents report, or
// costs a miss; so all queues are short.
package exchange
