// Package queue estimates the waiting work and the pace of one worker from
// what its engine publishes: counters that are sampled now and then, any of
// which may be missing, and stored blocks as signs of life.
//
// Waiting work is a time, not a count: the requests that wait times the
// prefill of a mean request, as the step model prices it, plus half a request
// for the one in service, less the time that passed since the sample. The
// mean request and the mean answer are learnt from the growth of the
// counters. What the engine does not tell stays unknown in the report; it is
// never taken as zero.
//
// An Estimator belongs to one goroutine and takes the time from its caller.
package queue
