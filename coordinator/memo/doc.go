// Package memo remembers which token ids a prompt given as text became, so that
// a later request with the same beginning can be looked up in the prefix index
// before anybody has tokenised it. It stores keyed hashes of the text and hash
// chains of the ids: never text, never ids. It knows no chat template.
//
// A request is read into units: one hash for its head (everything that is not
// known to leave the prompt alone) and one for each message, long ones in
// pieces, each hash on top of the one before ([Reader]). A learnt prompt is a
// record: its length and its chain values. A node says of a unit and a state
// (whether a user message follows) which record stands for it and how many
// tokens any prompt that begins with these units shares with that record at
// least. That bound comes from the end of the prompt (length less an upper bound
// of the tokens behind the unit) and from the common prefix of two learnt
// prompts, so no offsets are needed ([Memo.Learn]). What begins with some units
// shares what the units before these do.
//
// The leading system messages have a node of their own for requests with other
// tools, and with or without: it is used once the template was seen to write tools
// behind them.
//
// Templates that render a message differently once others follow are found by
// feedback: classes of nodes that failed are not used, a pool in which
// predictions given fail too often is switched off ([Memo.Breaker]), and two
// failures in a row near the start of the prompt begin a new epoch. A prompt that
// has not even the words of its messages counts as a failure. The first long
// prediction for a prompt that goes on from the end of another is only compared.
package memo
