package accuracy

// The trust in a view of a cache before outcomes were compared with it.
const (
	// PriorLive is of a view that the engine's events show whole.
	PriorLive = 1.0
	// PriorPartial is of one that they show in part.
	PriorPartial = .9
	// PriorInferred is of one that follows from the requests only.
	PriorInferred = .7
)
