// Package vllm tests Waypost against a real vLLM server on CPU with a tiny
// random model. WAYPOST_VLLM names a folder with venv, a Python environment that
// holds testdata/requirements.txt, and with model and lora, which
// testdata/mkmodel.py makes.
package vllm
