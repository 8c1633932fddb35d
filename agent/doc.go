// Package agent is the host daemon: it reads every engine of its host, mirrors
// their block tables, estimates their queues, and tells the coordinators over
// lanes and the mesh. Its root is wiring only; what it decides is in its pure
// packages.
package agent
