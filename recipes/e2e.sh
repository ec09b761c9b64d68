#!/usr/bin/env bash
# Trains the embedded checkpoint, and a model without skipping beside it: recipes/e2e.sh DATA_DIR OUTPUT_DIR
# DATA_DIR holds the E2E release (trainset.csv, devset.csv, testset_w_refs.csv). The same command resumes a killed run.
# OUTPUT_DIR/embedded, without its checkpoints, is what lies in src/skipdecode/demo. Each training is a file in
# recipes/e2e.
set -euo pipefail
data=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
# Decode steps of the full model's batches of 32 on the validation inputs, as `skipdecode calibrate` finds them.
lengths=44,44,38,39,40,39,40,36,36,35,34,35,32,32,31,25,22,14

train() { # NAME START OPTIONS…; START is empty for a model from scratch
    [ -f "$out/$1/model.safetensors" ] \
        || "$skipdecode" train ${2:+"$out/$2"} --config "recipes/e2e/$1.yaml" --output "$out/$1" "${@:3}"
}

train full "" --data "$data"
train skip full --data "$data"
train distilled skip --data "$data" --lengths $lengths
# Averaged with where it came from: that gives full depth back what 5x took. The share was chosen on validation inputs.
[ -d "$out/teacher" ] || "$python" recipes/average.py "$out/skip" "$out/distilled" "$out/teacher" 0.7

# Few layers lack agreement with many. So the teacher writes texts at full depth, for the training inputs and for 12,000
# new ones, and all budgets learn from them: beside people's texts, then alone, then from better ones, of 4 beams.
[ -f "$out/inputs.csv" ] || "$python" recipes/more_inputs.py "$data" "$out/inputs.csv" 12000
[ -f "$out/some.csv" ] || { head -n 1 "$out/inputs.csv"
    tail -n +2 "$out/inputs.csv" | shuf -n 6000 --random-source <(yes); } > "$out/some.part"
[ -f "$out/some.csv" ] || mv "$out/some.part" "$out/some.csv"
write() { # NAME INPUTS OPTIONS…
    [ -f "$out/$1.jsonl" ] || "$skipdecode" generate "$out/teacher" --task e2e --input "$out/$2.csv" --full \
        --batch-size 128 --output "$out/$1.jsonl" "${@:3}"
}
own() { # NAME START TEXTS TIMES_PEOPLES TIMES_OWN OPTIONS…
    mkdir -p "$out/data-$1"
    cp "$data/devset.csv" "$data/testset_w_refs.csv" "$out/data-$1"
    "$python" recipes/own_texts.py "$data/trainset.csv" "$out/$3.jsonl" ref "$out/data-$1/trainset.csv" "$4" "$5"
    train "$1" "$2" --data "$out/data-$1" --lengths $lengths "${@:6}"
}
write greedy inputs
write beams some --num-beams 4 --batch-size 64
own beside teacher greedy 1 3 --teacher "$out/teacher"
own alone beside greedy 0 1 --teacher "$out/teacher"
own embedded alone beams 0 1
for speedup in 2 3 4 5; do # depths that fit the lengths it has come to write
    [ -f "$out/schedule-$speedup.json" ] || "$skipdecode" calibrate "$out/embedded" --task e2e --data "$data" \
        --speedup $speedup --limit 547 --save --output "$out/schedule-$speedup.json"
done

# Beside it: the same start without any skipping; then the same beam texts.
train unskipped full --data "$data"
train unskipped-own unskipped --data "$out/data-embedded"
