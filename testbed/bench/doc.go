// Package bench measures the prefix summaries as a whole: engines simulated in
// virtual time feed the production block tables, encoders, decoders and index,
// and the cache of the simulation is the truth they are compared with.
package bench
