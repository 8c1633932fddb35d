// Package sim judges placement rules in virtual time: a fleet of simulated
// engines serves a workload, and a rule places every request by what it would
// know in production and no more. The same seed gives the same run.
//
// Truth and belief are apart. Engines (package truth) know no rule, and their
// service times are not the rule's. A rule sees prompts when they arrive, and of
// the engines what agents and callers tell with their delays: first tokens, ends,
// cache events, load reports. The answer's length is never told before its end.
package sim
