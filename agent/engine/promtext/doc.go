// Package promtext reads pages in the Prometheus text format without
// allocating. What an engine writes is not trusted: a number that cannot be a
// count, a share or a time is no number.
package promtext
