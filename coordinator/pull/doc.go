// Package pull decides which prefix streams a coordinator asks for, and when. A
// [Queue] bounds the pulls under way, takes hosts in turn so that one with many
// workers does not keep the others waiting, repeats with a growing pause what
// was not answered or did not help, and forgets a host whose lane is gone.
//
// It does nothing by itself: its caller tells what happened and asks what is
// next.
package pull
