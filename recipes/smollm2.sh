#!/usr/bin/env bash
# The adapter and the table of results/smollm2, from nothing: recipes/smollm2.sh POSTS OUTPUT_DIR
# POSTS: train.jsonl of Reddit TL;DR. The same command resumes a killed run. ENGINE=vllm generates the texts with vLLM;
# SKIPDECODE and PYTHON are then those of its environment.
set -euo pipefail
posts=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python} engine=${ENGINE:-transformers}

mkdir -p "$out"
"$python" recipes/smollm2.py smollm2
[ -f "$out/prompts.jsonl" ] || "$python" recipes/prompts.py smollm2 "$out/prompts.jsonl" --questions 3000 \
    --posts "$posts" --summaries 900 --engine "$engine"
[ -f "$out/adapter/adapter.safetensors" ] || "$skipdecode" distill smollm2 --num-texts 7000 \
    --prompts "$out/prompts.jsonl" --speedups 1.5,2 --speedup-weights 2,1 --temperature 0.5 --max-new-tokens 96 \
    --max-steps 2000 --batch-size 8 --bf16 --save-steps 100 --engine "$engine" --output "$out/adapter"
"$skipdecode" evaluate smollm2 --adapter "$out/adapter" --data results/smollm2/prompts.jsonl --batch-size 24 \
    --max-new-tokens 96 --output "$out/table"
