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
for method in skipdecode multi_exit unified d3 hsd; do
    train $method "$runs/full" --method $method --speedups 1,2,3,4,5 "${same[@]}"
done
for speedup in 2 3 4 5; do
    train static-$speedup "$runs/full" --method static --speedup $speedup "${same[@]}"
    train scratch-$speedup "$runs/full" --method scratch --speedup $speedup --max-steps 900 --eval-steps 0
done
# 3. The best we can do, distilled: not part of the comparison, in which all learn by cross-entropy.
train distilled "$runs/full" --speedups 1,2,3,4,5 --distill 0.5 "${same[@]}"

# One checkpoint at every budget against its own full depth, then all methods against the model that never skipped.
evaluate() { "$skipdecode" evaluate "$@" "${task[@]}" --batch-size 32; }
evaluate "$runs/distilled" --speedups 1,2,3,4,5 --output "$results/tldr"
r=$runs
methods=skipdecode=$r/skipdecode,multi_exit=$r/multi_exit,calm=$r/multi_exit,unified=$r/unified,d3=$r/d3,hsd=$r/hsd
evaluate "$runs/unskipped" --speedups 1,2,3,4,5 --output "$results/tldr-methods" \
    --methods "$methods,static=$r/static-{speedup},scratch=$r/scratch-{speedup}"
