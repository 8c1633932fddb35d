package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// placeRow is one object of the JSON output.
type placeRow struct {
	Workers      int       `json:"workers"`
	Transport    Transport `json:"transport"`
	PromptTokens int       `json:"promptTokens"`
	PlaceUs      quantiles `json:"placeUs"`
	PlacesPerSec float64   `json:"placesPerSec"`
	CPUUs        float64   `json:"cpuUsPerPlace"`
	MatchedShare float64   `json:"matchedShare"`
}

// IsEmpty says that nothing was measured.
func (r *PlaceReport) IsEmpty() bool { return len(r.Places) == 0 }

// WriteJSON writes one object a line.
func (r *PlaceReport) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	for _, x := range r.Places {
		if err := e.Encode(placeRow{x.Workers, x.Transport, x.PromptTokens, quantiles{x.Place.P50 / 1000, x.Place.P99 / 1000}, x.PlacesPerSec, float64(x.CPU) / 1000, x.Matched}); err != nil {
			return err
		}
	}
	return nil
}

// WriteText writes tables for people.
func (r *PlaceReport) WriteText(out io.Writer) error {
	p := &printer{w: tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)}
	p.text("Placements with a reservation over loopback; callers are in this process and send prepared requests")
	p.line("workers", "transport", "token ids", "one caller, µs p50 / p99", num(placeCallers)+" callers, places/s", "processor, µs each", "with reuse")
	for _, x := range r.Places {
		p.line(num(x.Workers), string(x.Transport), num(x.PromptTokens), fmt.Sprintf("%.0f / %.0f", x.Place.P50/1000, x.Place.P99/1000), fmt.Sprintf("%.0f", x.PlacesPerSec), num(int(x.CPU.Microseconds())), fmt.Sprintf("%.0f %%", 100*x.Matched))
	}
	p.writeTargets(r.targets())
	p.line("")
	if r.Quick {
		p.text("--quick: short windows; leave it out for the figures that count")
	}
	p.text("took %.0f s; times and rates are the best of several windows by the wall clock; a rate counts placements that are released before the next", r.Took.Seconds())
	p.text("processor time is that of callers, coordinator and agents together, with the release; the machine's processors over it bound the rate")
	p.text("the figures to reach are shares of the selection service's as measured once; testbed/peers says how to measure it here")
	return p.flush()
}

// What the selection service of NVIDIA Dynamo 1.6.1 took for 16,000 token ids
// as JSON over loopback on two cores, and the shares of it to reach.
const (
	peerPlaceUs      = 1000
	peerPlacesPerSec = 1000
	grpcShare        = .25
	jsonShare        = .6
	rateFactor       = 4
	manyFactor       = 1.2 // of 1,000 workers to 64
)

func (r *PlaceReport) targets() (out []target) {
	few := map[Transport]float64{}
	for _, x := range r.Places {
		if x.PromptTokens != chainBlocks*blockTokens {
			continue
		}
		name := fmt.Sprintf("%d workers, %d token ids, %s: ", x.Workers, x.PromptTokens, x.Transport)
		share := jsonShare
		if x.Transport == TransportGRPC {
			share = grpcShare
			out = append(out, atLeast(name+"rate", "places/s", x.PlacesPerSec, rateFactor*peerPlacesPerSec))
		}
		out = append(out, atMost(name+"p50", "µs", x.Place.P50/1000, share*peerPlaceUs))
		switch least := few[x.Transport]; {
		case x.Workers == 64:
			few[x.Transport] = x.Place.P50
		case least > 0:
			out = append(out, atMost(name+"p50 of that with 64", "×", x.Place.P50/least, manyFactor))
		}
	}
	return out
}
