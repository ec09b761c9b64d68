#!/usr/bin/env bash
# Adapters beside every method that trains all weights: the same start, the same texts of the model's own, the same steps.
# Adapters and `shared` learn full depth's probabilities, the others its texts by cross-entropy.
# It ends with OUTPUT_DIR/seed0/table/table.md: how far from MODEL each is at each speed.
#   recipes/any_model.sh MODEL PROMPTS OUTPUT_DIR
# PROMPTS: JSONL with `prompt` or `messages`; "" for the begin-of-text token alone. The same command resumes a killed run.
# SEEDS of training share the texts, and have a folder and a table each. METHODS: those beside ours and static pruning.
# Other TEXTS, TOKENS, SPEEDUPS, STEPS, BATCH, LAYERS (options that choose layers), WRITING (own_data.py's options) or
# TRAINING (train's) need another OUTPUT_DIR.
set -euo pipefail
model=$1 prompts=$2 out=$3 root=$(realpath "$(dirname "$0")/..")
skipdecode=${SKIPDECODE:-$root/.venv/bin/skipdecode} python=${PYTHON:-$root/.venv/bin/python}
speedups=${SPEEDUPS:-2,3,4} steps=${STEPS:-320} batch=${BATCH:-16} tokens=${TOKENS:-200}
methods=${METHODS:-hsd unified d3 multi_exit}
read -ra layers <<<"${LAYERS:---order top --warmup-layers 1 --decay constant}"
read -ra writing <<<"${WRITING:-}" && read -ra training <<<"${TRAINING:-}"

mkdir -p "$out"
[ -f "$out/data/test.jsonl" ] || "$python" "$root/recipes/own_data.py" "$model" "$out/data" --prompts "$prompts" \
    --count "${TEXTS:-5000}" --max-new-tokens "$tokens" "${writing[@]}"

train() { # NAME SPEEDUPS OPTIONS…
    [ -f "$run/$1/done" ] || "$skipdecode" train "$model" --data "$out/data" --output "$run/$1" --speedups "$2" \
        --max-steps "$steps" --batch-size "$batch" --eval-steps 0 --save-steps 100 --seed "$seed" "${training[@]}" "${@:3}"
    touch "$run/$1/done"
}

# The top layers alone, as economize (PyPI) runs an untrained model: in the first seed's table.
schedules=()
for speedup in ${speedups//,/ }; do
    file=$out/top-alone-${speedup}x.json
    "$skipdecode" schedule "$model" --speedup "$speedup" --decay constant --order top --warmup-layers 0 --save "$file"
    schedules+=(--schedule "$file")
done

for seed in ${SEEDS:-0 1 2}; do
    run=$out/seed$seed
    train adapters "$speedups" --adapters "${layers[@]}"
    # Where training begins: maps in closed form.
    train closed-form "$speedups" --adapters "${layers[@]}" --max-steps 1 --learning-rate 1e-12
    train shared "$speedups" --distill-weight 1 --teacher "$model" --learning-rate 3e-4 "${layers[@]}"
    for speedup in ${speedups//,/ }; do
        train static-$speedup "$speedup" --method static --learning-rate 3e-4 "${layers[@]}"
    done
    for method in $methods; do train $method "$speedups" --method $method --learning-rate 3e-4; done
    rows=skipdecode=$run/adapters,skipdecode=$run/closed-form,skipdecode=$run/shared,static=$run/static-{speedup}
    for method in $methods; do rows+=,$method=$run/$method; done
    "$skipdecode" evaluate "$model" --data "$out/data/test.jsonl" --methods "full=$model,skipdecode,$rows" "${schedules[@]}" \
        --speedups "$speedups" --max-new-tokens "$tokens" --limit "${LIMIT:-64}" --batch-size 32 --output "$run/table" \
        --timing-rows 8 --repeats 1 # seconds are not what this table is for
    schedules=()
done
