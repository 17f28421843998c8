# `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

TORCH ?= auto
override torch := $(if $(filter auto,$(TORCH)),$(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu),$(TORCH))
BIN := .venv/bin
EXTRA ?=
INSTALLED := .venv/.installed-$(torch)$(EXTRA:%=-%)
STRIP := nbstripout --verify --extra-keys "metadata.papermill cell.metadata.papermill cell.metadata.execution"

.PHONY: help report book test test-fast test-table test-versions chaos lint course-tests clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 15

$(INSTALLED): pyproject.toml constraints.txt tools/setup.sh
	@command -v git >/dev/null || { echo "git is missing; on Debian or Ubuntu: apt-get install git" >&2; exit 1; }
	@tools/setup.sh $(torch) $(EXTRA)
	@rm -f .venv/.installed-* && touch $@

report: $(INSTALLED) ## measure what is missing on this machine, then build the writeup (TORCH=auto|cpu|cuda)
	$(BIN)/cs336 run
	@$(MAKE) --no-print-directory book

book: $(INSTALLED) ## the writeup from the rows there are: HTML, and the PDF if LaTeX is (or can be) installed
	@tools/latex.sh; case $$? in \
	  0) $(BIN)/cs336 book --pdf;; \
	  3) $(BIN)/cs336 book; echo "(the PDF was left out; see above)";; \
	  *) exit 1;; esac

test: $(INSTALLED) ## all tests that this machine can run (EXTRA=cuda: with the compiler of CUDA C++)
	$(BIN)/python -m pytest -q -n 2

test-fast: $(INSTALLED) ## the tests for the loop of an edit (under two minutes on two cores)
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not table and not chaos"

test-table: $(INSTALLED) ## compile every kernel configuration for every GPU generation (minutes)
	$(BIN)/python -m pytest -q -n 2 -m table

test-versions: $(INSTALLED) ## compile the kernels with every triton that is served (4 GB, minutes for each; VERSIONS="3.9 3.10")
	@VERSIONS="$(VERSIONS)" tools/test-versions.sh

chaos: $(INSTALLED) ## kill, fill, corrupt and mistype, and see what is left (minutes)
	$(BIN)/python -m pytest -q -n 2 -m chaos

lint: $(INSTALLED) ## style and types of the code, notebooks without outputs, README's numbers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/$(STRIP) book/*.ipynb
	$(BIN)/python -m cs336_systems.chapters.index.readme --check

course-tests: $(INSTALLED) ## one of the course's own suites with our adapters (SUITE=path/to/its/tests)
	@tools/course-tests.sh "$(SUITE)"

clean: ## remove .venv and everything built; rows under results/ stay
	rm -rf .venv _build submission build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
