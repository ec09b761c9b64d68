#!/usr/bin/env bash
# A task with a real model: SmolLM2 fine-tuned at full depth, then an adapter for SPEEDUPS, learnt from what the
# fine-tuned model writes itself, beside the layers alone that it runs at 3x, with as many steps as the fine-tuning had:
#   recipes/smollm2_task.sh TASK DATA OUTPUT_DIR [RESULTS]
# TASK: reddit_tldr, e2e or cnn_dm; DATA: its folder (docs/data.md). RESULTS (default: results): its tables of the
# same name are replaced. For cnn_dm nothing is fine-tuned: the model
# answers requests for a summary. Of its 300 validation articles 200 train the adapter and the third of the layers, and
# 100 are scored. JUDGING: options of evaluate, such as "--limit 50".
# The same command goes on after an interruption; TL;DR takes about four hours on a CPU core with bfloat16. Other STEPS
# (of fine-tuning), ADAPTER_STEPS, their BATCHes, TEXTS, SPEEDUPS or ADAPTER need another OUTPUT_DIR. ENGINE=vllm writes
# the own texts with vLLM. ADAPTER: SmolLM2's own, with which the fine-tuned model's begins; SPEEDUPS are then among its.
set -euo pipefail
name=$1 data=$(realpath "$2") out=$(realpath -m "$3") results=$(realpath -m "${4:-results}")
adapter=${ADAPTER:+$(realpath "$ADAPTER")}
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
speedups=${SPEEDUPS:-1.5,2,3} task=(--task "$name" --data "$data") full=$out/full
steps=(--max-steps "${STEPS:-400}" --batch-size "${BATCH:-16}")
learnt=(--max-steps "${ADAPTER_STEPS:-${STEPS:-400}}" --batch-size "${ADAPTER_BATCH:-${BATCH:-16}}")
common=(--bf16 --attn-implementation "${ATTENTION:-eager}" --save-steps "${SAVED:-50}")
own=(--own-texts "${TEXTS:-3000}" --temperature 0.5 --engine "${ENGINE:-transformers}")
third=(--eval-steps 0) judged=("${task[@]}") methods=skipdecode=$out/adapter

mkdir -p "$out"
[ -f "$out/base/tokenizer.json" ] || "$python" recipes/smollm2.py "$out/base"

train() { # NAME START OPTIONS…
    [ -f "$out/$1/done" ] || "$skipdecode" train "$2" "${task[@]}" --output "$out/$1" "${common[@]}" "${@:3}"
    touch "$out/$1/done"
}

if [ "$name" = cnn_dm ]; then
    [ -f "$out/data/test.jsonl" ] || "$python" recipes/articles.py "$data" "$out/data"
    task=() full=$out/base own+=(--prompts "$out/data/prompts.jsonl" --max-new-tokens 96)
    third=("${own[@]}" --no-adapters) judged=(--data "$out/data" --max-new-tokens 96)
    if [ -n "$adapter" ]; then # as it is: its model is this one
        ln -sfn "$adapter" "$out/before" && methods+=,skipdecode=$out/before
    fi
else
    train full "$out/base" "${steps[@]}" --method full --speedup 1 --learning-rate 1e-4 --eval-steps 0
fi
train adapter "$full" "${learnt[@]}" "${own[@]}" --speedups "$speedups" ${adapter:+--adapter "$adapter"}
if [ "$name" = cnn_dm ]; then mkdir -p "$out/pruned-3" && cp -n "$out"/adapter/own_texts.json* "$out/pruned-3"; fi
train pruned-3 "$out/base" "${steps[@]}" "${third[@]}" --method static --speedup 3 --warmup-layers 5 --learning-rate 3e-4
read -ra judging <<< "${JUDGING:---batch-size 32}"
judge() { "$skipdecode" evaluate "$full" "${judged[@]}" "${judging[@]}" --overwrite "$@"; }
judge --speedups "$speedups" --methods "$methods" --output "$results/smollm2-$name"
judge --speedups 3 --methods "static=$out/pruned-{speedup}" --output "$results/smollm2-$name/pruned"
