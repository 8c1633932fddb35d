//go:build !(linux && cgo && nvml)

package nvml

// Built says whether this binary can load the driver library.
const Built = false

// librarySource is a source that says why there is none.
func librarySource(string) Source { return notBuilt{} }

type notBuilt struct{}

func (notBuilt) Open(*CallLog) (Session, error) {
	return nil, &StatusError{statusNotBuilt()}
}
