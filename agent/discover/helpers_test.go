package discover

import (
	"fmt"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// mpi is the environment of a rank as Open MPI's launcher makes it.
func mpi(namespace string, rank, size, local, localSize int) string {
	return fmt.Sprintf("HOME=/root\x00PMIX_NAMESPACE=%s\x00OMPI_COMM_WORLD_RANK=%d\x00OMPI_COMM_WORLD_SIZE=%d\x00OMPI_COMM_WORLD_LOCAL_RANK=%d\x00OMPI_COMM_WORLD_LOCAL_SIZE=%d", namespace, rank, size, local, localSize)
}

func TestJobOf(t *testing.T) {
	slurm := "SLURM_JOB_ID=77\x00SLURM_STEP_ID=0\x00SLURM_PROCID=9\x00SLURM_NODEID=1\x00SLURM_STEP_NUM_NODES=2"
	for name, c := range map[string]struct {
		environ string
		want    job
	}{
		"first rank of the second host":       {mpi("prterun-gpu-01-5@1", 8, 16, 0, 8), job{"mpi-prterun-gpu-01-5@1", 1, 2}},
		"last rank":                           {mpi("5@1", 15, 16, 7, 8), job{"mpi-5@1", 1, 2}},
		"one host":                            {mpi("5@1", 3, 8, 3, 8), job{"mpi-5@1", 0, 1}},
		"ranks go round the hosts":            {mpi("5@1", 2, 4, 1, 2), job{name: "mpi-5@1"}},
		"hosts with unlike many ranks":        {mpi("5@1", 5, 7, 1, 2), job{name: "mpi-5@1"}},
		"numbers that cannot be":              {mpi("5@1", -1, 16, -1, 8), job{name: "mpi-5@1"}},
		"a rank beyond the last":              {mpi("5@1", 16, 16, 0, 8), job{name: "mpi-5@1"}},
		"no name":                             {mpi("", 8, 16, 0, 8), job{}},
		"a step of Slurm":                     {slurm, job{"slurm-77.0", 1, 2}},
		"Open MPI within a step":              {slurm + "\x00" + mpi("5@1", 0, 16, 0, 8), job{"mpi-5@1", 0, 2}},
		"a step without its number of hosts":  {"SLURM_JOB_ID=77\x00SLURM_STEP_ID=0", job{name: "slurm-77.0"}},
		"a job without a step is no launcher": {"SLURM_JOB_ID=77", job{}},
		"nothing":                             {"HOME=/root", job{}},
	} {
		s := New(Options{Proc: fstest.MapFS{"41/environ": {Data: []byte(c.environ)}}})
		if got := s.jobOf(41); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
	if got := New(Options{Proc: fstest.MapFS{}}).jobOf(41); got != (job{}) {
		t.Errorf("an environment that cannot be read: %+v", got)
	}
}

// Processes that launchers and Ray start belong to the engine that they work for,
// or are this host's share of one that another host serves.
func TestHelpersAreJoined(t *testing.T) {
	const (
		serve  = "/usr/bin/python3 /usr/local/bin/trtllm-serve m --host 0.0.0.0 --port 8000 --tp_size 4"
		leader = "python3 -m tensorrt_llm.llmapi.mgmn_leader_node"
		worker = "python3 -m tensorrt_llm.llmapi.mgmn_worker_node"
		ray    = "ray::RayWorkerWrapper.execute_method"
		overRy = "vllm serve m --tensor-parallel-size 4 --distributed-executor-backend ray"
	)
	type proc struct {
		pid, uid int
		args     string
		environ  string
		listens  bool
	}
	for name, c := range map[string]struct {
		procs []proc
		want  []string
	}{
		"front of two hosts": {
			[]proc{{41, 0, serve, mpi("5@1", 0, 4, 0, 2), true}, {42, 0, leader, mpi("5@1", 0, 4, 0, 2), false}, {43, 0, worker, mpi("5@1", 1, 4, 1, 2), false}, {44, 0, worker, mpi("6@1", 1, 2, 1, 2), false}},
			[]string{"trtllm pid=41 here helpers=[42 43] group=mpi-5@1 node 0 of 2 front=true"},
		},
		"second host": {
			[]proc{{50, 0, worker, mpi("5@1", 2, 4, 0, 2), false}, {51, 0, worker, mpi("5@1", 3, 4, 1, 2), false}, {52, 0, worker, mpi("9@1", 2, 4, 0, 2), false}},
			[]string{"trtllm pid=50 nowhere helpers=[51] group=mpi-5@1 node 1 of 2 front=false", "trtllm pid=52 nowhere helpers=[] group=mpi-9@1 node 1 of 2 front=false"},
		},
		"one host": {
			[]proc{{41, 0, serve, mpi("5@1", 0, 2, 0, 2), true}, {43, 0, worker, mpi("5@1", 1, 2, 1, 2), false}},
			[]string{"trtllm pid=41 here helpers=[43]"},
		},
		"somebody else's process that says so": {
			[]proc{{41, 0, serve, mpi("5@1", 0, 2, 0, 2), true}, {43, 1000, worker, mpi("5@1", 1, 2, 1, 2), false}},
			[]string{"trtllm pid=41 here helpers=[]"},
		},
		"no launcher is known": {
			[]proc{{41, 0, serve, "", true}, {43, 0, worker, "", false}},
			[]string{"trtllm pid=41 here helpers=[]"},
		},
		"Ray": {
			[]proc{{41, 0, overRy, "", true}, {60, 0, ray, "", false}, {61, 0, ray, "", false}, {62, 1000, ray, "", false}},
			[]string{"vllm pid=41 here helpers=[60 61]"},
		},
		"two engines over one Ray": {
			[]proc{{41, 0, overRy, "", true}, {45, 0, overRy + " --port 8001", "", false}, {60, 0, ray, "", false}},
			[]string{"vllm pid=41 here helpers=[]", "vllm pid=45 nowhere helpers=[]"},
		},
		"Ray of an engine elsewhere": {
			[]proc{{41, 0, "vllm serve m", "", true}, {60, 0, ray, "", false}},
			[]string{"vllm pid=41 here helpers=[]"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tb := newTable()
			for _, p := range c.procs {
				f := fake{pid: p.pid, uid: p.uid, args: p.args}
				if p.listens {
					f.listens = []string{all8000}
				}
				tb.add(f)
				if p.environ != "" {
					tb.MapFS[fmt.Sprintf("%d/environ", p.pid)] = &fstest.MapFile{Data: []byte(p.environ)}
				}
			}
			tb.finish()
			sameInEachScan(t, New(Options{Proc: tb}), c.want, func(e *Engine) string {
				text := fmt.Sprintf("%s pid=%d %s helpers=%v", e.Kind, e.PID, e.Place, e.Helpers)
				if g := e.Group; g != nil {
					text += fmt.Sprintf(" group=%s node %d of %d front=%v", g.Meeting, g.Node, g.Nodes, g.Front)
				}
				return text
			})
		})
	}
	if helperOf(strings.Fields("python3 -m tensorrt_llm.commands.serve m")) != nil || helperOf(nil) != nil {
		t.Error("an engine is taken for a helper")
	}
}

// Ray's service on a host tells the head of its cluster: the engine over Ray is a
// front there, and workers of Ray without an engine of their own are this host's
// share of one at the same head.
func TestRayOverHosts(t *testing.T) {
	const (
		raylet = "/usr/local/lib/python3/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/raylet --node_ip_address=10.0.0.2 --gcs-address="
		worker = "ray::RayWorkerWrapper.execute_method"
		engine = "vllm serve m --tensor-parallel-size 16 --distributed-executor-backend ray"
		head   = "10.0.0.1:6379"
	)
	listening := func(f fake) fake { f.listens = []string{all8000}; return f }
	for name, c := range map[string]struct {
		procs []fake
		want  []string
	}{
		"the engine's host": {
			[]fake{{pid: 30, parent: 1, args: raylet + head}, listening(fake{pid: 41, parent: 1, args: engine}), {pid: 60, parent: 30, args: worker}, {pid: 61, parent: 30, args: worker}},
			[]string{"pid=41 here helpers=[60 61] at 10.0.0.1:6379 front=true"},
		},
		"it has no worker": {
			[]fake{{pid: 30, parent: 1, args: raylet + head}, listening(fake{pid: 41, parent: 1, args: engine})},
			[]string{"pid=41 here helpers=[] at 10.0.0.1:6379 front=true"},
		},
		"another host": {
			[]fake{{pid: 30, parent: 1, args: raylet + head}, {pid: 60, parent: 30, args: worker}, {pid: 61, parent: 30, args: worker}},
			[]string{"pid=60 nowhere helpers=[61] at 10.0.0.1:6379 front=false"},
		},
		"the flag in the older spelling": {
			[]fake{{pid: 30, parent: 1, args: "raylet --gcs_address 10.0.0.1:6379"}, {pid: 60, parent: 30, args: worker}},
			[]string{"pid=60 nowhere helpers=[] at 10.0.0.1:6379 front=false"},
		},
		"a launcher between them": {
			[]fake{{pid: 30, parent: 1, args: raylet + head}, {pid: 31, parent: 30, args: "bash -c conda"}, {pid: 60, parent: 31, args: worker}},
			[]string{"pid=60 nowhere helpers=[] at 10.0.0.1:6379 front=false"},
		},
		"an engine that is not over Ray": {
			[]fake{{pid: 30, parent: 1, args: raylet + head}, listening(fake{pid: 41, parent: 1, args: "vllm serve m"}), {pid: 60, parent: 30, args: worker}},
			[]string{"pid=41 here helpers=[]", "pid=60 nowhere helpers=[] at 10.0.0.1:6379 front=false"},
		},
		"two clusters of one user: the engine's is not guessed": {
			[]fake{{pid: 30, parent: 1, args: raylet + head}, {pid: 31, parent: 1, args: raylet + "10.0.0.9:6379"}, listening(fake{pid: 41, parent: 1, args: engine})},
			[]string{"pid=41 here helpers=[]"},
		},
		"two clusters, workers of both": {
			[]fake{{pid: 30, parent: 1, args: raylet + head}, {pid: 31, parent: 1, args: raylet + "10.0.0.9:6379"}, {pid: 60, parent: 30, args: worker}, {pid: 61, parent: 31, args: worker}},
			[]string{"pid=60 nowhere helpers=[] at 10.0.0.1:6379 front=false", "pid=61 nowhere helpers=[] at 10.0.0.9:6379 front=false"},
		},
		"two engines in one cluster: whose workers these are is not guessed": {
			[]fake{{pid: 30, parent: 1, args: raylet + head}, listening(fake{pid: 41, parent: 1, args: engine}), {pid: 42, parent: 1, args: engine + " --port 8001"}, {pid: 60, parent: 30, args: worker}},
			[]string{"pid=41 here helpers=[] at 10.0.0.1:6379 front=true", "pid=42 nowhere helpers=[] at 10.0.0.1:6379 front=true"},
		},
		"somebody else's service": {
			[]fake{{pid: 30, parent: 1, uid: 1000, args: raylet + head}, {pid: 60, parent: 30, args: worker}, listening(fake{pid: 41, parent: 1, args: "vllm serve m"})},
			[]string{"pid=41 here helpers=[]"},
		},
		"a service that does not tell": {
			[]fake{{pid: 30, parent: 1, args: "raylet --gcs-address="}, {pid: 60, parent: 30, args: worker}},
			nil,
		},
		"no service": {
			[]fake{{pid: 60, parent: 1, args: worker}},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			tb := newTable()
			for _, p := range c.procs {
				tb.add(p)
			}
			tb.finish()
			sameInEachScan(t, New(Options{Proc: tb}), c.want, func(e *Engine) string {
				text := fmt.Sprintf("pid=%d %s helpers=%v", e.PID, e.Place, e.Helpers)
				if g := e.Group; g != nil {
					text += fmt.Sprintf(" at %s front=%v", g.Meeting, g.Front)
					if !g.Uncounted || g.Part() != "ray workers" {
						t.Errorf("%+v", g)
					}
				}
				return text
			})
		})
	}
}

// sameInEachScan scans a few times and compares the engines found, as shown.
func sameInEachScan(t *testing.T, s *Scanner, want []string, show func(*Engine) string) {
	t.Helper()
	for scan := range 3 {
		r, err := s.Scan()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for i := range r.Engines {
			got = append(got, show(&r.Engines[i]))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("scan %d: %s", scan, diff)
		}
	}
}
