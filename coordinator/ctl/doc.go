// Package ctl is the command line for people: it asks a coordinator, or the
// local agent where that is enough, and prints tables or the API's JSON.
package ctl
