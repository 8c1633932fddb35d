// Package daemon is what Waypost's daemons share below their own work: strict
// configuration files, the service manager's protocol, logs, signals and the
// process mark.
//
// A configuration is a struct with `toml` tags whose values are the defaults.
// [Load] lays the file, the environment and the flags over it, in this order,
// and remembers where each value comes from. One table, made from the struct by
// reflection, serves the loader, the flags, `config show` and the manual.
// Anything unknown is an error that names file, line, key and the nearest key.
package daemon
