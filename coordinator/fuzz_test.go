package coordinator

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// FuzzRequests hands any request to the services: whatever is in it, they
// answer or name what is wrong, and it is never their own fault.
func FuzzRequests(f *testing.F) {
	o := startOne(f)
	a := &fakeAgent{workers: 2}
	a.start(f, o)
	eventually(f, "the pool is known", func() bool { _, err := o.fleet.PoolName(""); return err == nil })
	for _, js := range []string{
		`{}`, `{"input":{}}`, `{"input":{"tokenIds":[1,2,3]}}`, `{"input":{"tokenIdsLe":"AQID"}}`, `{"input":{"prompt":"x"},"reserve":true,"requestId":"r","attempt":2}`,
		`{"input":{"prefixKeys":{}}}`, `{"input":{"prefixKeys":{"promptTokens":2000,"checkpoints":["0011223344556677"],"points":[{"offset":7,"key":"0011223344556677"}]}}}`,
		`{"input":{"messages":[{}],"tools":[{}]}}`, `{"input":{"tokenIds":[1]},"explain":"full","exclude":["x"],"sourceWorkers":[]}`,
	} {
		req := &waypostv1.PlaceRequest{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(js), req); err != nil {
			f.Fatal(err)
		}
		b, err := proto.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		check := func(err error) {
			if c := status.Code(err); c == codes.Internal || c == codes.Unknown {
				t.Errorf("%v", err)
			}
		}
		place, batch, outcome, learn := &waypostv1.PlaceRequest{}, &waypostv1.PlaceBatchRequest{}, &waypostv1.ReportOutcomeRequest{}, &waypostv1.LearnTokensRequest{}
		if proto.Unmarshal(b, place) == nil {
			_, err := o.placements.Place(t.Context(), place)
			check(err)
		}
		if proto.Unmarshal(b, batch) == nil {
			_, err := o.placements.PlaceBatch(t.Context(), batch)
			check(err)
		}
		if proto.Unmarshal(b, outcome) == nil {
			_, err := o.placements.ReportOutcome(t.Context(), outcome)
			check(err)
		}
		if proto.Unmarshal(b, learn) == nil {
			_, err := o.placements.LearnTokens(t.Context(), learn)
			check(err)
		}
	})
}
