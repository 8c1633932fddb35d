package emulator

import "fmt"

// versions are the releases of vLLM whose differences on the wire matter, oldest
// first.
var versions = []struct {
	name  string
	apply func(*Options)
}{
	{"0.9.0", positional(6, true)},
	{"0.9.1", positional(6, false)},
	{"0.10.2", positional(7, false)},
	{"0.14.0", positional(8, false)},
	{"0.17.0", positional(9, false)},
	{"0.20.0", positional(10, false)},
	{"0.23.0", positional(12, false)},
	{"0.24.0", func(o *Options) { o.ReplayWithoutTopic = true }},
	{"0.32.0", func(*Options) {}},
}

func positional(fields int, unranked bool) func(*Options) {
	return func(o *Options) {
		o.ArrayEvents, o.EventFields, o.BatchWithoutRank, o.ReplayWithoutTopic = true, fields, unranked, true
	}
}

// Versions are the names of the releases that Of knows, oldest first.
func Versions() (names []string) {
	for _, v := range versions {
		names = append(names, v.name)
	}
	return names
}

// Of is the options of a release: one of Versions, or empty for the newest.
func Of(version string) (Options, error) {
	if version == "" {
		version = versions[len(versions)-1].name
	}
	for _, v := range versions {
		if v.name == version {
			o := Options{Version: version}
			v.apply(&o)
			return o, nil
		}
	}
	return Options{}, fmt.Errorf("%w: no version %q: want one of %v", ErrOptions, version, Versions())
}
