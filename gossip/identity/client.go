package identity

import "crypto/tls"

// APIClient returns the TLS configuration of a person or program that calls
// the API of a coordinator with a certificate from files.
func APIClient(caFile, certFile, keyFile string) (*tls.Config, error) {
	s, err := Open(Options{Files: Files{CA: caFile, Cert: certFile, Key: keyFile}})
	if err != nil {
		return nil, err
	}
	return s.Client(ClientOptions{Accept: []Role{RoleCoordinator}, Protocols: []string{"h2"}}), nil
}
