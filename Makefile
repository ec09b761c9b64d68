# Two commands: `make demo` and `make test`. Both create .venv on first use, with the versions that were tested.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

$(VENV)/installed: pyproject.toml requirements.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "SkipDecode needs Python 3.10 or newer"'
	@echo "Creating $(VENV) with the tested versions: a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	# torch first and pinned, so that nothing after it pulls in another. For a CPU build where the default one has CUDA:
	# make demo PIP_EXTRA_INDEX_URL=…, as torch's installation page gives it.
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/skipdecode demo

test: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
