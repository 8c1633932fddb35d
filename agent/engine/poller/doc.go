// Package poller is the rhythm of an adapter that asks an engine over HTTP:
// counters up to four times a second, health every few seconds, facts every
// half minute, all from one goroutine; and the event readers of its ranks. What
// to ask, and how to read it, each adapter says as a Source.
package poller
