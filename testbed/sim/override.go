package sim

import (
	"slices"
	"strconv"
	"strings"

	"waypost/coordinator/placement"
)

// constants are the constants of the placement policy that --set may change.
func constants(p *placement.Policy) map[string]*float64 {
	return map[string]*float64{
		"theta": &p.Theta, "queueWeight": &p.QueueWeight, "roomWeight": &p.RoomWeight,
		"ownLimitRatio": &p.OwnLimitRatio, "ownLimitMs": &p.OwnLimitMs, "tieMs": &p.TieMs,
		"freshMs": &p.FreshMs, "doubtPerMs": &p.DoubtPerMs, "maxAgeDoubtMs": &p.MaxAgeDoubtMs,
		"errorWeight": &p.ErrorWeight, "unknownEvictionAgeMs": &p.UnknownEvictionAgeMs,
	}
}

// override applies settings of the form name=value.
func override(p *placement.Policy, settings []string) error {
	known := constants(p)
	for _, s := range settings {
		name, text, _ := strings.Cut(s, "=")
		field := known[name]
		if field == nil {
			var names []string
			for n := range known {
				names = append(names, n)
			}
			slices.Sort(names)
			return wrong("set", "%q is not one of %s", name, strings.Join(names, ", "))
		}
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return wrong("set", "%s: %q is not a number", name, text)
		}
		*field = v
	}
	if err := p.Validate(); err != nil {
		return wrong("set", "%w", err)
	}
	return nil
}
