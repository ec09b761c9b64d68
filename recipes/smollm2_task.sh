#!/usr/bin/env bash
# A task with a real model: SmolLM2 fine-tuned at full depth, then an adapter for three speeds, learnt from what the
# fine-tuned model writes itself, beside a model of a third of the layers that had the same steps:
#   recipes/smollm2_task.sh TASK DATA OUTPUT_DIR [RESULTS]
# TASK: reddit_tldr or e2e; DATA: its folder (docs/training.md). The same command goes on after an interruption; TL;DR takes
# about four hours on a CPU core with bfloat16. Other STEPS, TEXTS or SPEEDUPS need another OUTPUT_DIR.
set -euo pipefail
name=$1 data=$(realpath "$2") out=$(realpath -m "$3") results=$(realpath -m "${4:-results}")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
speedups=${SPEEDUPS:-1.5,2,3} task=(--task "$name" --data "$data")
steps=(--max-steps "${STEPS:-400}" --batch-size 16 --bf16 --save-steps 50)

mkdir -p "$out"
[ -f "$out/base/config.json" ] || "$python" recipes/smollm2.py "$out/base"

train() { # NAME START OPTIONS…
    [ -f "$out/$1/done" ] || "$skipdecode" train "$2" "${task[@]}" --output "$out/$1" "${steps[@]}" "${@:3}"
    touch "$out/$1/done"
}

train full "$out/base" --method full --speedup 1 --learning-rate 1e-4 --eval-steps 0
train adapter "$out/full" --own-texts "${TEXTS:-3000}" --speedups "$speedups" --temperature 0.5
train pruned-3 "$out/base" --method static --speedup 3 --learning-rate 3e-4 --eval-steps 0
judge() { "$skipdecode" evaluate "$out/full" "${task[@]}" --batch-size 32 ${LIMIT:+--limit "$LIMIT"} "$@"; }
judge --speedups "$speedups" --methods "skipdecode=$out/adapter" --output "$results/smollm2-$name"
judge --speedups 3 --methods "static=$out/pruned-{speedup}" --output "$results/smollm2-$name/pruned"
