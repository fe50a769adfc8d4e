#!/bin/bash
# A vLLM server with the API of OpenAI. Its decode steps read only the tokens that a method selects.
#
#     bash examples/serve.sh MODEL [more options of `vllm serve`]
#     METHOD=quest BUDGET=2048 KV=host REQUESTS=8 bash examples/serve.sh MODEL --port 8001
#
# METHOD, BUDGET and KV are `method`, `budget` and `kv` of docs/guide/serving.md, which says what runs and what is refused.
# BLOCK is `block_size` of vLLM: 64 with pariskv, which then estimates the tokens that it does not select, and 16 with
# other methods. REQUESTS is `max_num_seqs`. examples/ask_server.py sends requests to the server.
set -eo pipefail
model=${1:?usage: serve.sh MODEL [options of vllm serve]}
# vLLM 0.26 has one name for the backends of all plugins. In 0.33 our backend has a name of its own. vLLM may print
# warnings ahead of the name.
backend=$(python -c "from torchsparsekv.engines._vllm_seams import seam; print(seam().NAME)" | tail -n 1)
method=${METHOD:-pariskv}
if [ "$method" = pariskv ]; then block=64; else block=16; fi
ours="{\"method\": \"$method\", \"budget\": ${BUDGET:-1024}, \"kv\": \"${KV:-device}\"}"
exec vllm serve "$model" --attention-backend "$backend" --block-size "${BLOCK:-$block}" --max-num-seqs "${REQUESTS:-16}" \
    --additional-config "{\"torchsparsekv\": $ours}" "${@:2}"
