#!/usr/bin/env bash
# The small model over HTTP, a document that is put once, and a question about it. Ends when it is answered.
set -euo pipefail
port=${1:-8765}
url=http://127.0.0.1:$port

tamis serve smollm2 --port "$port" --store "$(mktemp -d)" &
server=$!
trap 'kill $server; wait $server' EXIT
until curl -sf "$url/health"; do sleep 1; kill -0 $server; done

json() { curl -sS --fail-with-body -H 'Content-Type: application/json' "$@"; }

json -X PUT "$url/v1/documents/fog" -d '{
  "text": "In fog the keepers listen to radio channel 16. The horn sounds every two minutes.", "warm": true}'
echo
json "$url/v1/documents/search" -d '{"query": "Which radio channel in fog?", "top_k": 1}'
echo
# the document is read as it was stored: "cached_tokens" of the usage tells how much of the prompt was not computed
json "$url/v1/chat/completions" -d '{
  "model": "smollm2", "max_tokens": 24, "temperature": 0,
  "messages": [{"role": "user", "content": "Which radio channel do the keepers listen to in fog?"}],
  "documents": ["fog"],
  "tamis": {"prefill": "reuse", "accept_block_attention": true}}'
echo
