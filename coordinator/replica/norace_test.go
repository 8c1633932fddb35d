//go:build !race

package replica

const slowdown = 1
