#!/usr/bin/env bash
# Trains the demo model: recipes/e2e.sh DATA_DIR OUTPUT_DIR
# DATA_DIR holds the E2E release (trainset.csv, devset.csv, testset_w_refs.csv). The same command resumes a killed run.
# OUTPUT_DIR/demo is a model like the one in src/skipdecode/demo, whose depths were fitted to the lengths of responses.
# Many hours on two cores.
set -euo pipefail
data=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}

train() { # NAME START OPTIONS…
    [ -f "$out/$1/done" ] || "$skipdecode" train "$2" --config "recipes/e2e/$1.yaml" --output "$out/$1" "${@:3}"
    touch "$out/$1/done"
}

[ -f "$out/new/tokenizer.json" ] || "$python" recipes/new_model.py recipes/e2e/24-layers.json "$data" "$out/new"
train full "$out/new" --data "$data"
train skip "$out/full" --data "$data"
train distilled "$out/skip" --data "$data"
# Averaged with where it came from: that gives 1x back what 5x took. The share was chosen on validation inputs.
[ -d "$out/teacher" ] || "$python" recipes/average.py "$out/skip" "$out/distilled" "$out/teacher" 0.7

# The teacher generates with all layers, for the training inputs and for 12,000 new ones. All speeds learn from that:
# with people's texts, then alone, then from outputs of 4 beams.
[ -f "$out/inputs.csv" ] || "$python" recipes/more_inputs.py "$data" "$out/inputs.csv" 12000
[ -f "$out/some.csv" ] || { head -n 1 "$out/inputs.csv"
    tail -n +2 "$out/inputs.csv" | shuf -n 6000 --random-source <(yes); } > "$out/some.part"
[ -f "$out/some.csv" ] || mv "$out/some.part" "$out/some.csv"
write() { # NAME INPUTS OPTIONS…
    [ -f "$out/$1.jsonl" ] || "$skipdecode" generate "$out/teacher" --task e2e --prompts "$out/$2.csv" --speedup 1 \
        --batch-size 128 --output "$out/$1.jsonl" "${@:3}"
}
own() { # NAME START TEXTS TIMES_PEOPLES TIMES_OWN OPTIONS…
    mkdir -p "$out/data-$1"
    cp "$data/devset.csv" "$data/testset_w_refs.csv" "$out/data-$1"
    "$python" recipes/own_texts.py "$data/trainset.csv" "$out/$3.jsonl" ref "$out/data-$1/trainset.csv" "$4" "$5"
    train "$1" "$out/$2" --data "$out/data-$1" "${@:6}"
}
write greedy inputs
write beams some --num-beams 4 --batch-size 64
own beside teacher greedy 1 3 --teacher "$out/teacher"
own alone beside greedy 0 1 --teacher "$out/teacher"
own demo alone beams 0 1
"$skipdecode" evaluate "$out/demo" --task e2e --data "$data" --speedups 1,2,3,4,5 --output "$out/table"
