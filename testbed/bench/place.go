package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// Place says how placements over sockets are measured.
type Place struct {
	// Quick takes shorter windows.
	Quick bool
	// Progress is told what is being measured; nil: nobody is.
	Progress func(what string)
}

// Transport is how a placement is asked for.
type Transport string

// The transports.
const (
	TransportGRPC Transport = "grpc"
	TransportJSON Transport = "json"
)

// Placed is what placements cost their callers.
type Placed struct {
	Workers      int
	Transport    Transport
	PromptTokens int
	// Place is the time of one placement with a reservation, one caller at a
	// time, ns.
	Place quantiles
	// PlacesPerSec are the placements of placeCallers callers, each released
	// before the next one.
	PlacesPerSec float64
	// CPU is the processor time of such a placement with its release, of this
	// process: callers, coordinator and the agents it tells.
	CPU time.Duration
	// Matched is the share of placements with a reuse.
	Matched float64
}

// PlaceReport is what was measured.
type PlaceReport struct {
	Quick  bool
	Places []Placed
	Took   time.Duration
}

const (
	placeCallers  = 8
	placeTimeout  = time.Minute
	shortPrompt   = 1024
	placeBlocks   = 4000 // of each worker, in chains
	placesToTally = 64
)

// placePlan is one size of the benchmark.
type placePlan struct {
	workers []int
	blocks  int
	window  time.Duration
	rounds  int
}

func (o Place) plan() placePlan {
	if o.Quick {
		return placePlan{workers: []int{64, 1000}, blocks: placeBlocks / 2, window: 500 * time.Millisecond, rounds: 3}
	}
	return placePlan{workers: []int{64, 1000}, blocks: placeBlocks, window: 2 * time.Second, rounds: repetitions}
}

// Run measures one fleet after the other. With an error it returns what was
// measured before.
func (o Place) Run(ctx context.Context) (*PlaceReport, error) {
	began := time.Now()
	r := &PlaceReport{Quick: o.Quick}
	err := o.run(ctx, o.plan(), r)
	r.Took = time.Since(began)
	return r, err
}

func (o Place) say(format string, args ...any) {
	if o.Progress != nil {
		o.Progress(fmt.Sprintf(format, args...))
	}
}

func (o Place) run(ctx context.Context, p placePlan, r *PlaceReport) error {
	for _, workers := range p.workers {
		if err := o.fleet(ctx, p, workers, r); err != nil {
			return fmt.Errorf("%d workers: %w", workers, err)
		}
	}
	return nil
}

// fleet measures all transports and prompts over one number of workers.
func (o Place) fleet(ctx context.Context, p placePlan, workers int, r *PlaceReport) (err error) {
	o.say("a coordinator with %d workers over lanes", workers)
	opt := fleetOptions{workers: workers, blocks: p.blocks}
	s, err := startService(ctx, opt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	var prompts [][]uint32
	for _, q := range chainQueries(opt)[:128] {
		prompts = append(prompts, q.AppendTokens(nil))
	}
	for _, tokens := range []int{shortPrompt, chainBlocks * blockTokens} {
		for _, t := range []Transport{TransportGRPC, TransportJSON} {
			o.say("%d workers, %d token ids over %s", workers, tokens, t)
			one, err := measurePlaces(ctx, p, s, t, prompts, tokens)
			if err != nil {
				return fmt.Errorf("%d token ids over %s: %w", tokens, t, err)
			}
			one.Workers = workers
			r.Places = append(r.Places, one)
		}
	}
	return nil
}

// caller asks a coordinator for placements. One serves many goroutines.
type caller interface {
	// place reserves a worker for prompt i; used to compare answers.
	place(ctx context.Context, i int) (placement string, reuse int, err error)
	// release gives the worker back.
	release(ctx context.Context, placement string) error
	close() error
}

func measurePlaces(ctx context.Context, p placePlan, s *service, t Transport, prompts [][]uint32, tokens int) (Placed, error) {
	out := Placed{Transport: t, PromptTokens: tokens}
	cut := make([][]uint32, len(prompts))
	for i := range prompts {
		cut[i] = prompts[i][:tokens]
	}
	c, err := newCaller(s.address(), t, cut)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	matched := 0
	for i := range placesToTally {
		id, reuse, err := c.place(ctx, i)
		if err != nil {
			return out, err
		}
		if reuse > 0 {
			matched++
		}
		if err := c.release(ctx, id); err != nil {
			return out, err
		}
	}
	out.Matched = float64(matched) / placesToTally
	var alone []quantiles
	for range p.rounds {
		q, _, _, err := drivePlaces(ctx, c, 1, p.window)
		if err != nil {
			return out, err
		}
		alone = append(alone, q)
		_, perSec, cpu, err := drivePlaces(ctx, c, placeCallers, p.window)
		if err != nil {
			return out, err
		}
		if out.PlacesPerSec = max(out.PlacesPerSec, perSec); out.CPU == 0 || cpu < out.CPU {
			out.CPU = cpu
		}
	}
	out.Place = best(alone)
	return out, err
}

// drivePlaces lets callers place and release for a while. The time is of the
// placement only, the rate that of placements with their releases, as is the
// processor time of one.
func drivePlaces(ctx context.Context, c caller, callers int, window time.Duration) (quantiles, float64, time.Duration, error) {
	var next atomic.Int64
	var mu sync.Mutex
	var took []int64
	var errs []error
	var wg sync.WaitGroup
	began, cpu := time.Now(), processCPU()
	for range callers {
		wg.Go(func() {
			var mine []int64
			var err error
			for err == nil && (time.Since(began) < window || len(mine) == 0) {
				i := int(next.Add(1))
				from := time.Now()
				var id string
				if id, _, err = c.place(ctx, i); err != nil {
					break
				}
				mine = append(mine, int64(time.Since(from)))
				err = c.release(ctx, id)
			}
			mu.Lock()
			defer mu.Unlock()
			took, errs = append(took, mine...), append(errs, err)
		})
	}
	wg.Wait()
	elapsed, spent := time.Since(began), processCPU()-cpu
	if err := errors.Join(errs...); err != nil {
		return quantiles{}, 0, 0, err
	}
	slices.Sort(took)
	at := func(percent int) float64 { return float64(took[(len(took)-1)*percent/100]) }
	return quantiles{P50: at(50), P99: at(99)}, float64(len(took)) / elapsed.Seconds(), spent / time.Duration(len(took)), nil
}

func newCaller(address string, t Transport, prompts [][]uint32) (caller, error) {
	if t == TransportJSON {
		c := &jsonCaller{url: "http://" + address + "/v1/", http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: placeCallers + 4}, Timeout: placeTimeout}}
		for _, tokens := range prompts {
			c.bodies = append(c.bodies, placeBody(tokens))
		}
		return c, nil
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	c := &grpcCaller{conn: conn, client: waypostv1.NewPlacementServiceClient(conn)}
	for _, tokens := range prompts {
		body, err := proto.Marshal(&waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens}})
		if err != nil {
			return nil, errors.Join(err, conn.Close())
		}
		c.bodies = append(c.bodies, body)
	}
	return c, nil
}

// grpcCaller sends prepared requests, as the callers of JSON and the peer's
// harness do: what is measured is the service.
type grpcCaller struct {
	conn   *grpc.ClientConn
	client waypostv1.PlacementServiceClient
	bodies [][]byte
}

// prepared is a request that is marshalled already.
type prepared []byte

// preparedCodec is gRPC's codec that lets prepared requests through.
type preparedCodec struct{ encoding.CodecV2 }

func (c preparedCodec) Marshal(v any) (mem.BufferSlice, error) {
	if body, ok := v.(prepared); ok {
		return mem.BufferSlice{mem.SliceBuffer(body)}, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c *grpcCaller) close() error { return c.conn.Close() }

func (c *grpcCaller) place(ctx context.Context, i int) (string, int, error) {
	resp := &waypostv1.PlaceResponse{}
	request := prepared(c.bodies[i%len(c.bodies)])
	if err := c.conn.Invoke(ctx, waypostv1.PlacementService_Place_FullMethodName, request, resp, grpc.ForceCodecV2(preparedCodec{encoding.GetCodecV2("proto")})); err != nil {
		return "", 0, err
	}
	p := resp.GetPlacement()
	if p == nil {
		return "", 0, fmt.Errorf("refused: %s", resp.GetRefused().GetDetail())
	}
	return p.GetPlacementId(), int(p.GetExpected().GetReuseTokens()), nil
}

func (c *grpcCaller) release(ctx context.Context, placement string) error {
	_, err := c.client.ReleasePlacement(ctx, &waypostv1.ReleasePlacementRequest{PlacementId: proto.String(placement)})
	return err
}

type jsonCaller struct {
	url    string
	http   *http.Client
	bodies [][]byte
}

// placeBody is the body of a placement request, as an application writes it.
func placeBody(tokens []uint32) []byte {
	b := []byte(`{"input":{"tokenIds":[`)
	for i, id := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(id), 10)
	}
	return append(b, `]}}`...)
}

func (c *jsonCaller) close() error {
	c.http.CloseIdleConnections()
	return nil
}

// post returns the body of an answer of 200.
func (c *jsonCaller) post(ctx context.Context, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	answer, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d: %.300s", resp.StatusCode, answer)
	}
	return answer, nil
}

func (c *jsonCaller) place(ctx context.Context, i int) (string, int, error) {
	answer, err := c.post(ctx, "place", c.bodies[i%len(c.bodies)])
	if err != nil {
		return "", 0, err
	}
	var p struct {
		PlacementID string `json:"placementId"`
		Expected    struct {
			ReuseTokens *int `json:"reuseTokens"`
		} `json:"expected"`
	}
	if err := json.Unmarshal(answer, &p); err != nil {
		return "", 0, err
	}
	reuse := 0
	if p.Expected.ReuseTokens != nil {
		reuse = *p.Expected.ReuseTokens
	}
	return p.PlacementID, reuse, nil
}

func (c *jsonCaller) release(ctx context.Context, placement string) error {
	_, err := c.post(ctx, "placements/"+placement+":release", nil)
	return err
}
