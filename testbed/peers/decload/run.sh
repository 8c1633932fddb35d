#!/bin/bash
# Measures Dynamo's selection service on this machine.
# usage: unshare -n ./run.sh WORKERS CHAINS   (in a network namespace of its own; as root)
# PYTHON is an interpreter with the packages that README.md names, DECLOAD the
# built load generator.
set -u
W=$1; C=$2; PY=${PYTHON:-python3}; LOAD=${DECLOAD:-./decload}; PORT=8092
HERE=$(cd "$(dirname "$0")" && pwd)
ip link set lo up
export DYN_LOG=${DYN_LOG:-warn}
TMP=$(mktemp -d); mkfifo "$TMP/in"
"$PY" "$HERE/fake_events.py" "$W" "$C" 21000 "$TMP/b" < "$TMP/in" > "$TMP/events.log" 2>&1 & EVENTS=$!
exec 3> "$TMP/in"
"$PY" -m dynamo.select_service --port $PORT --threads "${THREADS:-2}" > "$TMP/service.log" 2>&1 & SERVICE=$!
trap 'kill $SERVICE $EVENTS; exec 3>&-; wait $SERVICE $EVENTS 2>/dev/null; rm -rf "$TMP"' EXIT
B="http://127.0.0.1:$PORT"
for _ in $(seq 100); do curl -s -o /dev/null $B/health && break; sleep 0.2; done
for _ in $(seq 100); do grep -q bound "$TMP/events.log" && break; sleep 0.2; done
for w in $(seq "$W"); do
  printf '{"worker_id":%d,"model_name":"m","endpoint":"http://127.0.0.1:%d","kv_events_endpoint":"tcp://127.0.0.1:%d","block_size":16,"max_num_batched_tokens":8192,"total_kv_blocks":65536,"data_parallel_start_rank":0,"data_parallel_size":1}' \
    "$w" $((9000 + w)) $((20999 + w)) | curl -s -o /dev/null -H 'content-type: application/json' -d @- $B/workers || exit 1
done
sleep 2; echo go >&3
for _ in $(seq 600); do grep -q 'bodies written' "$TMP/events.log" && break; sleep 0.5; done
sleep 3; cat "$TMP/events.log"
for body in 1k 16k; do
  for c in 1 "${CONC:-8}"; do
    echo "## $body token ids, $W workers, $c callers"
    "$LOAD" -url $B/select_and_reserve -bodies "$TMP/b_$body.jsonl" -c "$c" -d "${DUR:-3s}" -id-field selection_id -free $B/reservations/%s -reps "${REPS:-3}"
  done
done
