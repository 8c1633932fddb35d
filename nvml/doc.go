// Package nvml reads GPU facts and health from the NVIDIA driver and judges
// them by policy.
//
// The driver library can end the process that loads it (a symbol it lacks, a
// fault in its own code) and a driver call can block for ever. So the library
// lives in a child process: [Command] is that child, and [Client] in the agent
// starts it, reads its frames, notices when it is silent or gone, and replaces
// it. Whatever happens there, [Client.View] answers at once, and what is not
// known is nil, never zero.
//
// Only a binary built with cgo and the build tag nvml can load the library;
// any other build says so as a state. On toolchains that link with immediate
// binding (-z now) the nvml build needs
//
//	go build -tags nvml -ldflags='-extldflags=-Wl,-z,lazy'
//
// because the library's symbols exist only after it was loaded.
//
// Types, policy, codes, frames and the record of what was seen are pure: they
// take the time as an argument and do no I/O.
package nvml
