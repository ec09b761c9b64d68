#!/usr/bin/env bash
# Tables like those under results/clock: recipes/bench.sh OUTPUT. An hour or two on two cores, with nothing else computing.
# Shapes with random weights: speed does not depend on their values. What is there is kept: delete a folder to measure
# it again. Weights are laid out once (--prepack), as docs/faster.md says for CPUs; plain ones are what this is beside.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
skipdecode=${SKIPDECODE:-.venv/bin/skipdecode}
shapes=${SHAPES:-opt-1.3b llama-3.2-1b}

profile() { # SHAPE NAME OPTIONS…
    [ -f "$out/$1/$2.json" ] || "$skipdecode" profile --shape "$1" --batch 1,8,32 --context 64,256,1024,2000 \
        --output "$out/$1/$2.json" "${@:3}"
}
bench() { # SHAPE NAME OPTIONS…
    [ -f "$out/$1/$2/table.json" ] || "$skipdecode" bench --shape "$1" --output "$out/$1/$2" --repeats 2 "${@:3}"
}
for shape in $shapes; do
    mkdir -p "$out/$shape"
    # Asked for and got: of a decode step, and of a whole job whose prompt runs as few layers as its first step.
    profile "$shape" profile-prepacked --prepack
    prepacked=(--prepack --profile "$out/$shape/profile-prepacked.json")
    bench "$shape" step-prepacked "${prepacked[@]}" --clock step --speedups 2,3,4,5
    bench "$shape" job-prepacked "${prepacked[@]}" --clock job --prompt-layers max --speedups 2,3,5 --new-tokens 64
    profile "$shape" profile
    bench "$shape" step --profile "$out/$shape/profile.json" --clock step --speedups 2,3,4,5
done
bench opt-1.3b int8 --quantization int8 --speedups 3 --batch 1,8 --new-tokens 64
