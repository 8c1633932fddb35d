// Package trtllm reads TensorRT-LLM servers (trtllm-serve): events as the server
// streams them over ZeroMQ, or else as it hands them out over HTTP, each once;
// counters, facts and health over HTTP. The server tells no token ids.
//
// What is handed out once must have one reader: the events over HTTP, and the
// records of iterations where the server has no page of metrics.
package trtllm
