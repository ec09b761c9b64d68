#!/usr/bin/env bash
# Everything under results/ that is about E2E, from random weights: recipes/results-e2e.sh DATA RUNS [RESULTS]
# Many hours on two cores; never run as a whole. The same command resumes a killed run: finished models, rows and tables
# are kept. After a change of a recipe give other RUNS: what is finished there is not looked at again.
set -euo pipefail
data=$(realpath "$1") runs=$(realpath -m "$2") results=$(realpath -m "${3:-results}")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
evaluate() { "$skipdecode" evaluate "$@" --overwrite --task e2e --data "$data" --speedups 1,2,3,4,5; }

recipes/e2e.sh "$data" "$runs"
recipes/compare.sh "$runs/full" "$data" "$runs/compare"

# One checkpoint at every budget; the same against a model that never skipped; every method trained alike.
evaluate "$runs/embedded" --output "$results/e2e"
evaluate "$runs/unskipped-own" --methods "skipdecode=$runs/embedded" --output "$results/e2e-unskipped"
c=$runs/compare
methods=skipdecode=$c/skipdecode,multi_exit=$c/multi_exit,calm=$c/multi_exit,unified=$c/unified,d3=$c/d3,hsd=$c/hsd
evaluate "$c/full" --methods "$methods,static=$c/static-{speedup},scratch=$c/scratch-{speedup}" \
    --output "$results/e2e-methods"

# The same after 400 more steps on the texts that the embedded checkpoint learnt from last.
again() { # NAME SPEEDUPS
    [ -f "$c/own/$1/model.safetensors" ] || "$skipdecode" train "$c/$1" --config recipes/e2e/compare-own.yaml \
        --data "$runs/data-embedded" --output "$c/own/$1" --method "${1%-*}" --speedups "$2"
}
for name in skipdecode unified; do again $name 1,2,3,4,5; done
for name in static-3 static-5 scratch-3 scratch-5; do again $name 1; done
"$skipdecode" evaluate --overwrite "$c/own/skipdecode" --task e2e --data "$data" --speedups 3,5 \
    --output "$results/e2e-methods-own" \
    --methods "skipdecode,unified=$c/own/unified,static=$c/own/static-{speedup},scratch=$c/own/scratch-{speedup}"
"$python" recipes/experiments.py "$runs/full" "$data" "$runs/experiments" "$results/e2e-experiments"
