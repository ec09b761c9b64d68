#!/usr/bin/env bash
# Reddit TL;DR, from a small pretrained model to the table: recipes/results-tldr.sh DATA RUNS [RESULTS]
# DATA holds train.jsonl, valid.jsonl, test.jsonl. START is any causal LM; ours is an 8-layer GPT-Neo of 3.4 M parameters, pretrained on
# TinyStories. Finished models, rows and tables are kept: a killed run, started again, goes on.
set -euo pipefail
data=$(realpath "$1") runs=$(realpath -m "$2") results=$(realpath -m "${3:-results}")
start=$(realpath "${START:?START is the pretrained model to begin with}")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode}
task=(--task reddit_tldr --data "$data" --words 60)

train() { # NAME START OPTIONS…
    [ -f "$runs/$1/model.safetensors" ] || "$skipdecode" train "$2" "${task[@]}" --output "$runs/$1" "${@:3}" \
        --batch-size 16 --attention eager --adam-beta2 0.98 --learning-rate 1e-3 --warmup-steps 50 --save-steps 200
}

# 1. All layers, constant learning rate. 2. Every method from there, with the same data and steps.
train full "$start" --speedup 1 --scheduler constant_with_warmup --max-steps 600 --eval-steps 200 --eval-rows 390
same=(--max-steps 300 --eval-steps 0)
train unskipped "$runs/full" --method full --speedup 1 "${same[@]}"
train skipdecode "$runs/full" --speedups 1,2,3,4,5 --distill 0.5 "${same[@]}"
train multi_exit "$runs/full" --method multi_exit --speedups 1,2,3,4,5 "${same[@]}"
train unified "$runs/full" --method unified --speedups 1,2,3,4,5 "${same[@]}"
for speedup in 3 5; do train static-$speedup "$runs/full" --method static --speedup $speedup "${same[@]}"; done

# One checkpoint at every budget against its own full depth, then all methods against the model that never skipped.
evaluate() { "$skipdecode" evaluate "$@" "${task[@]}" --batch-size 32; }
evaluate "$runs/skipdecode" --speedups 1,2,3,4,5 --output "$results/tldr"
evaluate "$runs/unskipped" --speedups 1,3,5 --output "$results/tldr-methods" --methods \
    "skipdecode=$runs/skipdecode,multi_exit=$runs/multi_exit,calm=$runs/multi_exit,unified=$runs/unified,d3,hsd,static=$runs/static-{speedup}"
