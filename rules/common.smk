# What all rules share: the audit, and the specs that later steps depend on.
# Input: the audit file.  Output: spec.json (the whole audit), arms/{arm}.json (what one arm's captures depend on).

import json
from pathlib import Path

from kldaudit import METHOD_VERSION
from kldaudit.audit import arm_spec, read_audit
from kldaudit.errors import KldauditError
from snakemake.exceptions import WorkflowError

AUDIT_FILE = config["audit"]
try:
    AUDIT = read_audit(Path(AUDIT_FILE))
except KldauditError as error:
    raise WorkflowError(str(error))

RESULTS = f"{config['results']}/{AUDIT.name}"
LOGS = f"logs/{AUDIT.name}"
LAUNCHES = list(range(1, AUDIT.capture.launches + 1))


wildcard_constraints:
    arm="|".join(AUDIT.arms),
    variant="|".join(AUDIT.variants) or "none",
    checkpoint="|".join(AUDIT.checkpoints),
    prompt="|".join(AUDIT.prompts),
    launch=r"\d+",


localrules:
    spec,
    arm,


# The parameters, not the audit file, are what these rules depend on: touching one arm leaves the others alone.
rule spec:
    output:
        f"{RESULTS}/spec.json",
    log:
        f"{LOGS}/spec.log",
    conda:
        "../envs/workflow.yaml"
    params:
        audit=AUDIT_FILE,
        content=lambda wildcards: AUDIT.model_dump_json(),
    shell:
        "kldaudit spec --audit {params.audit:q} --output {output:q} 2> >(tee {log:q} >&2)"


rule arm:
    output:
        f"{RESULTS}/arms/{{arm}}.json",
    log:
        f"{LOGS}/arms/{{arm}}.log",
    conda:
        "../envs/workflow.yaml"
    params:
        audit=AUDIT_FILE,
        content=lambda wildcards: arm_spec(AUDIT, wildcards.arm).model_dump_json(),
    shell:
        "kldaudit spec --audit {params.audit:q} --arm {wildcards.arm:q} --output {output:q} 2> >(tee {log:q} >&2)"
