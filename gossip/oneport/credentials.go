package oneport

import (
	"context"
	"crypto/tls"
	"errors"
	"net"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// Credentials returns server credentials for a gRPC server on a [Port]: the
// handshake is done already, so they only show its result to the server as
// credentials.TLSInfo, or as insecure for connections in clear.
func Credentials() credentials.TransportCredentials { return finished{} }

type finished struct{}

var errServerOnly = errors.New("oneport credentials are for servers")

// ClientHandshake implements credentials.TransportCredentials.
func (finished) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errServerOnly
}

// ServerHandshake implements credentials.TransportCredentials.
func (finished) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := conn.(*tls.Conn)
	if !ok {
		return insecure.NewCredentials().ServerHandshake(conn)
	}
	return c, credentials.TLSInfo{
		State:          c.ConnectionState(),
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

// Info implements credentials.TransportCredentials.
func (finished) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (finished) Clone() credentials.TransportCredentials { return finished{} }

// OverrideServerName implements credentials.TransportCredentials.
func (finished) OverrideServerName(string) error { return errServerOnly }
