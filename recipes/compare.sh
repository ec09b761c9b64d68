#!/usr/bin/env bash
# SkipDecode and the paper's baselines from the same start, with the same data and steps:
#   recipes/compare.sh START DATA_DIR OUTPUT_DIR
# START is OUTPUT_DIR/full of recipes/e2e.sh: a model that has never skipped. The same command resumes a killed run.
# experiments/README.md says how the other rows of results/e2e-methods are made.
set -euo pipefail
start=$(realpath "$1") data=$(realpath "$2") out=$(realpath -m "$3")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode}

train() { # NAME SPEEDUPS OPTIONS…
    [ -f "$out/$1/done" ] || "$skipdecode" train "$start" --config recipes/e2e/compare.yaml --data "$data" \
        --output "$out/$1" --speedups "$2" "${@:3}"
    touch "$out/$1/done"
}
train full 1
train skipdecode 1,2,3,4,5 --decay linear --horizon 32
train multi_exit 1,2,3,4,5 --method multi_exit
"${PYTHON:-.venv/bin/python}" experiments/compare.py "$out/full" --task e2e --data "$data" --speedups 2,3,4,5 \
    --output "$out/table" "skipdecode=$out/skipdecode" "multi_exit=$out/multi_exit" "calm=$out/multi_exit"
