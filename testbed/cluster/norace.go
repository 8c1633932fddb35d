//go:build !race

package cluster

const slowdown = 1
