package coordinator

import "testing"

// An answer is the asked host's, comes once, and to whom still waits.
func TestAnswersAreOfTheHostThatWasAsked(t *testing.T) {
	var a agentAsks[string]
	first, firstAnswer, firstDone := a.begin("gpu-01")
	second, secondAnswer, secondDone := a.begin("gpu-02")
	if first == 0 || second == first {
		t.Errorf("numbers %d and %d", first, second)
	}
	a.answered("gpu-02", first, "forged")
	a.answered("", first, "forged")
	a.answered("gpu-01", second+1, "nobody asked")
	if a.waiting() != 2 || len(firstAnswer) != 0 {
		t.Errorf("%d wait, %d answers: another host was believed", a.waiting(), len(firstAnswer))
	}
	a.answered("gpu-01", first, "yes")
	a.answered("gpu-01", first, "yes again")
	if got := <-firstAnswer; got != "yes" || len(firstAnswer) != 0 {
		t.Errorf("answered %q, %d more", got, len(firstAnswer))
	}
	secondDone()
	a.answered("gpu-02", second, "late")
	if a.waiting() != 0 || len(secondAnswer) != 0 {
		t.Errorf("%d wait, %d late answers", a.waiting(), len(secondAnswer))
	}
	firstDone() // after the answer
}
