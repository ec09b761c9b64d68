#!/usr/bin/env bash
# A task with SmolLM2: fine-tuned with all layers, then an adapter learned from what the fine-tuned model generates:
#   recipes/smollm2_task.sh TASK DATA OUTPUT_DIR
# TASK: reddit_tldr, e2e or cnn_dm; DATA: its folder (docs/data.md). For cnn_dm nothing is fine-tuned: the model answers
# requests for a summary; 200 of its 300 validation articles train the adapter, 100 are scored.
# The same command resumes a killed run. ENGINE=vllm generates the texts with vLLM. ADAPTER: to begin with.
set -euo pipefail
name=$1 data=$(realpath "$2") out=$(realpath -m "$3")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
steps=(--max-steps "${STEPS:-400}" --batch-size "${BATCH:-16}" --bf16 --save-steps 50)
begin=(--speedups "${SPEEDUPS:-1.5,2,3}") && [ -z "${ADAPTER:-}" ] || begin=(--adapter "$ADAPTER")
task=(--task "$name") own=(--config "$out/task.yaml") full=$out/full prompts=$data scored=(--task "$name" --data "$data")

mkdir -p "$out"
echo "task: $name" >"$out/task.yaml"
[ -f "$out/base/tokenizer.json" ] || "$python" recipes/smollm2.py "$out/base"
if [ "$name" = cnn_dm ]; then
    [ -f "$out/data/test.jsonl" ] || "$python" recipes/articles.py "$data" "$out/data"
    own=(--max-new-tokens 96) full=$out/base prompts=$out/data/prompts.jsonl
    scored=(--data "$out/data" --max-new-tokens 96)
else
    [ -f "$full/done" ] || "$skipdecode" train "$out/base" "${task[@]}" --data "$data" --output "$full" "${steps[@]}" \
        --speedups 1 --learning-rate 1e-4 --eval-steps 0
    touch "$full/done"
fi
[ -f "$out/adapter/adapter.safetensors" ] || "$skipdecode" distill "$full" "${own[@]}" --prompts "$prompts" \
    --num-texts "${TEXTS:-3000}" --temperature 0.5 --engine "${ENGINE:-transformers}" --output "$out/adapter" \
    "${steps[@]}" "${begin[@]}"
"$skipdecode" evaluate "$full" "${scored[@]}" --adapter "$out/adapter" --batch-size 32 --output "$out/table"
