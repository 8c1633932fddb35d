// Package blocktable is a pure mirror of one engine rank's block table: block
// events in, unbroken prefixes and their changes out.
//
// The engine's hashes are handles only: they name a block for parent links and
// removals. What a block holds is known from the token ids of its store event.
// A block is resident while the engine holds at least one copy of it in every
// group that must hold the whole prefix; it is attached while it and all its
// ancestors are resident; and a match may end at it (it is usable) while every
// window group holds the last blocks before its end. Only attached blocks are
// matched and told to a listener.
//
// A Table is not safe for concurrent use.
package blocktable
