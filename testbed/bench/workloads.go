package bench

import (
	"fmt"
	"os"
	"time"

	"waypost/testbed/workload"
)

// The fleet that streams are measured with, and the load on it.
const (
	streamWorkers = 16
	poolBlocks    = 32768

	mixPerWorker  = 7.75 // requests/s offered; 7.2 arrive while sessions still ramp up
	chatPerWorker = 8.1
	convSpeedup   = 9
	// samplePerWorker gives the churn of the whole trace: the sample's prompts
	// are longer.
	samplePerWorker = 1.6
	benchSeed       = 0
)

// synthetic gives the requests of a generated workload.
func synthetic(p workload.Profile, perWorker, seconds, warmUp float64) (streamOptions, error) {
	o := streamOptions{name: p.String(), source: "generated", workers: streamWorkers, blocks: poolBlocks, durationMs: seconds * 1000, warmUp: warmUp}
	g, err := workload.NewGenerator(p, benchSeed)
	if err != nil {
		return o, err
	}
	o.requests, err = g.Requests(perWorker*streamWorkers, time.Duration(seconds*float64(time.Second)))
	return o, err
}

// convShape makes token ids of the trace's blocks: prompts part within blocks,
// at multiples of the engines' block length, and ids take as many bytes as those
// of the generated workloads.
var convShape = workload.Shape{SiblingTokens: blockTokens, FirstToken: workload.SyntheticFirst, TokenCount: workload.SyntheticCount}

// conv is Mooncake's conversation trace at nine times its speed: the whole trace
// if there is a file, else conversations drawn from the sample that ships.
func conv(file string, seconds, warmUp float64) (streamOptions, error) {
	o := streamOptions{name: "conv", workers: streamWorkers, blocks: poolBlocks, warmUp: warmUp}
	if file == "" {
		o.source, o.durationMs = "drawn from the shipped sample of 570 requests; --trace FILE replays the whole trace", seconds*1000
		t, err := workload.SampleConversations()
		if err != nil {
			return o, err
		}
		o.requests, err = t.Conversations(workload.Sampling{
			Shape: convShape, Seed: benchSeed, RequestsPerSecond: samplePerWorker * streamWorkers,
			Duration: time.Duration(seconds * float64(time.Second)), Speedup: convSpeedup,
		})
		return o, err
	}
	f, err := os.Open(file)
	if err != nil {
		return o, err
	}
	defer f.Close()
	t, err := workload.ReadMooncake(f)
	if err != nil {
		return o, fmt.Errorf("%s: %w", file, err)
	}
	o.source = fmt.Sprintf("%s, %d requests", file, len(t.Requests))
	if o.requests, err = t.Replay(workload.Replay{Shape: convShape, Seed: benchSeed, Speedup: convSpeedup}); err != nil {
		return o, fmt.Errorf("%s: %w", file, err)
	}
	o.durationMs = o.requests[len(o.requests)-1].ArrivalMs
	return o, nil
}
