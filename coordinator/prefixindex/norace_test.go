//go:build !race

package prefixindex

const raceEnabled = false
