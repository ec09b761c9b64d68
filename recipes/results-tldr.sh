#!/usr/bin/env bash
# Reddit TL;DR, from a small pretrained model to the table: recipes/results-tldr.sh DATA RUNS [RESULTS]
# DATA holds train.jsonl, valid.jsonl, test.jsonl. START is any causal LM; ours is an 8-layer GPT-Neo of 3.4 M parameters, pretrained on
# TinyStories. Finished models, rows and tables are kept: a killed run, started again, goes on. A changed recipe wants other RUNS.
set -euo pipefail
data=$(realpath "$1") runs=$(realpath -m "$2") results=$(realpath -m "${3:-results}")
start=$(realpath "${START:?START is the pretrained model to begin with}")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
task=(--task reddit_tldr --max-source-words 40)
optimizer=(--batch-size 16 --attention eager --adam-beta2 0.98 --learning-rate 1e-3 --save-steps 100)
constant=(--speedup 1 --scheduler constant_with_warmup --eval-steps 0)

train() { # NAME START OPTIONS…
    [ -f "$runs/$1/model.safetensors" ] || "$skipdecode" train "$2" --output "$runs/$1" "${optimizer[@]}" "${@:3}"
}

# 1. All layers, constant learning rate: on whole posts as plain text, on copying, then on the task, where a title counts as
# a summary too. Without the copying it writes the same few sentences under most posts.
mkdir -p "$runs/titles" "$runs/own-texts"
cp "$data/valid.jsonl" "$data/test.jsonl" "$runs/titles"
cp "$data/valid.jsonl" "$data/test.jsonl" "$runs/own-texts"
[ -f "$runs/posts.jsonl" ] || "$python" recipes/whole_posts.py "$data/train.jsonl" "$runs/posts.jsonl" 60
[ -f "$runs/titles/train.jsonl" ] \
    || "$python" recipes/copies.py "$data/train.jsonl" "$runs/copies.jsonl" "$runs/titles/train.jsonl" 2
train text "$start" --task jsonl --data "$runs/posts.jsonl" "${constant[@]}" --max-steps 1500 --warmup-steps 50
train copy "$runs/text" --task jsonl --data "$runs/copies.jsonl" "${constant[@]}" --max-steps 2200 --warmup-steps 50
train full "$runs/copy" "${task[@]}" --data "$runs/titles" "${constant[@]}" --max-steps 800 --warmup-steps 30 \
    --learning-rate 5e-4
[ -s "$runs/lengths.json" ] || "$skipdecode" calibrate "$runs/full" "${task[@]}" --data "$data" --speedup 5 \
    --output "$runs/five.json" --json > "$runs/lengths.json"
lengths=$(tail -n 1 "$runs/lengths.json" | "$python" -c "import json; print(*json.loads(input())['lengths'], sep=',')")

# 2. One checkpoint for every budget, distilled from its own full depth; then from the texts it writes there with 4
# beams, which keeps all budgets at the same texts. Depths last, fitted to the lengths it has come to write; exponential decay, since
# most texts end after 15 tokens, but one in a batch of 32 goes on to the limit: depth is best spent early.
same=("${task[@]}" --warmup-steps 30 --eval-steps 0)
budgets=(--speedups 1,2,3,4,5 --distill 0.5)
train distilled "$runs/full" "${same[@]}" --data "$runs/titles" --lengths "$lengths" "${budgets[@]}" \
    --weights 1,1,1,1,2 --max-steps 500
[ -f "$runs/some.jsonl" ] || head -n 4000 "$data/train.jsonl" > "$runs/some.jsonl"
[ -f "$runs/texts.jsonl" ] || "$skipdecode" generate "$runs/distilled" "${task[@]}" --input "$runs/some.jsonl" --full \
    --num-beams 4 --max-new-tokens 40 --batch-size 64 --output "$runs/texts.jsonl"
"$python" recipes/own_texts.py "$data/train.jsonl" "$runs/texts.jsonl" summary "$runs/own-texts/train.jsonl" 0 1
train own "$runs/distilled" "${same[@]}" --data "$runs/own-texts" --lengths "$lengths" "${budgets[@]}" \
    --weights 1,1,1,1,3 --max-steps 800
for speedup in 2 3 4 5; do
    [ -f "$runs/schedule-$speedup.json" ] || "$skipdecode" calibrate "$runs/own" "${task[@]}" --data "$data" \
        --speedup $speedup --limit 390 --decay exponential --save --output "$runs/schedule-$speedup.json"
done

# 3. The comparison: every method from the same start, with the same data and steps, all by cross-entropy.
compare() { # NAME METHOD STEPS OPTIONS…
    train "$1" "$runs/full" "${same[@]}" --data "$runs/titles" --lengths "$lengths" --method "$2" --max-steps "$3" "${@:4}"
}
compare unskipped full 300 --speedup 1
for method in skipdecode multi_exit unified d3 hsd; do compare $method $method 300 --speedups 1,2,3,4,5; done
for speedup in 2 3 4 5; do
    compare static-$speedup static 300 --speedup $speedup
    # From scratch a model also needs the steps that the start had on this task.
    compare scratch-$speedup scratch 1100 --speedup $speedup
done

# One checkpoint at every budget against its own full depth, then all methods against the model that never skipped.
evaluate() { "$skipdecode" evaluate "$@" --overwrite "${task[@]}" --data "$data"; }
evaluate "$runs/own" --speedups 1,2,3,4,5 --output "$results/tldr"
r=$runs
methods=skipdecode=$r/skipdecode,multi_exit=$r/multi_exit,calm=$r/multi_exit,unified=$r/unified,d3=$r/d3,hsd=$r/hsd
evaluate "$runs/unskipped" --speedups 1,2,3,4,5 --output "$results/tldr-methods" \
    --methods "$methods,static=$r/static-{speedup},scratch=$r/scratch-{speedup}"
