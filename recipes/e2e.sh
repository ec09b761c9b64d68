#!/usr/bin/env bash
# Trains the embedded checkpoint, and a model without skipping beside it: recipes/e2e.sh DATA_DIR OUTPUT_DIR
# DATA_DIR holds the E2E release (trainset.csv, devset.csv, testset_w_refs.csv). A killed run, started again, goes on.
# What ends up in OUTPUT_DIR/embedded (less its checkpoints) is what lies in src/skipdecode/demo.
set -euo pipefail
data=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
common=(--task e2e --batch-size 32 --attention eager --adam-beta2 0.98 --save-steps 250)
# Decode steps of the full model's batches of 32 on the validation inputs, as `skipdecode calibrate` finds them.
lengths=44,44,38,39,40,39,40,36,36,35,34,35,32,32,31,25,22,14

# 1. From scratch, all 24 layers, with a tokenizer of its own. No decay of the learning rate: stage 2 brings it down.
[ -f "$out/full/model.safetensors" ] || "$skipdecode" train --from-config recipes/e2e-24l.json "${common[@]}" --data "$data" \
    --output "$out/full" --speedup 1 --max-steps 2000 \
    --learning-rate 1.5e-3 --scheduler constant_with_warmup --warmup-steps 150 --eval-steps 1000

# 2. With the schedule on: a budget of 1x to 5x drawn per step, so that one checkpoint serves them all.
[ -f "$out/skip/model.safetensors" ] || "$skipdecode" train "$out/full" "${common[@]}" --data "$data" \
    --output "$out/skip" --speedups 1,2,3,4,5 --horizon 32 --max-steps 6000 \
    --learning-rate 1e-3 --warmup-steps 100 --eval-steps 1500

# 3. Depths fitted to real lengths, 5x drawn more often, distilled from its own full depth; then averaged with where
# it came from, which gives full depth back what 5x took. The share was chosen on the validation inputs.
[ -f "$out/distilled/model.safetensors" ] || "$skipdecode" train "$out/skip" "${common[@]}" --data "$data" \
    --output "$out/distilled" --speedups 1,2,3,4,5 --lengths $lengths --weights 1,1,1,1,3 --distill 0.7 \
    --max-steps 1500 --learning-rate 5e-4 --warmup-steps 50 --eval-steps 500
[ -d "$out/teacher" ] || "$python" recipes/average.py "$out/skip" "$out/distilled" "$out/teacher" 0.7

# 4. What few layers lack is agreement with many: the teacher writes texts at full depth for the training inputs and for
# 12,000 new ones, and all budgets learn from them: beside people's texts, then alone, then from better ones, of 4 beams.
[ -f "$out/inputs.csv" ] || "$python" recipes/more_inputs.py "$data" "$out/inputs.csv" 12000
[ -f "$out/some.csv" ] || { head -n 1 "$out/inputs.csv"
    tail -n +2 "$out/inputs.csv" | shuf -n 6000 --random-source <(yes); } > "$out/some.csv"
write() { # NAME INPUTS OPTIONS…
    [ -f "$out/$1.jsonl" ] || "$skipdecode" generate "$out/teacher" --task e2e --input "$out/$2.csv" --full \
        --batch-size 128 --output "$out/$1.jsonl" "${@:3}"
}
own() { # NAME START TEXTS TIMES_PEOPLES TIMES_OWN OPTIONS…
    mkdir -p "$out/data-$1"
    cp "$data/devset.csv" "$data/testset_w_refs.csv" "$out/data-$1"
    "$python" recipes/own_texts.py "$data/trainset.csv" "$out/$3.jsonl" ref "$out/data-$1/trainset.csv" "$4" "$5"
    [ -f "$out/$1/model.safetensors" ] || "$skipdecode" train "$out/$2" "${common[@]}" --data "$out/data-$1" \
        --output "$out/$1" --speedups 1,2,3,4,5 --lengths $lengths --weights 1,1,1,2,3 --learning-rate 5e-4 \
        --eval-steps 0 "${@:6}"
}
write greedy inputs
write beams some --num-beams 4 --batch-size 64
own beside teacher greedy 1 3 --distill 0.7 --teacher "$out/teacher" --max-steps 1500 --warmup-steps 50
own alone beside greedy 0 1 --distill 0.7 --teacher "$out/teacher" --max-steps 1200 --warmup-steps 30 --seed 2
own embedded alone beams 0 1 --distill 0.5 --max-steps 800 --warmup-steps 30 --seed 3
for speedup in 2 3 4 5; do # depths that fit the lengths it has come to write
    [ -f "$out/schedule-$speedup.json" ] || "$skipdecode" calibrate "$out/embedded" --task e2e --data "$data" \
        --speedup $speedup --limit 547 --save --output "$out/schedule-$speedup.json"
done

# Beside it: the same start without any skipping, until its learning rate is down; then the same beam texts.
[ -f "$out/unskipped/model.safetensors" ] || "$skipdecode" train "$out/full" "${common[@]}" --data "$data" \
    --output "$out/unskipped" --speedup 1 --max-steps 2600 \
    --learning-rate 1e-3 --warmup-steps 100 --eval-steps 1300
[ -f "$out/unskipped-own/model.safetensors" ] || "$skipdecode" train "$out/unskipped" "${common[@]}" \
    --data "$out/data-embedded" --method full --output "$out/unskipped-own" --speedup 1 --max-steps 800 \
    --learning-rate 5e-4 --warmup-steps 30 --eval-steps 0 --seed 3
