#!/usr/bin/env bash
# Reddit TL;DR with a real model: SmolLM2 fine-tuned at full depth, then an adapter for three speeds, learnt from what the
# fine-tuned model writes itself, beside a model of a third of the layers that had the same steps:
#   recipes/smollm2_tldr.sh DATA OUTPUT_DIR [RESULTS]
# DATA holds train.jsonl, valid.jsonl, test.jsonl. The same command goes on after an interruption; about four hours on a
# CPU core with bfloat16.
set -euo pipefail
data=$(realpath "$1") out=$(realpath -m "$2") results=$(realpath -m "${3:-results}")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
task=(--task reddit_tldr --data "$data")
steps=(--max-steps 400 --batch-size 16 --bf16 --save-steps 50)

mkdir -p "$out"
[ -f "$out/base/config.json" ] || "$python" recipes/smollm2.py "$out/base"

train() { # NAME START OPTIONS…
    [ -f "$out/$1/done" ] || "$skipdecode" train "$2" "${task[@]}" --output "$out/$1" "${steps[@]}" "${@:3}"
    touch "$out/$1/done"
}

train full "$out/base" --method full --speedup 1 --learning-rate 1e-4 --eval-steps 0
train adapter "$out/full" --own-texts 3000 --speedups 1.5,2,3 --temperature 0.5
train pruned-3 "$out/base" --method static --speedup 3 --learning-rate 3e-4 --eval-steps 0
judge() { "$skipdecode" evaluate "$out/full" "${task[@]}" --batch-size 32 "$@"; }
judge --speedups 1.5,2,3 --methods "skipdecode=$out/adapter" --output "$results/smollm2-tldr"
judge --speedups 3 --methods "static=$out/pruned-{speedup}" --output "$results/smollm2-tldr/pruned"
