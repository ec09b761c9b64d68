#!/usr/bin/env bash
# Every method from the same start, with the same data and steps: recipes/compare.sh START DATA_DIR OUTPUT_DIR
# START is stage 1 of recipes/e2e.sh: a model that has never skipped. The same command resumes a killed run. Other STEPS
# need another OUTPUT_DIR.
set -euo pipefail
start=$(realpath "$1") data=$(realpath "$2") out=$(realpath -m "$3")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode}
steps=${STEPS:-400}

train() { # NAME METHOD SPEEDUPS STEPS
    [ -f "$out/$1/model.safetensors" ] || "$skipdecode" train "$start" --config recipes/e2e/compare.yaml \
        --data "$data" --output "$out/$1" --method "$2" --speedups "$3" --max-steps "$4"
}

train full full 1 "$steps"
for method in skipdecode multi_exit unified d3 hsd; do train $method $method 1,2,3,4,5 "$steps"; done
for speedup in 2 3 4 5; do
    train static-$speedup static $speedup "$steps"
    # From scratch a model also needs the steps that START had.
    train scratch-$speedup scratch $speedup $((2000 + steps))
done
