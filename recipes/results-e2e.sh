#!/usr/bin/env bash
# Everything under results/ that is about E2E, from random weights: recipes/results-e2e.sh DATA RUNS [RESULTS]
# Hours on two cores. Finished models, rows and tables are kept: a killed run, started again, goes on. A changed recipe wants other
# RUNS: what is finished there is not looked at again.
set -euo pipefail
data=$(realpath "$1") runs=$(realpath -m "$2") results=$(realpath -m "${3:-results}")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
evaluate() { "$skipdecode" evaluate "$@" --task e2e --data "$data" --speedups 1,2,3,4,5; }

recipes/e2e.sh "$data" "$runs"
recipes/compare.sh "$runs/full" "$data" "$runs/compare"

# One checkpoint at every budget; the same against a model that never skipped; every method trained alike.
evaluate "$runs/embedded" --output "$results/e2e"
evaluate "$runs/unskipped-own" --methods "skipdecode=$runs/embedded" --output "$results/e2e-unskipped"
c=$runs/compare
methods=skipdecode=$c/skipdecode,multi_exit=$c/multi_exit,calm=$c/multi_exit,unified=$c/unified,d3=$c/d3,hsd=$c/hsd
evaluate "$c/full" --methods "$methods,static=$c/static-{speedup},scratch=$c/scratch-{speedup}" --output "$results/e2e-methods"
"$python" recipes/experiments.py "$runs/full" "$data" "$runs/experiments" "$results/e2e-experiments"
