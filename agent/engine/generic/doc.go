// Package generic reads an engine of which nothing is known but that it speaks
// the OpenAI API and, perhaps, shows a Prometheus page: the model it serves,
// whether it answers, and the few gauges whose names many servers share. Its
// cache is not seen; what was placed on it is all there is to expect.
package generic
