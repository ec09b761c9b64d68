#!/usr/bin/env bash
# Trains the embedded checkpoint: recipes/e2e.sh DATA_DIR OUTPUT_DIR
# DATA_DIR holds the E2E release (trainset.csv, devset.csv, testset_w_refs.csv). A killed run, started again, goes on.
# What ends up in OUTPUT_DIR/skip (less its checkpoints) is what lies in src/skipdecode/checkpoint.
set -euo pipefail
data=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode}
common=(--task e2e --data "$data" --batch-size 32 --attention eager --adam-beta2 0.98 --save-steps 250)

# 1. From scratch, all 24 layers, with a tokenizer of its own. No decay of the learning rate: stage 2 brings it down.
[ -f "$out/full/model.safetensors" ] || "$skipdecode" train --from-config recipes/e2e-24l.json "${common[@]}" \
    --output "$out/full" --speedup 1 --max-steps 2000 \
    --learning-rate 1.5e-3 --scheduler constant_with_warmup --warmup-steps 150 --eval-steps 1000

# 2. With the schedule on: a budget of 1x to 5x drawn per step, so that one checkpoint serves them all.
[ -f "$out/skip/model.safetensors" ] || "$skipdecode" train "$out/full" "${common[@]}" \
    --output "$out/skip" --speedups 1,2,3,4,5 --horizon 32 --max-steps 6000 \
    --learning-rate 1e-3 --warmup-steps 100 --eval-steps 1500

# 3. What it gives on the 630 test inputs.
for budget in --full --speedup=2 --speedup=3 --speedup=4 --speedup=5; do
    "$skipdecode" generate "$out/skip" --task e2e --input "$data/testset_w_refs.csv" \
        --output "$out/test$budget.jsonl" --overwrite "$budget" --json
done
