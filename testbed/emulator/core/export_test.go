package core

// ReleaseHeadFirst evicts the head of a prefix before its tail, which no
// engine does.
func ReleaseHeadFirst(c *Core) { c.pool.headFirst = true }

// ReuseInOrder puts released blocks that hold nothing findable at the end of
// the free queue like all others.
func ReuseInOrder(c *Core) { c.pool.inOrder = true }
