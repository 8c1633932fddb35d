// Package group joins the shares of engines that span hosts: one host serves, the
// others carry a share of its model, and each host's agent tells of its own share
// alone. The health of the whole is that of its worst member. It is pure.
package group
