package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"waypost/agent/engine"
	"waypost/agent/queue"
	"waypost/gossip/accuracy"
	"waypost/systemd/daemon"
)

// What was learnt of the workers' queues is kept in a file of the state
// directory, so that a restart of the agent forgets nothing.
const (
	learntFile     = "learnt.json"
	learntVersion  = 1
	maxLearntBytes = 32 << 20
	// learntEvery is how often it is written: what a crash loses is learnt
	// again within minutes.
	learntEvery = time.Minute
)

// learnt is the memory of what was learnt.
type learnt struct {
	file string
	// replace replaces a file at once; tests have slow disks.
	replace func(file string, data []byte) error

	// writing is held while the file is written; mu is not: workers that come up
	// ask.
	writing sync.Mutex
	mu      sync.Mutex
	workers map[string]learntWorker
	written []byte
}

type learntContents struct {
	Version int                     `json:"version"`
	Workers map[string]learntWorker `json:"workers"`
}

// learntWorker is what was learnt of one worker.
type learntWorker struct {
	// Process marks the engine's life in 16 hex digits, Model and
	// EngineVersion say what it served with.
	Process       string      `json:"process"`
	Model         string      `json:"model"`
	EngineVersion string      `json:"engineVersion"`
	State         queue.State `json:"state"`
	// Accuracy is how right predictions about this engine life were.
	Accuracy accuracy.State `json:"accuracy"`
	// Transfers are the newest transfers of saved KV to this worker.
	Transfers transferLog `json:"transfers"`
	// SelfTest is what the self-test of this engine life found, after
	// selfTestBegun; empty: there was none.
	SelfTest []string `json:"selfTest,omitempty"`
}

func newLearnt(stateDir string) *learnt {
	return &learnt{file: filepath.Join(stateDir, learntFile), replace: daemon.ReplaceFile, workers: map[string]learntWorker{}}
}

// read takes the file in. One that is missing is empty; one that cannot be used
// is an error and changes nothing: learning begins anew.
func (l *learnt) read() error {
	f, err := os.Open(l.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxLearntBytes+1))
	if err != nil {
		return err
	}
	if len(data) > maxLearntBytes {
		return fmt.Errorf("%s: more than %d bytes", l.file, maxLearntBytes)
	}
	workers, err := parseLearnt(data)
	if err != nil {
		return fmt.Errorf("%s: %w", l.file, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.workers, l.written = workers, data
	return nil
}

func parseLearnt(data []byte) (map[string]learntWorker, error) {
	var c learntContents
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, err
	}
	if c.Version != learntVersion {
		return nil, fmt.Errorf("version %d, this agent reads %d", c.Version, learntVersion)
	}
	for name, w := range c.Workers {
		if _, err := strconv.ParseUint(w.Process, 16, 64); err != nil {
			return nil, fmt.Errorf("workers[%q].process: %q is not a mark of 16 hex digits", name, w.Process)
		}
	}
	if c.Workers == nil {
		c.Workers = map[string]learntWorker{}
	}
	return c.Workers, nil
}

// of is what was learnt of a worker: of the same engine life, or of a former
// one that served the same model with the same version.
func (l *learnt) of(name string, f engine.Facts, process uint64) (queue.State, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, known := l.workers[name]
	if !known || w.Model != f.Model || w.Process != markHex(process) && w.EngineVersion != f.Version {
		return queue.State{}, false
	}
	return w.State, true
}

// accuracyOf is how right predictions about an engine life were.
func (l *learnt) accuracyOf(name string, process uint64) (accuracy.State, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, known := l.workers[name]
	return w.Accuracy, known && w.Process == markHex(process)
}

// selfTestOf is what the self-test of an engine life found; false: there was
// none.
func (l *learnt) selfTestOf(name string, process uint64) (engine.Capability, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, known := l.workers[name]
	if !known || w.Process != markHex(process) || len(w.SelfTest) == 0 {
		return 0, false
	}
	return engine.CapabilityOf(w.SelfTest) & (selfTestBits | engine.ReportsCachedTokens), true
}

// transfersTo are the transfers to a worker that were kept.
func (l *learnt) transfersTo(name string) transferLog {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.workers[name].Transfers
}

// write replaces the file at once if something was learnt since.
func (l *learnt) write(now map[string]learntWorker) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	data, err := l.merge(now)
	if err != nil || data == nil {
		return err
	}
	if err := l.replace(l.file, data); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.written = data
	return nil
}

// merge takes in what was learnt and returns the file's new contents; nil: they
// are what they were.
func (l *learnt) merge(now map[string]learntWorker) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// Engines that are not up yet keep what is known of them; those that are
	// not configured any more were left out of what was read.
	maps.Copy(l.workers, now)
	data, err := json.MarshalIndent(learntContents{Version: learntVersion, Workers: l.workers}, "", " ")
	if err != nil {
		return nil, err
	}
	data = append(data, '\n')
	if string(data) == string(l.written) || len(l.workers) == 0 {
		return nil, nil
	}
	return data, nil
}

// keep leaves only workers of engines that are asked for.
func (l *learnt) keep(configured func(worker string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range l.workers {
		if !configured(name) {
			delete(l.workers, name)
		}
	}
}

func markHex(process uint64) string { return fmt.Sprintf("%016x", process) }

// export is what was learnt of a worker so far.
func (r *rank) export() (w learntWorker, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.estimate == nil {
		return w, false
	}
	w = learntWorker{
		Process: markHex(r.process), Model: r.facts.Model, EngineVersion: r.facts.Version, State: r.estimate.Export(),
		Accuracy: r.accuracyNow().Export(r.ms(time.Now())), Transfers: r.transferLog().export(r.ms(time.Now())),
	}
	if r.selfTestOf == r.process && r.selfTestOf != 0 {
		w.SelfTest = append([]string{selfTestBegun}, r.selfTest.Names()...)
	}
	return w, true
}

// local is the name of a worker on its host.
func (r *rank) local() string { return fmt.Sprintf("%s/%d", r.engine, r.number) }

// keepLearnt writes what is learnt now and then until the agent ends.
func (a *Agent) keepLearnt() {
	t := time.NewTicker(learntEvery)
	defer t.Stop()
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-t.C:
			a.saveLearnt()
		}
	}
}

// saveLearnt writes what was learnt. It is no matter of life: a disk that is
// full is told once a minute.
func (a *Agent) saveLearnt() {
	now := map[string]learntWorker{}
	for _, r := range a.ranks() {
		if w, ok := r.export(); ok {
			now[r.local()] = w
		}
	}
	if err := a.learnt.write(now); err != nil {
		a.log.Warn("what was learnt of the workers' speed is not kept", "error", err)
	}
}

// loadLearnt reads what was learnt before.
func (a *Agent) loadLearnt() {
	if err := a.learnt.read(); err != nil {
		a.log.Warn("what was learnt of the workers' speed cannot be used; learning begins anew", "error", err)
	}
	engines := map[string]bool{}
	for _, w := range a.watching() {
		engines[w.target.Name] = true
	}
	// An engine that is found may be restarting just now.
	const maxAbsent = 64
	absent := 0
	a.learnt.keep(func(worker string) bool {
		engine, _, _ := strings.Cut(worker, "/")
		if engines[engine] {
			return true
		}
		absent++
		return a.cfg.Discover.Enabled && absent <= maxAbsent
	})
}
