// Package prefixindex tells which workers hold how much of a prompt.
//
// One table maps prefix keys to sets of workers. What a worker's stream says
// (see gossip/summary) and what placements predict for it are counted apart in
// the same table; predictions live exactly as long as their claim. A search
// finds for every worker the deepest checkpoint it holds, by bisection, since a
// worker that holds a prefix holds all shorter ones, and then looks for known
// ends in the chunk after it.
//
// An Index is safe for concurrent use: changes lock it for one key each, and
// searches run beside each other.
package prefixindex
