// Package engines drives real inference engines through a real agent and
// coordinator: chats are placed, sent and reported, and what each placement
// expected to be reused is set against what the engine says it reused. Each
// engine has a folder with its test, which is skipped unless the environment
// names the engine's program.
package engines
