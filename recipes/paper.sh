#!/usr/bin/env bash
# The paper's comparison on a pretrained model, SmolLM2-135M-Instruct: recipes/paper.sh TASK DATA OUTPUT_DIR
# TASK: e2e, reddit_tldr or cnn_dm; DATA: its folder (docs/data.md). The same command resumes a killed run.
#
# Rows, from one start, with the same data, order, steps and tokens: all layers; SkipDecode with one model for each
# target, as in the paper, and with one for all; multi-layer exit, and CALM on it; an adapter on the fine-tuned model.
# Two later stages follow for SkipDecode, and the second, in as much time, for multi-layer exit.
# Each row's learning rate has the least validation loss of several after SHORT steps, at the highest speed. So has, for
# SkipDecode, the form of its schedules: decay and bottom layers. The test set is read at the end.
# Sizes: STEPS, LAST_STEPS, OWN_STEPS, SHORT, BATCH, TEXTS, EVAL_SAMPLES. Fewer choices: SPEEDS, RATES, FORMS.
# EXTRA, EVALUATION: further options of every run, and of the evaluation, such as --bf16 and --dtype bfloat16.
set -euo pipefail
shopt -s inherit_errexit
task=$1 data=$(realpath "$2") out=$(realpath -m "$3")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
steps=${STEPS:-300} last=${LAST_STEPS:-1500} own=${OWN_STEPS:-${LAST_STEPS:-1500}} short=${SHORT:-50}
speeds=${SPEEDS:-2,3,4,5} rates=${RATES:-3e-5 1e-4 3e-4 1e-3 3e-3 1e-2}
forms=${FORMS:-$(echo {linear,power,constant}-{1,5,8})}
horizon=32 times=0
case $task in
e2e) learned=trainset.csv reference=ref ;;
reddit_tldr) learned=train.jsonl reference=summary ;;
cnn_dm) learned=train_195.jsonl reference=highlights horizon=96 times=1 ;;
esac
falling=(--decay linear --bottom-layers 1 --horizon "$horizon") # the paper's form

run() { # COMMAND NAME MAX_STEPS RATE EVAL_STEPS OPTIONS…
    [ ! -f "$out/$2/done" ] || return 0
    mkdir -p "$out/$2"
    { cat "$out/$1.yaml" && echo "eval_steps: $5"; } > "$out/$2/options.yaml" # distill has no option for it
    "$skipdecode" "$1" "${@:6}" --output "$out/$2" --config "$out/$2/options.yaml" --max-steps "$3" --learning-rate "$4" \
        --batch-size "${BATCH:-8}" ${EXTRA:-} && touch "$out/$2/done" &&
        rm -rf "$out/$2"/checkpoint-*/{model,optimizer}.*
}
train() { run train "$1" "$2" "$3" "$4" "${start:-$out/base}" --data "$data" "${@:5}"; }
distill() { # texts are written once
    mkdir -p "$out/$1"
    [ ! -f "$out/texts.jsonl" ] || cp "$out/texts.jsonl" "$out/$1/self_generated.jsonl"
    run distill "$1" "$2" "$3" "$4" "$out/full" --prompts "$data" --num-texts "${TEXTS:-2400}" "${@:5}" || return
    [ -f "$out/texts.jsonl" ] || cp "$out/$1/self_generated.jsonl" "$out/texts.jsonl"
}
attempt() { # train|distill NAME RATE OPTIONS…: keeps the losses; 2 is the exit status of a loss that is not finite
    "$1" "$2" "$short" "$3" "$short" "${@:4}" >&2 || [ $? = 2 ]
    rm -rf "$out/$2"/{*.safetensors,checkpoint-*/{model,optimizer}.*} # the latter where a run failed
}
best() { # train|distill NAME RATES OPTIONS…: prints the rate
    for rate in $3; do
        attempt "$1" "rates/$2@$rate" "$rate" "${@:4}"
    done
    "$python" recipes/best.py "$out/rates/$2"@*
}
form() { # DECAY-BOTTOM_LAYERS: prints the options
    [ "${1%-*}" = constant ] && echo --bottom-layers "${1#*-}" && return
    echo --decay "${1%-*}" --horizon "$horizon" --bottom-layers "${1#*-}"
}
row() { # train|distill NAME RATES OPTIONS…
    local rate
    rate=$(best "$@")
    "$1" "$2" "$steps" "$rate" 0 "${@:4}"
}

mkdir -p "$out"
printf '%s\n' "task: $task" "max_eval_samples: ${EVAL_SAMPLES:-100}" "save_steps: 25" "save_total_limit: 1" \
    > "$out/distill.yaml"
{ cat "$out/distill.yaml" && echo "exit_share: 0.2"; } > "$out/train.yaml" # of multi-layer exit alone
[ -f "$out/base/tokenizer.json" ] || "$python" recipes/smollm2.py "$out/base"
row train full "$rates" --speedups 1
row train skipdecode "$rates" --speedups "1,$speeds" "${falling[@]}"
rate=$(best train skipdecode "$rates" --speedups "1,$speeds" "${falling[@]}")
for form in $forms; do
    # shellcheck disable=SC2046 # options are words
    attempt train "forms/skipdecode@$form" "$rate" --speedups "1,$speeds" $(form "$form")
done
form=$("$python" recipes/best.py "$out/forms/skipdecode"@*)
chosen=skipdecode also=()
if [ "$form" != linear-1 ]; then
    chosen=skipdecode-form also=("SkipDecode, ${form%-*} depth, ${form#*-} bottom layers=$out/skipdecode-form")
    # shellcheck disable=SC2046
    row train "$chosen" "$rates" --speedups "1,$speeds" $(form "$form")
fi
# And a last stage, longer, in this form: the full model's probabilities beside people's texts; then its own greedy
# texts for the training inputs. These stand alone, or beside people's where inputs are few.
# shellcheck disable=SC2207
last_stage=(--teacher "$out/full" --distill-weight 0.5 --speedups "1,$speeds" $(form "$form"))
steps=$last start=$out/$chosen row train skipdecode-distilled "1e-4 3e-4 1e-3" "${last_stage[@]}"
mkdir -p "$out/data"
cp "$data"/*.* "$out/data"
inputs=$data/$learned
[ "$task" != e2e ] || { inputs=$out/inputs.csv && "$python" recipes/more_inputs.py "$data" "$inputs" 0; }
[ -f "$out/own.jsonl" ] || "$skipdecode" generate "$out/full" --task "$task" --prompts "$inputs" --speedup 1 \
    --batch-size 64 --output "$out/own.jsonl"
"$python" recipes/own_texts.py "$data/$learned" "$out/own.jsonl" "$reference" "$out/data/$learned" "$times" 1
last_rate=$("$python" recipes/best.py "$out/rates/skipdecode-distilled"@*)
start=$out/skipdecode-distilled data=$out/data train skipdecode-own "$own" "$last_rate" 0 "${last_stage[@]}"
rate=$(best train skipdecode-3x "$rates" --speedups 3 "${falling[@]}")
for speedup in ${speeds//,/ }; do
    train "skipdecode-${speedup}x" "$steps" "$rate" 0 --speedups "$speedup" "${falling[@]}"
done
row train multi_exit "$rates" --speedups "$speeds" --method multi_exit
# Half as many steps: one, with a loss at every exit, takes twice as long.
start=$out/multi_exit data=$out/data train multi_exit-own $((own / 2)) "$last_rate" 0 --speedups "$speeds" \
    --method multi_exit
row distill adapter "5e-4 1.5e-3 5e-3 1.5e-2" --speedups "$speeds"
"$python" experiments/compare.py "$out/full" --task "$task" --data "$data" --speedups "$speeds" --output "$out/table" \
    ${EVALUATION:-} \
    "SkipDecode, a model for each=$out/skipdecode-{speedup}x" "skipdecode=$out/skipdecode" \
    "${also[@]}" "SkipDecode, distilled=$out/skipdecode-distilled" \
    "SkipDecode, the full model's texts=$out/skipdecode-own" "adapter=$out/adapter" \
    "multi_exit=$out/multi_exit" "multi-layer exit, the full model's texts=$out/multi_exit-own" "calm=$out/multi_exit-own"
