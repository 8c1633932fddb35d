package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/identity"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// daemonProcess is one running daemon of the real program.
type daemonProcess struct {
	cmd  *exec.Cmd
	log  bytes.Buffer
	done chan struct{}
}

// processes is a fleet of real processes: coordinators with TLS and one agent
// with an emulated engine.
type processes struct {
	*rig
	dir     string
	program string
	coords  []*daemonProcess
	agent   *daemonProcess
	// metrics is where the agent serves its series, gpu the section of its file
	// about GPUs.
	metrics, gpu string
	// ranks are those of the engine.
	ranks int
	// api is how the coordinators' API is called.
	api *tls.Config
}

// freePort is a port for TCP and UDP at a loopback address that no other test
// uses: nobody takes it until it is listened on, or between two lives.
func freePort(t *testing.T) string {
	t.Helper()
	for range 20 {
		l, err := net.Listen("tcp", net.JoinHostPort(ownLoopback(), "0"))
		if err != nil {
			t.Fatal(err)
		}
		address := l.Addr().String()
		u, err := net.ListenPacket("udp", address)
		l.Close()
		if err == nil {
			u.Close()
			return address
		}
	}
	t.Fatal("no port is free for TCP and UDP")
	return ""
}

func startProcesses(t *testing.T, coordinators int, change ...func(*processes)) *processes {
	t.Helper()
	p := &processes{program: program(t), dir: t.TempDir(), metrics: freePort(t), ranks: 1, gpu: `enabled = "off"`}
	for _, c := range change {
		c(p)
	}
	takeSlot(t)
	e, err := emulator.Start(emulator.Options{Model: "Llama-3.1-8B", BlockTokens: 16, Ranks: p.ranks})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	c := &Cluster{opt: Options{Dir: p.dir, Engines: make([]emulator.Options, 1), Coordinators: coordinators}, Engines: []*emulator.Engine{e}}
	p.rig = &rig{Cluster: c, t: t}
	if err := c.writeCerts(t.Context()); err != nil {
		t.Fatal(err)
	}
	tlsConfig, err := identity.APIClient(c.Cert("ca.pem"), c.Cert("admin.pem"), c.Cert("admin.key"))
	if err != nil {
		t.Fatal(err)
	}
	p.api = tlsConfig
	for range coordinators {
		c.apiAddr = append(c.apiAddr, freePort(t))
		c.clusterAddr, c.meshAddr = append(c.clusterAddr, freePort(t)), append(c.meshAddr, freePort(t))
		conn, err := grpc.NewClient("passthrough:///"+c.apiAddr[len(c.apiAddr)-1], grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig)),
			grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		c.conns = append(c.conns, conn)
	}
	p.coords = make([]*daemonProcess, coordinators)
	for i := range coordinators {
		p.writeCoordinator(i)
		var once []string
		if i == 0 {
			once = []string{"--bootstrap"}
		}
		p.startCoordinator(i, once...)
	}
	p.writeAgent()
	p.agent = p.start("agent", "--config", filepath.Join(p.dir, "agent.toml"))
	return p
}

// start runs a daemon and ends it with the test.
func (p *processes) start(args ...string) *daemonProcess {
	p.t.Helper()
	d := &daemonProcess{cmd: exec.Command(p.program, args...), done: make(chan struct{})}
	d.cmd.Env, d.cmd.Stderr = cleanEnv(), &d.log
	if err := d.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	go func() {
		defer close(d.done)
		// How it ended is told by its state.
		_ = d.cmd.Wait()
	}()
	p.t.Cleanup(func() {
		d.signal(syscall.SIGTERM)
		select {
		case <-d.done:
		case <-time.After(patience):
			p.t.Errorf("%v did not end on SIGTERM", args)
			d.signal(syscall.SIGKILL)
			<-d.done
		}
		if p.t.Failed() {
			p.t.Logf("%v:\n%s", args, tail(d.log.String(), 3000))
		}
	})
	return d
}

func tail(s string, n int) string { return s[max(0, len(s)-n):] }

// signal does nothing to a process that has ended.
func (d *daemonProcess) signal(s syscall.Signal) {
	select {
	case <-d.done:
	default:
		_ = d.cmd.Process.Signal(s)
	}
}

func (d *daemonProcess) kill() {
	d.signal(syscall.SIGKILL)
	<-d.done
}

func (p *processes) startCoordinator(i int, args ...string) {
	p.coords[i] = p.start(append([]string{"coordinator", "--config", p.coordinatorFile(i)}, args...)...)
}

func (p *processes) coordinatorFile(i int) string {
	return filepath.Join(p.dir, CoordinatorName(i)+".toml")
}

func quoted(list []string, but int) string {
	var out []string
	for i, s := range list {
		if i != but {
			out = append(out, fmt.Sprintf("%q", s))
		}
	}
	return strings.Join(out, ", ")
}

func (p *processes) writeCoordinator(i int) {
	name := CoordinatorName(i)
	p.write(p.coordinatorFile(i), fmt.Sprintf(`name = %q
state_dir = %q
run_dir = ""
[tls]
ca_file = %q
cert_file = %q
key_file = %q
[mesh]
listen = %q
key_file = %q
fleet = "test"
join = [%s]
[cluster]
listen = %q
join = [%s]
[api]
listen = %q
[prefix]
key_file = %q
`, name, filepath.Join(p.dir, name), p.Cert("ca.pem"), p.Cert("coordinator-"+name+".pem"), p.Cert("coordinator-"+name+".key"),
		p.meshAddr[i], p.Cert("mesh.key"), quoted(p.meshAddr, i), p.clusterAddr[i], quoted(p.clusterAddr, i), p.apiAddr[i], p.Cert("prefix.key")))
}

func (p *processes) writeAgent() {
	e := p.Engines[0]
	p.write(filepath.Join(p.dir, "agent.toml"), fmt.Sprintf(`name = %q
state_dir = %q
run_dir = %q
[tls]
ca_file = %q
cert_file = %q
key_file = %q
[mesh]
listen = "127.0.0.1:0"
key_file = %q
fleet = "test"
join = [%s]
[prefix]
key_file = %q
[metrics]
listen = %q
[gpu]
%s
[discover]
enabled = false
[[engine]]
name = %q
kind = "vllm"
url = %q
kv_events = %q
kv_replay = %q
`, HostName(0), filepath.Join(p.dir, HostName(0)), filepath.Join(p.dir, "run"), p.Cert("ca.pem"), p.Cert("agent-"+HostName(0)+".pem"), p.Cert("agent-"+HostName(0)+".key"),
		p.Cert("mesh.key"), quoted(p.meshAddr, -1), p.Cert("prefix.key"), p.metrics, p.gpu, EngineName, e.URL(), e.EventsEndpoint(), e.ReplayEndpoint()))
}

func (p *processes) write(path, text string) {
	p.t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// cli runs a command against a coordinator with a role's certificate.
func (p *processes) cli(i int, role string, args ...string) ran {
	p.t.Helper()
	return run(p.t, append(args, "--addr", p.apiAddr[i], "--ca-file", p.Cert("ca.pem"), "--cert-file", p.Cert(role+".pem"), "--key-file", p.Cert(role+".key"))...)
}

// roles is the role of each coordinator, as one that answers sees it.
func (p *processes) roles() map[string]string {
	for i, d := range p.coords {
		if d.ended() {
			continue
		}
		ctx, cancel := context.WithTimeout(p.t.Context(), 10*time.Second)
		resp, err := p.Operator(i).ListCoordinators(ctx, &waypostv1.ListCoordinatorsRequest{})
		cancel()
		if err != nil {
			continue
		}
		out := map[string]string{}
		for _, m := range resp.GetCoordinators() {
			out[m.GetName()] = m.GetRole()
		}
		return out
	}
	return nil
}

func (d *daemonProcess) ended() bool {
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// leads is the index of the leader among the running coordinators.
func (p *processes) leads() int {
	p.t.Helper()
	at := -1
	p.eventually("no leader", func() string {
		roles := p.roles()
		for i, d := range p.coords {
			if !d.ended() && roles[CoordinatorName(i)] == "leader" {
				at = i
				return ""
			}
		}
		return fmt.Sprint(roles)
	})
	return at
}

// formed waits until all coordinators vote and each sees the worker.
func (p *processes) formed() {
	p.t.Helper()
	p.eventually("no cluster", func() string {
		roles, voting := p.roles(), 0
		for _, r := range roles {
			if r == "leader" || r == "voter" {
				voting++
			}
		}
		if voting != len(p.coords) {
			return fmt.Sprint(roles)
		}
		for i := range p.coords {
			if w := p.worker(i, WorkerName(0, 0)); notLive(w) != "" {
				return fmt.Sprintf("%s: worker %s", CoordinatorName(i), notLive(w))
			}
		}
		return ""
	})
}

// background writes through one coordinator and places on others until stop.
type background struct {
	mu        sync.Mutex
	committed []string
	placed    map[int]int
	failed    []error
	stop      func()
}

func (r *rig) background(writeAt int, placeAt ...int) *background {
	b := &background{placed: map[int]int{}}
	ended := make(chan struct{})
	life := rand.Uint32()
	var wg sync.WaitGroup
	var once sync.Once
	b.stop = func() { once.Do(func() { close(ended); wg.Wait() }) }
	r.t.Cleanup(b.stop)
	loop := func(fn func(n int)) {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-ended:
					return
				default:
					fn(n)
				}
			}
		})
	}
	loop(func(n int) {
		name := fmt.Sprintf("host-%x-%04d", life, n)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if _, err := cordonOn(ctx, r.Operator(writeAt), name, "w-"+name); err == nil {
			b.mu.Lock()
			b.committed = append(b.committed, name)
			b.mu.Unlock()
		}
		time.Sleep(10 * time.Millisecond)
	})
	for _, i := range placeAt {
		loop(func(n int) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			resp, err := r.Placement(i).Place(ctx, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens(uint32(n), 64)}, Reserve: proto.Bool(false)})
			if err == nil && resp.GetPlacement() == nil {
				err = fmt.Errorf("refused: %s", resp.GetRefused().GetDetail())
			}
			b.mu.Lock()
			b.placed[i]++
			if err != nil {
				b.failed = append(b.failed, fmt.Errorf("%s: %w", CoordinatorName(i), err))
			}
			b.mu.Unlock()
			time.Sleep(5 * time.Millisecond)
		})
	}
	return b
}

func (b *background) count() (committed, placed int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range b.placed {
		placed += n
	}
	return len(b.committed), placed
}

func (b *background) lost(have map[string]bool) (lost []string) {
	for _, name := range b.committed {
		if !have[name] {
			lost = append(lost, name)
		}
	}
	return lost
}

// TestProcessesSurviveTheirLeader kills coordinators of a fleet of real
// processes one after the other, down to none, and starts them again.
func TestProcessesSurviveTheirLeader(t *testing.T) {
	t.Parallel()
	p := startProcesses(t, 3)
	p.formed()
	p.commands()

	b := p.background(0, 0, 1, 2)
	knockAll(p.strangers(t), map[string]string{p.apiAddr[0]: "tcp", p.clusterAddr[1]: "tcp", p.meshAddr[2]: "tcp"})
	b.undisturbed(t)
	before := b.committed

	dead := p.leads()
	alive := []int{(dead + 1) % 3, (dead + 2) % 3}
	b = p.background(alive[0], alive...)
	more := func(n int) {
		before, placedBefore := b.count()
		p.eventually("writes do not get through", func() string {
			c, placed := b.count()
			if c < before+n || placed < placedBefore+50 {
				return fmt.Sprintf("%d new writes, %d new placements", c-before, placed-placedBefore)
			}
			return ""
		})
	}
	more(5)
	p.coords[dead].kill()
	more(5)
	b.stop()
	b.committed = append(b.committed, before...)
	if _, placed := b.count(); len(b.failed) > 0 {
		t.Errorf("%d of %d placements failed while the leader died, first: %v", len(b.failed), placed, b.failed[0])
	}
	for _, i := range alive {
		if lost := b.lost(p.cordons(i)); len(lost) > 0 {
			t.Errorf("%s lost committed writes: %v", CoordinatorName(i), lost)
		}
	}

	again := run(t, "coordinator", "--config", p.coordinatorFile(dead), "--bootstrap")
	again.wants(t, "bootstrap over state", 2, "--bootstrap", "holds the state of coordinator")
	p.startCoordinator(dead)
	p.eventually("the killed coordinator does not catch up", func() string {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		resp, err := p.Operator(dead).GetStatus(ctx, &waypostv1.GetStatusRequest{})
		if err != nil || len(resp.GetCordons()) < len(b.committed) {
			return fmt.Sprintf("%d of %d cordons, %v", len(resp.GetCordons()), len(b.committed), err)
		}
		return ""
	})
	if lost := b.lost(p.cordons(dead)); len(lost) > 0 {
		t.Errorf("the killed coordinator lost committed writes: %v", lost)
	}
	p.withoutQuorum(alive)
	p.withoutCoordinators()

	for i := range p.coords {
		p.startCoordinator(i)
	}
	p.formed()
	for i := range p.coords {
		if lost := b.lost(p.cordons(i)); len(lost) > 0 {
			t.Errorf("after all were killed %s lost committed writes: %v", CoordinatorName(i), lost)
		}
	}
}

// commands checks the exit codes of the command line against a whole fleet.
func (p *processes) commands() {
	t := p.t
	p.cli(0, "viewer", "status").wants(t, "status", 0, "Fleet test", "leader c-0", "No problems")
	p.cli(1, "viewer", "workers").wants(t, "workers", 0, WorkerName(0, 0), "ready", "live")
	p.cli(2, "viewer", "members").wants(t, "members", 0, "gpu-01", "c-03", "alive")
	p.cli(1, "placer", "place", "--tokens", "100").wants(t, "place", 0, WorkerName(0, 0))
	p.cli(1, "viewer", "cordon", "gpu-01", "--reason", "x").wants(t, "cordon by a viewer", 5, "viewer")
	p.cli(1, "viewer", "place", "--tokens", "100").wants(t, "place by a viewer", 5, "viewer has role viewer; this needs placer")
	p.cli(1, "agent-gpu-01", "status").wants(t, "status with an agent's certificate", 3, p.apiAddr[1])
	p.cli(0, "placer", "place", "--tokens", "100", "--pool", "nowhere").wants(t, "unknown pool", 2, "nowhere", "Llama-3.1-8B")
	p.cli(0, "operator", "cordon", "gpu-01").wants(t, "cordon without a reason", 2, "--reason")

	file := filepath.Join(p.dir, "fleet.toml")
	p.write(file, "[[zone]]\nname = \"z1\"\n")
	for i := range p.coords { // followers forward
		version := fmt.Sprint(i)
		p.cli(i, "admin", "fleet", "apply", file, "--base", version).wants(t, "fleet apply at "+CoordinatorName(i), 0)
		p.write(file, fmt.Sprintf("[[zone]]\nname = \"z%d\"\n", i+2))
	}
	p.cli(1, "admin", "fleet", "apply", file, "--base", "1").wants(t, "fleet apply over another's change", 6, "version")
	p.write(file, "[[zone]]\nnmae = \"z1\"\n")
	p.cli(1, "admin", "fleet", "diff", file).wants(t, "fleet file with a wrong key", 2, "nmae", "name")

	p.cli(2, "operator", "cordon", "gpu-01", "--reason", "test").wants(t, "cordon", 0, "in force on all 3 coordinators")
	for i := range p.coords {
		p.cli(i, "placer", "place", "--tokens", "100").wants(t, "place with everything cordoned", 4)
	}
	p.cli(1, "operator", "uncordon", "gpu-01").wants(t, "uncordon", 0, "allowed again")
}

// withoutQuorum kills all coordinators but one.
func (p *processes) withoutQuorum(kill []int) {
	t := p.t
	left := 3 - kill[0] - kill[1]
	for _, i := range kill {
		p.coords[i].kill()
	}
	p.eventually("the lost quorum is not seen", func() string {
		if r := p.cli(left, "viewer", "status"); r.code != 0 || !strings.Contains(r.out, "no leader") {
			return r.out + r.errOut
		}
		return ""
	})
	p.cli(left, "viewer", "status", "--check").wants(t, "status --check without quorum", 1, "coordinators", "no leader")
	p.cli(left, "operator", "cordon", "gpu-09", "--reason", "test").wants(t, "cordon without quorum", 3, "leader")
	p.cli(left, "placer", "place", "--tokens", "100").wants(t, "place without quorum", 0, WorkerName(0, 0))
	p.coords[left].kill()
}

// withoutCoordinators asks when only the agent is left.
func (p *processes) withoutCoordinators() {
	t := p.t
	socket := filepath.Join(p.dir, "run", "agent.sock")
	r := run(t, "members", "--addr", "unix:"+socket)
	r.wants(t, "members at the agent with every coordinator down", 0, "gpu-01", "c-01", "c-02", "c-03")
	run(t, "members", "--json", "--addr", "unix:"+socket).wants(t, "members --json at the agent", 0, `"name":"gpu-01"`)
	run(t, "status", "--addr", "unix:"+socket).wants(t, "status at the agent", 3, "waypost members")
	p.cli(0, "viewer", "workers").wants(t, "workers at a dead coordinator", 3, p.apiAddr[0])
	run(t, "workers", "--addr", "unix:"+filepath.Join(p.dir, "none.sock")).wants(t, "no socket there", 3)
}
