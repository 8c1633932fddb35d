// Package events keeps those lines of the log that name what happened, for people
// who watch.
package events
