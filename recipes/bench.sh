#!/usr/bin/env bash
# Everything under results/clock: recipes/bench.sh OUTPUT. An hour or two on two cores, with nothing else computing.
# Shapes with random weights: speed does not depend on their values. What is there is kept: delete a folder to measure
# it again.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode} python=${PYTHON:-.venv/bin/python}
shapes=${SHAPES:-opt-1.3b llama-3.2-1b}

bench() { # SHAPE NAME OPTIONS…
    [ -f "$out/$1/$2/table.json" ] || "$skipdecode" bench --shape "$1" --output "$out/$1/$2" "${@:3}"
}
for shape in $shapes; do
    profile=$out/$shape/profile.json
    mkdir -p "$out/$shape"
    [ -f "$profile" ] || "$skipdecode" profile --shape "$shape" --batch 1,8,32 --context 64,256,1024,2000 \
        --output "$profile"
    # Asked for and got: of a decode step, and of a whole job whose prompt runs as few layers as its first step.
    bench "$shape" step --clock step --profile "$profile" --speedups 2,3,4,5 --repeats 2
    bench "$shape" job --clock job --profile "$profile" --prompt-layers max --speedups 2,3,5 --new-tokens 64 --repeats 2
    [ -f "$out/$shape/contexts/table.json" ] || "$python" benchmarks/contexts.py --shape "$shape" \
        --profile "$profile" --output "$out/$shape/contexts"
done
bench opt-1.3b int8 --quantization int8 --speedups 3 --batch 1,8 --new-tokens 64 --repeats 2
bench opt-1.3b compiled --compile --speedups 3 --batch 1,8 --new-tokens 64 --repeats 2
