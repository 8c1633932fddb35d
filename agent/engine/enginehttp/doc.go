// Package enginehttp asks engines over HTTP. An engine is not trusted: what it
// answers may be slow, endless, compressed without end or a way to another
// host. Each question costs bounded time and memory, whatever comes back.
package enginehttp
