# `make demo` and `make test` set up all they need: Python >= 3.10 and a package index are enough.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS := $(VENV)/.tests

.PHONY: help demo docs site results real-model test slow full fuzz sanitize long wheel versions engine lint clean
help:
	@echo "make demo | docs | site | test | slow (the other tests) | full (all tests) | fuzz | sanitize (GPU) | long (GPU) | wheel | versions | engine | lint | clean;  PYTHON=python3.12 and VENV=dir choose others"
	@echo "make results: the committed files of results, measured again where the hardware is;  ONLY='h200_decode*' chooses"
	@echo "make real-model: the language models and texts that eval, eval-text and board measure with;  ONLY='qwen-1.5b sympy' chooses"

demo: $(READY)
	$(BIN)/torchsparsekv demo

# The tables of all pages and the figure of the README, from the committed files of results.
docs: $(READY)
	$(BIN)/python -m torchsparsekv_benchmarks.report.tables

# The site of docs/ in build/site, with a page of every docstring. A broken link stops it.
site: $(READY)
	@$(BIN)/python -c "import mkdocs, mkdocstrings" 2>/dev/null || $(BIN)/python -m pip install --quiet --editable ".[site]"
	$(BIN)/python tests/tools/link.py build/linked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site is made; to read and search it: python3 -m http.server --directory build/site"

# Real language models and texts for eval, eval-text and board, 1.6 GB, into benchmarks/real_model, which no commit holds.
real-model: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[real]"
	$(BIN)/python -m torchsparsekv_benchmarks.quality.real_model $(ONLY)

# The committed files of results by their own commands again, where the hardware is, and the tables of them.
results: $(READY)
	@$(BIN)/torchsparsekv again $(foreach name,$(ONLY),'$(name)'); status=$$?; \
	if [ $$status -le 1 ]; then $(MAKE) docs || status=$$?; fi; exit $$status

# The tests that are not in tests/tools/slow.txt; 4 to 8 minutes on two cores, twelve at most.
test: $(TESTS)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# The tests that `make test` leaves out; about fifteen minutes on two cores. CI runs both.
slow: $(TESTS)
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

# Every test; twenty-five minutes on two cores.
full: $(TESTS)
	$(BIN)/python -m pytest -n auto --dist worksteal

# Hours of one core: every op at a thousand examples, the stateful tests of the store at five hundred, and each kernel
# compiled in all its variants.
fuzz: $(READY)
	TORCHSPARSEKV_FUZZ=1000 $(BIN)/python -m pytest -n auto --dist worksteal tests/ops/_machinery/test_ops.py
	TORCHSPARSEKV_FUZZ=500 $(BIN)/python -m pytest -n auto --dist worksteal tests/ops/store/test_store_machine.py
	TRITON_INTERPRET=0 PYTHONPATH=tests/support $(BIN)/python tests/tools/compile_kernels.py --all

# Every kernel under compute-sanitizer; needs a GPU and the tool, which comes with the CUDA toolkit.
sanitize: $(READY)
	$(BIN)/python tests/tools/sanitize.py

# Ten thousand tokens with every method: nothing may grow, recompile or leave the graph.
long: $(READY)
	$(BIN)/python tests/tools/long_run.py

# The wheel in dist/, and a first token from it in an empty environment of every Python from 3.10 to 3.13 that is here.
wheel: $(READY)
	$(BIN)/python tests/tools/wheel.py --torch "$(TORCH)" $(PYTHONS)

# The short suite at both ends and in the middle of the supported versions, each pair (torch/transformers) in its own
# environment. ARGS chooses the tests.
VERSIONS ?= 2.11.0/5.5.4 2.13.0/5.17.0 2.14.1/5.24.0
ARGS ?= -m "not slow" tests/patches tests/core tests/docs
versions:
	@status=0; for pair in $(VERSIONS); do here="$(VENV)/versions/$$pair"; \
	$(MAKE) --no-print-directory "$$here/.ready" VENV="$$here" TORCH="torch==$${pair%/*}" \
	&& "$$here/bin/python" -m pip install --quiet --editable ".[peft]" "transformers==$${pair#*/}" \
	&& echo "torch $${pair%/*}, transformers $${pair#*/}:" \
	&& "$$here/bin/python" -m pytest -n auto --dist worksteal $(ARGS) || status=1; done; exit $$status

# The tests of the newest tested vLLM: a tiny llama in its real engine, on a CPU, without its native code.
ENGINE ?= 2.14.1/0.33.0
engine:
	@here="$(VENV)/engine"; $(MAKE) --no-print-directory "$$here/.ready" VENV="$$here" TORCH="torch==$(firstword $(subst /, ,$(ENGINE)))" \
	&& "$$here/bin/python" -m pip install --quiet --requirement tests/engines/requirements.txt \
	&& "$$here/bin/python" tests/tools/vllm_python.py "$(lastword $(subst /, ,$(ENGINE)))" \
	&& PYTHONPATH=tests/support "$$here/bin/python" -m pytest -p vllm_cpu tests/engines tests/docs/test_ask_server.py

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python tests/tools/link.py .mypy_cache/house
	MYPYPATH=.mypy_cache/house $(BIN)/python -m mypy -p torchsparsekv -p torchsparsekv_benchmarks

# torch goes first and alone, so that the version above is what the others are resolved against.
$(READY): pyproject.toml setup.py benchmarks/pyproject.toml benchmarks/setup.py
	@test ! -L "$(VENV)" || { echo "$(VENV) is a link to another environment: not installing into that"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed (make PYTHON=...)")'
	$(PYTHON) -m venv "$(VENV)"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[hf,cli,report,test,dev]"
	$(BIN)/python -m pip install --quiet --no-deps --editable benchmarks
	@touch $@

# What the recipes and their tests need besides; `make demo` does without.
$(TESTS): $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[eval,peft,real]"
	@touch $@

clean:
	rm -rf benchmarks/results/.again build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	@if [ -f "$(READY)" ]; then rm -rf "$(VENV)"; fi
