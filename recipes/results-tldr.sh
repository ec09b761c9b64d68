#!/usr/bin/env bash
# Reddit TL;DR, from a small pretrained model to the table: recipes/results-tldr.sh DATA RUNS [RESULTS]
# DATA holds train.jsonl, valid.jsonl, test.jsonl. START is any causal LM; ours is an 8-layer GPT-Neo of 3.4 M parameters, pretrained on
# TinyStories. Finished models, rows and tables are kept: a killed run, started again, goes on.
set -euo pipefail
data=$(realpath "$1") runs=$(realpath -m "$2") results=$(realpath -m "${3:-results}")
start=$(realpath "${START:?START is the pretrained model to begin with}")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
task=(--task reddit_tldr --data "$data" --words 40)
optimizer=(--batch-size 16 --attention eager --adam-beta2 0.98 --learning-rate 1e-3 --save-steps 100)
constant=(--speedup 1 --scheduler constant_with_warmup --eval-steps 0)

train() { # NAME START OPTIONS…
    [ -f "$runs/$1/model.safetensors" ] || "$skipdecode" train "$2" --output "$runs/$1" "${optimizer[@]}" "${@:3}"
}

# 1. All layers, constant learning rate: on whole posts as plain text, then on the task.
mkdir -p "$runs"
[ -f "$runs/posts.jsonl" ] || "$python" recipes/whole_posts.py "$data/train.jsonl" "$runs/posts.jsonl" 60
train text "$start" --task jsonl --data "$runs/posts.jsonl" "${constant[@]}" --max-steps 1500 --warmup-steps 50
train full "$runs/text" "${task[@]}" "${constant[@]}" --max-steps 400 --warmup-steps 30
[ -s "$runs/lengths.json" ] || "$skipdecode" calibrate "$runs/full" "${task[@]}" --speedup 5 \
    --output "$runs/five.json" --json > "$runs/lengths.json"
lengths=$(tail -n 1 "$runs/lengths.json" | "$python" -c "import json; print(*json.loads(input())['lengths'], sep=',')")

# 2. One checkpoint for every budget, distilled from its own full depth.
same=("${task[@]}" --lengths "$lengths" --warmup-steps 30 --eval-steps 0)
train distilled "$runs/full" "${same[@]}" --speedups 1,2,3,4,5 --weights 1,1,1,1,2 --distill 0.5 --max-steps 400

# 3. The comparison: every method from the same start, with the same data and steps, all by cross-entropy.
train unskipped "$runs/full" "${same[@]}" --method full --speedup 1 --max-steps 300
for method in skipdecode multi_exit unified d3 hsd; do
    train $method "$runs/full" "${same[@]}" --method $method --speedups 1,2,3,4,5 --max-steps 300
done
for speedup in 2 3 4 5; do
    train static-$speedup "$runs/full" "${same[@]}" --method static --speedup $speedup --max-steps 300
    # From scratch a model also needs the steps that the start had on this data.
    train scratch-$speedup "$runs/full" "${same[@]}" --method scratch --speedup $speedup --max-steps 2200
done

# One checkpoint at every budget against its own full depth, then all methods against the model that never skipped.
evaluate() { "$skipdecode" evaluate "$@" "${task[@]}" --batch-size 32; }
evaluate "$runs/distilled" --speedups 1,2,3,4,5 --output "$results/tldr"
r=$runs
methods=skipdecode=$r/skipdecode,multi_exit=$r/multi_exit,calm=$r/multi_exit,unified=$r/unified,d3=$r/d3,hsd=$r/hsd
evaluate "$runs/unskipped" --speedups 1,2,3,4,5 --output "$results/tldr-methods" \
    --methods "$methods,static=$r/static-{speedup},scratch=$r/scratch-{speedup}"
