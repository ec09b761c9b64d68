#!/usr/bin/env bash
# The adapter and the table of results/smollm2, from nothing:
#   recipes/smollm2.sh POSTS OUTPUT_DIR
# POSTS: train.jsonl of Reddit TL;DR. The same command goes on after an interruption. ENGINE=vllm writes the texts with
# vLLM, of whose environment SKIPDECODE and PYTHON then are: half an hour for them, 4 s a step, and ten minutes for the
# table, on two cores of an AMD EPYC. The adapter there was made step by step, in two sittings.
set -euo pipefail
posts=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python} engine=(--engine "${ENGINE:-transformers}")

mkdir -p "$out"
"$python" recipes/smollm2.py smollm2
[ -f "$out/prompts.jsonl" ] || "$python" recipes/prompts.py smollm2 "$out/prompts.jsonl" --questions 3000 \
    --posts "$posts" --summaries 900 "${engine[@]}"
[ -f "$out/adapter/adapter.safetensors" ] || "$skipdecode" train smollm2 --own-texts 7000 --prompts "$out/prompts.jsonl" --speedups 1.5,2 --weights 2,1 \
    --temperature 0.5 --max-new-tokens 96 --max-steps 2000 --batch-size 8 --bf16 --attn-implementation eager \
    --save-steps 100 --output "$out/adapter" "${engine[@]}"
"$skipdecode" evaluate smollm2 --data results/smollm2/prompts.jsonl --methods "skipdecode=$out/adapter" --speedups 1.5,2 \
    --batch-size 24 --max-new-tokens 96 --output "$out/table"
