#!/usr/bin/env bash
# Reddit TL;DR, from a small pretrained model to the table: recipes/results-tldr.sh DATA RUNS [RESULTS]
# DATA holds train.jsonl, valid.jsonl, test.jsonl. START is any causal LM; ours is an 8-layer GPT-Neo of 3.4 M
# parameters, pretrained on TinyStories. The same command resumes a killed run: finished models, rows and tables are
# kept. After a change of a recipe give other RUNS. Each training is a file in recipes/tldr.
set -euo pipefail
data=$(realpath "$1") runs=$(realpath -m "$2") results=$(realpath -m "${3:-results}")
start=$(realpath "${START:?START is the pretrained model to begin with}")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
task=(--task reddit_tldr --max-source-words 40)

train() { # NAME START CONFIG OPTIONS…
    [ -f "$runs/$1/model.safetensors" ] \
        || "$skipdecode" train "$2" --config "recipes/tldr/$3.yaml" --output "$runs/$1" "${@:4}"
}

# 1. All layers: on whole posts as plain text, on copying, then on the task.
mkdir -p "$runs/titles" "$runs/own-texts"
cp "$data/valid.jsonl" "$data/test.jsonl" "$runs/titles"
cp "$data/valid.jsonl" "$data/test.jsonl" "$runs/own-texts"
[ -f "$runs/posts.jsonl" ] || "$python" recipes/whole_posts.py "$data/train.jsonl" "$runs/posts.jsonl" 60
[ -f "$runs/titles/train.jsonl" ] \
    || "$python" recipes/copies.py "$data/train.jsonl" "$runs/copies.jsonl" "$runs/titles/train.jsonl" 2
train text "$start" text --data "$runs/posts.jsonl"
train copy "$runs/text" copy --data "$runs/copies.jsonl"
train full "$runs/copy" full --data "$runs/titles"
[ -s "$runs/lengths.json" ] || "$skipdecode" calibrate "$runs/full" "${task[@]}" --data "$data" --speedup 5 \
    --output "$runs/five.json" --json > "$runs/lengths.json"
lengths=$(tail -n 1 "$runs/lengths.json" | "$python" -c "import json; print(*json.loads(input())['lengths'], sep=',')")

# 2. One checkpoint for every budget; then from the texts it writes at full depth with 4 beams, which keeps all budgets
# at the same texts. Depths last, fitted to the lengths it has come to write. The decay is exponential: most texts end
# after 15 tokens, but one in a batch of 32 goes on to the limit, so depth is best spent early.
train distilled "$runs/full" distilled --data "$runs/titles" --lengths "$lengths"
[ -f "$runs/some.jsonl" ] || head -n 4000 "$data/train.jsonl" > "$runs/some.jsonl"
[ -f "$runs/texts.jsonl" ] || "$skipdecode" generate "$runs/distilled" "${task[@]}" --input "$runs/some.jsonl" --full \
    --num-beams 4 --max-new-tokens 40 --batch-size 64 --output "$runs/texts.jsonl"
"$python" recipes/own_texts.py "$data/train.jsonl" "$runs/texts.jsonl" summary "$runs/own-texts/train.jsonl" 0 1
train own "$runs/distilled" own --data "$runs/own-texts" --lengths "$lengths"
for speedup in 2 3 4 5; do
    [ -f "$runs/schedule-$speedup.json" ] || "$skipdecode" calibrate "$runs/own" "${task[@]}" --data "$data" \
        --speedup $speedup --limit 390 --decay exponential --save --output "$runs/schedule-$speedup.json"
done

# 3. The comparison: every method from the same start, with the same data and steps, all by cross-entropy.
compare() { # NAME METHOD STEPS SPEEDUPS
    train "$1" "$runs/full" compare --data "$runs/titles" --lengths "$lengths" \
        --method "$2" --max-steps "$3" --speedups "$4"
}
compare unskipped full 300 1
for method in skipdecode multi_exit unified d3 hsd; do compare $method $method 300 1,2,3,4,5; done
for speedup in 2 3 4 5; do
    compare static-$speedup static 300 $speedup
    # From scratch a model also needs the steps that the start had on this task.
    compare scratch-$speedup scratch 1100 $speedup
done

# One checkpoint at every budget against its own full depth, then all methods against the model that never skipped.
evaluate() { "$skipdecode" evaluate "$@" --overwrite "${task[@]}" --data "$data"; }
evaluate "$runs/own" --speedups 1,2,3,4,5 --output "$results/tldr"
r=$runs
methods=skipdecode=$r/skipdecode,multi_exit=$r/multi_exit,calm=$r/multi_exit,unified=$r/unified,d3=$r/d3,hsd=$r/hsd
evaluate "$runs/unskipped" --speedups 1,2,3,4,5 --output "$results/tldr-methods" \
    --methods "$methods,static=$r/static-{speedup},scratch=$r/scratch-{speedup}"
