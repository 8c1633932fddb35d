package summary

// ring keeps the latest frames within a limit of bytes.
type ring struct {
	limit  int
	bytes  int
	first  uint64 // seq of frames[0]
	frames [][]byte
}

func (r *ring) push(seq uint64, b []byte) {
	if len(r.frames) == 0 {
		r.first = seq
	}
	r.frames = append(r.frames, b)
	r.bytes += len(b)
	drop := 0
	for ; r.bytes > r.limit; drop++ {
		r.bytes -= len(r.frames[drop])
		r.frames[drop] = nil
	}
	r.frames = r.frames[drop:]
	r.first += uint64(drop)
}

// after returns the frames after have up to latest.
func (r *ring) after(have, latest uint64) ([][]byte, bool) {
	if have == latest {
		return nil, true
	}
	if len(r.frames) == 0 || have+1 < r.first {
		return nil, false
	}
	return append([][]byte(nil), r.frames[have+1-r.first:]...), true
}

// reset forgets all frames: a new stream begins.
func (r *ring) reset() { r.frames, r.bytes = nil, 0 }
