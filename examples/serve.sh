#!/bin/bash
# A vLLM server with OpenAI's address whose decode steps read only what a method selects.
#
#     bash examples/serve.sh MODEL [more options of `vllm serve`]
#     METHOD=pariskv BUDGET=2048 KV=host bash examples/serve.sh MODEL --port 8001
#
# docs/guide/serving.md says what runs and what is refused. examples/ask_server.py asks the server.
set -e
model=${1:?usage: serve.sh MODEL [options of vllm serve]}
# vLLM 0.26 has one name for backends of others, 0.33 has ours.
backend=$(python -c "from torchsparsekv.engines._vllm_seams import seam; print(seam().NAME)")
ours="{\"method\": \"${METHOD:-quest}\", \"budget\": ${BUDGET:-1024}, \"kv\": \"${KV:-device}\"}"
exec vllm serve "$model" --attention-backend "$backend" --block-size 16 --max-num-seqs "${REQUESTS:-16}" \
    --additional-config "{\"torchsparsekv\": $ours}" "${@:2}"
