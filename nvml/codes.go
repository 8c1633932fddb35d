package nvml

import (
	"fmt"
	"slices"
)

// Return codes of the library, as its header numbers them. They are named
// here because the library's own names for them are a call that may be missing.
const (
	codeSuccess          = 0
	codeUninitialized    = 1
	codeInvalidArgument  = 2
	codeNotSupported     = 3
	codeNoPermission     = 4
	codeNotFound         = 6
	codeDriverNotLoaded  = 9
	codeTimeout          = 10
	codeLibraryNotFound  = 12
	codeFunctionNotFound = 13
	codeGPUIsLost        = 15
	codeResetRequired    = 16
	codeVersionMismatch  = 18
	codeArgumentVersion  = 25
	codeGPUNotFound      = 28
	codeUnknown          = 999
)

// valueNotAvailable is the library's mark for an unknown count.
const valueNotAvailable = ^uint64(0)

// defaultLibrary is the name by which the loader finds the library.
const defaultLibrary = "libnvidia-ml.so.1"

var codeWords = map[int]string{
	codeUninitialized:    "library not initialized",
	codeInvalidArgument:  "invalid argument",
	codeNotSupported:     "not supported",
	codeNoPermission:     "no permission",
	codeNotFound:         "not found",
	7:                    "buffer too small",
	8:                    "power cables not attached",
	codeDriverNotLoaded:  "driver not loaded",
	codeTimeout:          "timeout",
	11:                   "interrupt issue",
	codeLibraryNotFound:  "library not found",
	codeFunctionNotFound: "not in this driver",
	14:                   "infoROM corrupted",
	codeGPUIsLost:        "GPU is lost",
	codeResetRequired:    "GPU needs a reset",
	17:                   "blocked by the operating system",
	codeVersionMismatch:  "driver/library version mismatch",
	19:                   "in use",
	20:                   "out of memory",
	21:                   "no data",
	23:                   "out of resources",
	codeArgumentVersion:  "query version not supported",
	26:                   "deprecated",
	27:                   "not ready",
	codeGPUNotFound:      "no GPU found",
	29:                   "invalid state",
	codeUnknown:          "unknown driver error",
}

// wordsOf says in words what a return code means.
func wordsOf(code int) string {
	if w, ok := codeWords[code]; ok {
		return w
	}
	return fmt.Sprintf("driver error %d", code)
}

// needsRebuild says whether the library's handles are of no use after code.
// A lost GPU needs it too: a repaired one is found only by loading anew.
func needsRebuild(code int) bool {
	switch code {
	case codeUninitialized, codeDriverNotLoaded, codeGPUIsLost, codeVersionMismatch:
		return true
	}
	return false
}

// initStatus is the state of a host whose library could not be initialized.
func initStatus(code int, library string) Status {
	switch code {
	case codeLibraryNotFound:
		if library == "" {
			return Status{StateNoLibrary, "no NVIDIA driver (" + defaultLibrary + " not found)"}
		}
		return Status{StateNoLibrary, "no NVIDIA driver (" + library + " not found or not a library)"}
	case codeDriverNotLoaded:
		return Status{StateDriverNotLoaded, "NVIDIA driver not loaded"}
	case codeVersionMismatch:
		return Status{StateVersionMismatch, "driver/library version mismatch: reload the NVIDIA driver or reboot"}
	case codeNoPermission:
		return Status{StateNoPermission, "no permission to use the NVIDIA driver: allow /dev/nvidiactl and /dev/nvidia*"}
	case codeGPUNotFound:
		return Status{StateNoGPUs, "no GPUs"}
	}
	return Status{StateFailed, "NVML cannot be initialized: " + wordsOf(code)}
}

func statusNotBuilt() Status {
	return Status{StateNotBuilt, "no GPU facts: built without -tags nvml"}
}

// Reasons why clocks are held down.
const (
	ThrottleIdle             = "idle"
	ThrottleAppClocks        = "application clocks"
	ThrottlePowerCap         = "power cap"
	ThrottleHardware         = "hardware slowdown"
	ThrottleSyncBoost        = "sync boost"
	ThrottleThermal          = "thermal slowdown"
	ThrottleHardwareThermal  = "hardware thermal slowdown"
	ThrottlePowerBrake       = "power brake"
	ThrottleDisplayClocks    = "display clocks"
	ThrottleBoardLimit       = "board limit"
	ThrottleReliabilityLimit = "reliability limit"
)

// throttleBits are the library's clock event reasons by bit.
var throttleBits = []string{
	ThrottleIdle, ThrottleAppClocks, ThrottlePowerCap, ThrottleHardware,
	ThrottleSyncBoost, ThrottleThermal, ThrottleHardwareThermal, ThrottlePowerBrake,
	ThrottleDisplayClocks, ThrottleBoardLimit, ThrottleReliabilityLimit,
}

// throttleWords names the bits of mask; bits of later drivers by number.
// The result is never nil.
func throttleWords(mask uint64) []string {
	words := []string{}
	for bit := range 64 {
		switch {
		case mask&(1<<bit) == 0:
		case bit < len(throttleBits):
			words = append(words, throttleBits[bit])
		default:
			words = append(words, fmt.Sprintf("reason 0x%x", uint64(1)<<bit))
		}
	}
	return words
}

// note records why field is unknown, and whether the GPU is lost or waits for a
// reset.
func (g *GPU) note(field string, code int) {
	g.miss(field, wordsOf(code))
	switch code {
	case codeGPUIsLost:
		g.Lost = true
	case codeResetRequired:
		g.ResetRequired = true
	}
}

func (g *GPU) miss(field, why string) {
	if g.Missing == nil {
		g.Missing = map[string]string{}
	}
	g.Missing[field] = why
}

// known is v if code is a success; else it is nil and g says why.
func known[T any](g *GPU, field string, code int, v T) *T {
	if code != codeSuccess {
		g.note(field, code)
		return nil
	}
	return &v
}

// mergeProcesses joins lists of the same GPU: one entry per pid, the larger
// memory, by pid.
func mergeProcesses(lists ...[]Process) []Process {
	byPID := map[uint32]Process{}
	for _, list := range lists {
		for _, p := range list {
			old, ok := byPID[p.PID]
			if !ok || old.MemoryBytes == nil || p.MemoryBytes != nil && *p.MemoryBytes > *old.MemoryBytes {
				byPID[p.PID] = p
			}
		}
	}
	merged := make([]Process, 0, len(byPID))
	for _, p := range byPID {
		merged = append(merged, p)
	}
	slices.SortFunc(merged, func(a, b Process) int { return int(int64(a.PID) - int64(b.PID)) })
	return merged[:min(len(merged), maxProcesses)]
}

// processMemory is the memory of a process as the library tells it.
func processMemory(bytes uint64) *uint64 {
	if bytes == valueNotAvailable {
		return nil
	}
	return &bytes
}
