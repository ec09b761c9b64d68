#!/usr/bin/env bash
# Speeds in vLLM on one GPU: compares texts, then measures; planned for half an hour on a GPU of 80 GB.
#   benchmarks/gpu.sh OUTPUT_DIR
# The whole was NEVER RUN. The tests of its first part ran once on an H100, those of graphs and texts passed
# (docs/serving.md); no speed was measured. The same command goes on after an interruption, with another round.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
export SKIPDECODE_ALLOW_UNTRIED_GPU=1 VLLM_USE_V2_MODEL_RUNNER=1
python=${PYTHON:-.venv-gpu/bin/python} # of an environment that has vLLM 0.32.0 for GPUs, the package and its test extra

if [ ! -x "$python" ]; then
    python3 -m venv .venv-gpu
    .venv-gpu/bin/pip install --quiet --disable-pip-version-check vllm==0.32.0 -e '.[cli,test]' openai gguf
fi

# Texts against transformers' in float32, eager and from graphs. A failure ends the script: figures of wrong texts are none.
[ -f "$out/exact" ] || "$python" -m pytest tests/inside_vllm/test_exact.py tests/inside_vllm/test_graphs.py \
    tests/inside_vllm/test_adapters.py --quiet
mkdir -p "$out" && touch "$out/exact"
[ -d smollm2 ] || "$python" recipes/smollm2.py smollm2

# Stock, 1x, 2x and 3x with constant depths; both engines share the GPU's memory and take turns.
measure() { # FOLDER ENGINE_OPTIONS OPTIONS…
    "$python" benchmarks/serving --python "$python" --loads lockstep,continuous --forms flat --speedups 1.33,2,3 \
        --slots 32,128 --prompt-tokens 128 --new-tokens 128 --rounds 2 --kv-gib 8 \
        --engine "{\"gpu_memory_utilization\": 0.45, \"compilation_config\": {\"cudagraph_capture_sizes\": [32, 128]}$2}" \
        --work "$out/work" --output "$out/$1" "${@:3}"
}
measure smollm2 "" --model smollm2
measure 8b-bfloat16 ', "load_format": "dummy"' --shape llama-3.1-8b
measure 8b-fp8 ', "load_format": "dummy", "quantization": "fp8"' --shape llama-3.1-8b
find "$out" -name table.md -exec cat {} +
