package registry

import (
	"fmt"
	"math"
	"slices"
)

func (c InitCluster) apply(s *State, stamp Stamp) Result {
	switch s.clusterID {
	case c.ClusterID:
		return Result{Code: CodeOK}
	case "":
		s.clusterID, s.fleetName = c.ClusterID, c.Fleet
		return s.changed(stamp, c.Kind(), fmt.Sprintf("fleet %q, cluster %s", c.Fleet, c.ClusterID))
	}
	return refusef(CodeRefused, "this is cluster %s already and cannot become %s", s.clusterID, c.ClusterID)
}

func (c PutFleet) apply(s *State, stamp Stamp) Result {
	now := s.FleetFile()
	switch {
	case c.BaseVersion != now.Version:
		r := refusef(CodeConflict, "fleet.toml was made from version %d, the fleet is at %d; run: waypost fleet diff", c.BaseVersion, now.Version)
		r.FleetVersion = now.Version
		return r
	case now.Version > 0 && c.TOML == now.TOML:
		return Result{Code: CodeOK, FleetVersion: now.Version}
	case now.Version == math.MaxUint32:
		return refusef(CodeRefused, "fleet versions are used up")
	}
	file := FleetFile{now.Version + 1, c.TOML, stamp.By, stamp.At.UnixMilli(), c.Message}
	s.files = s.files.push(file)
	s.deriveFleet()
	detail := fmt.Sprintf("fleet version %d (was %d)", file.Version, now.Version)
	if c.Message != "" {
		detail += ": " + c.Message
	}
	r := s.changed(stamp, c.Kind(), detail)
	r.FleetVersion = file.Version
	return r
}

// deriveFleet reads the file in force. It is lenient about keys that a newer
// version may have added: what they say does not concern this one.
func (s *State) deriveFleet() {
	s.fleet, s.fleetProblem = EmptyFleet(), nil
	file := s.FleetFile()
	if file.Version == 0 {
		return
	}
	fleet, err := parseFleet("fleet.toml", file.TOML, true)
	if err != nil {
		s.fleetProblem = fmt.Errorf("fleet version %d cannot be read by this version of waypost: %w", file.Version, err)
		return
	}
	s.fleet = fleet
}

func (c SetCordon) apply(s *State, stamp Stamp) Result {
	sel, err := ParseSelector(c.Selector)
	if err != nil {
		return Result{Code: CodeInvalid, Message: err.Error()}
	}
	cordon := Cordon{
		Selector: sel.String(), By: stamp.By, AtMs: stamp.At.UnixMilli(), Reason: c.Reason, Drain: c.Drain,
		GPUUUIDs: normalUUIDs(c.GPUUUIDs), Model: c.Model,
	}
	old, exists := s.cordons.get(cordon.Selector)
	if len(cordon.GPUUUIDs) == 0 {
		// Set again while the engine is away: what is known of it stays known.
		cordon.GPUUUIDs, cordon.Model = old.GPUUUIDs, old.Model
	}
	if !exists && s.cordons.len() >= MaxCordons {
		return refusef(CodeRefused, "there are %d cordons already, the most that are kept; cordon whole hosts, or take some back with: waypost uncordon", MaxCordons)
	}
	s.cordons = s.cordons.with(cordon)
	what := "cordon "
	if c.Drain {
		what = "drain "
	}
	r := s.changed(stamp, c.Kind(), what+cordon.Selector+": "+c.Reason)
	r.Cordon = &cordon
	return r
}

func (c RemoveCordon) apply(s *State, stamp Stamp) Result {
	sel, err := ParseSelector(c.Selector)
	if err != nil {
		return Result{Code: CodeInvalid, Message: err.Error()}
	}
	cordon, ok := s.cordons.get(sel.String())
	if !ok {
		return Result{Code: CodeOK}
	}
	s.cordons = s.cordons.without(cordon.Selector)
	detail := "uncordon " + cordon.Selector
	if c.Reason != "" {
		detail += ": " + c.Reason
	}
	r := s.changed(stamp, c.Kind(), detail)
	r.Cordon, r.Removed = &cordon, true
	return r
}

func (c RegisterCoordinator) apply(s *State, stamp Stamp) Result {
	for _, gone := range s.removed {
		if gone.ID == c.ID {
			return refusef(CodeRefused, "coordinator %s (%s) was removed by %s; empty its state directory, then it joins as a new one", gone.Name, gone.ID, gone.By)
		}
	}
	for _, other := range s.coordinators {
		if other.ID == c.ID {
			continue
		}
		what := ""
		switch {
		case other.Name == c.Name:
			what = "name " + c.Name
		case other.ClusterAddress == c.ClusterAddress:
			what = "cluster address " + c.ClusterAddress
		default:
			continue
		}
		return refusef(CodeRefused, "%s belongs to coordinator %d (%s, id %s); if that one is gone for good, run: waypost coordinators remove %s",
			what, other.Number, other.Name, other.ID, other.Name)
	}
	entry := Coordinator{ID: c.ID, Name: c.Name, ClusterAddress: c.ClusterAddress, APIAddress: c.APIAddress, Voter: c.Voter}
	i := s.coordinatorIndex(c.ID)
	if i >= 0 {
		entry.Number = s.coordinators[i].Number
		if entry == s.coordinators[i] {
			return Result{Code: CodeOK, Number: entry.Number}
		}
		s.coordinators = slices.Clone(s.coordinators)
		s.coordinators[i] = entry
	} else {
		if len(s.coordinators) >= MaxCoordinators {
			return refusef(CodeRefused, "there are %d coordinators already, the most there can be", MaxCoordinators)
		}
		entry.Number = s.nextNumber
		s.nextNumber++
		s.coordinators = append(slices.Clone(s.coordinators), entry)
	}
	r := s.changed(stamp, c.Kind(), fmt.Sprintf("coordinator %d %s at %s", entry.Number, entry.Name, entry.ClusterAddress))
	r.Number = entry.Number
	return r
}

func (c RemoveCoordinator) apply(s *State, stamp Stamp) Result {
	i := s.coordinatorIndex(c.ID)
	if i < 0 {
		return Result{Code: CodeOK}
	}
	entry := s.coordinators[i]
	s.coordinators = slices.Delete(slices.Clone(s.coordinators), i, i+1)
	s.removed = append(slices.Clone(s.removed), removed{entry.ID, entry.Name, stamp.By, stamp.At.UnixMilli()})
	if len(s.removed) > maxRemoved {
		s.removed = s.removed[1:]
	}
	r := s.changed(stamp, c.Kind(), fmt.Sprintf("coordinator %d %s removed", entry.Number, entry.Name))
	r.Number, r.Removed = entry.Number, true
	return r
}

func (c SetFeatureLevel) apply(s *State, stamp Stamp) Result {
	switch {
	case c.Level == s.featureLevel:
		return Result{Code: CodeOK}
	case c.Level < s.featureLevel:
		return refusef(CodeRefused, "the feature level is %d and cannot go back to %d", s.featureLevel, c.Level)
	}
	was := s.featureLevel
	s.featureLevel = c.Level
	return s.changed(stamp, c.Kind(), fmt.Sprintf("feature level %d (was %d)", c.Level, was))
}
