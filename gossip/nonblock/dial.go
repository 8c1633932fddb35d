package nonblock

import (
	"context"
	"net"
)

// Dial returns a function that dials as d does and reads and writes by [Conn].
func Dial(d *net.Dialer) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := d.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return Conn(c), nil
	}
}
