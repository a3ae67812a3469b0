#!/usr/bin/env bash
# Run by `snakemake --sdm conda` from the project's folder, inside the new environment.
set -euo pipefail
python -m pip install --require-hashes --no-deps -r envs/workflow.txt
python -m pip install --no-deps --no-build-isolation .
