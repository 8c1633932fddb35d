// Package doctor holds the checks that agents and coordinators have alike, and
// the list that checks are told in. A check has a name that never changes: it is
// a label of waypost_doctor_check.
package doctor
