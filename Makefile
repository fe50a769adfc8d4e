# `make demo` and `make test` set up all they need: Python >= 3.10 and a package index are enough.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo report results test quick lint clean
help:
	@echo "make demo | report | test | quick (no slow tests) | lint | clean;  PYTHON=python3.12 and VENV=dir choose others"
	@echo "make results: what is committed as measured, again where the hardware is;  ONLY='h200_decode* quality/*' chooses"

demo: $(READY)
	$(BIN)/torchsparsekv demo

# The page of what is measured and committed.
report: $(READY)
	$(BIN)/torchsparsekv report benchmarks/results/*.json benchmarks/results/quality/*.jsonl \
		-o benchmarks/results/report/report.html

# What is on the page, measured again, and the page: also where some runs failed (1), but not of a call that was refused.
results: $(READY)
	@$(BIN)/torchsparsekv again $(foreach name,$(ONLY),'$(name)'); status=$$?; \
	if [ $$status -le 1 ]; then $(MAKE) report || status=$$?; fi; exit $$status

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal

quick: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# torch goes first and alone, so that the version above is what the others are resolved against.
$(READY): pyproject.toml setup.py
	@test ! -L "$(VENV)" || { echo "$(VENV) is a link to another environment: not installing into that"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed (make PYTHON=...)")'
	$(PYTHON) -m venv "$(VENV)"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[hf,cli,report,test,dev]"
	@touch $@

clean:
	rm -rf benchmarks/results/.again build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	@if [ -f "$(READY)" ]; then rm -rf "$(VENV)"; fi
