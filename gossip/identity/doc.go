// Package identity holds the certificates of a fleet: who a process is, and
// what it may be taken for.
//
// One private CA signs every certificate. The certificate names its owner by a
// URI of the form waypost://<role>/<name>; addresses are extra and serve only
// clients that check host names. Both ends of a connection are checked by role
// and name, never by address, so a host may move without a new certificate.
//
// A [Source] reads certificate, key and CA from files and reads them again
// when one of them changes. It hands out TLS configurations that accept TLS
// 1.3 only, keep no sessions (a resumed session would outlive a changed CA) and
// verify the peer against the CA files of the moment.
package identity
