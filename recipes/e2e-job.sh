#!/usr/bin/env bash
# One checkpoint whose prompt runs few layers too, so that the whole job speeds up: recipes/e2e-job.sh DATA RUNS
# It begins with the embedded checkpoint, the end of e2e.sh. About an hour on one core; the same command resumes a
# killed run. RUNS/job is the result, RUNS/e2e-job its table.
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
[ -f "$out/job/model.safetensors" ] || "$skipdecode" train demo --config recipes/e2e/job.yaml --data "$out/data-job" --output "$out/job"

# Depths for 3x and 5x of the job's clock on this machine, and what they cost in quality. One thread, nothing else computing.
export OMP_NUM_THREADS=1
job=(--task e2e --data "$data")
[ -f "$out/profile.json" ] || "$skipdecode" profile "$out/job" --batch 1,32 --context 16,48,96 --repeats 5 \
    --output "$out/profile.json"
for speedup in 3 5; do
    [ -f "$out/$speedup-job.json" ] || "$skipdecode" calibrate "$out/job" "${job[@]}" --speedup $speedup --clock job \
        --profile "$out/profile.json" --prompt-layers max --output "$out/$speedup-job.json"
done
"$skipdecode" evaluate "$out/job" "${job[@]}" --speedups 3,5 --schedule "$out/3-job.json,$out/5-job.json" --repeats 3 \
    --output "$out/e2e-job"
