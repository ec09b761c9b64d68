#!/usr/bin/env bash
# One checkpoint whose prompt runs few layers too, so that the whole job speeds up: recipes/e2e-job.sh DATA RUNS
# It begins with the embedded checkpoint, the end of e2e.sh. About an hour on one core; the same command resumes a
# killed run. RUNS/job is the result.
set -euo pipefail
data=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
mkdir -p "$out/data-job"

# What it writes at full depth, for the training inputs and for 4,000 new ones, is what all budgets learn from.
[ -f "$out/inputs-job.csv" ] || "$python" recipes/more_inputs.py "$data" "$out/inputs-job.csv" 4000
[ -f "$out/greedy-job.jsonl" ] || "$skipdecode" generate demo --task e2e --input "$out/inputs-job.csv" --full \
    --batch-size 128 --output "$out/greedy-job.jsonl"
cp "$data/devset.csv" "$data/testset_w_refs.csv" "$out/data-job"
"$python" recipes/own_texts.py "$data/trainset.csv" "$out/greedy-job.jsonl" ref "$out/data-job/trainset.csv" 0 1
"$skipdecode" train demo --config recipes/e2e/job.yaml --data "$out/data-job" --output "$out/job"
