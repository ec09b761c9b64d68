#!/usr/bin/env bash
# Every method from the same start with the same data and steps, then one table: recipes/compare.sh START DATA_DIR OUTPUT_DIR
# START is stage 1 of recipes/e2e.sh: a model that has never skipped. A killed run, started again, goes on; other STEPS
# want another OUTPUT_DIR.
set -euo pipefail
start=$(realpath "$1") data=$(realpath "$2") out=$(realpath -m "$3")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode}
steps=${STEPS:-400}
lengths=44,44,38,39,40,39,40,36,36,35,34,35,32,32,31,25,22,14
common=(--task e2e --data "$data" --lengths $lengths --batch-size 32 --attention eager --adam-beta2 0.98
    --learning-rate 1e-3 --warmup-steps 50 --eval-steps 0 --save-steps 200)

train() { # NAME METHOD SPEEDUPS STEPS
    [ -f "$out/$1/model.safetensors" ] || "$skipdecode" train "$start" --method "$2" --speedups "$3" \
        --max-steps "$4" --output "$out/$1" "${common[@]}"
}

train full full 1 "$steps"
for method in skipdecode multi_exit unified d3 hsd; do train $method $method 1,2,3,4,5 "$steps"; done
for speedup in 2 3 4 5; do
    train static-$speedup static $speedup "$steps"
    # From scratch a model also needs the steps that START had.
    train scratch-$speedup scratch $speedup $((2000 + steps))
done
