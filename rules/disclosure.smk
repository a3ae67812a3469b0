# The sheet with every field that one needs to interpret the number.
# Input: all records.  Output: disclosure.json, disclosure.md.


rule disclosure:
    input:
        spec=rules.spec.output,
        image=rules.image.output,
        checkpoints=expand(rules.checkpoint.output.record, checkpoint=AUDIT.checkpoints),
        prompts=expand(rules.prompt.output, prompt=AUDIT.prompts),
        manifests=expand(rules.capture.output.manifest, arm=AUDIT.arms, launch=LAUNCHES),
        verification=expand(rules.verify.output, arm=AUDIT.arms),
        divergence=expand(rules.divergence.output.record, variant=AUDIT.variants),
    output:
        record=f"{RESULTS}/disclosure.json",
        sheet=f"{RESULTS}/disclosure.md",
    log:
        f"{LOGS}/disclosure.log",
    conda:
        "../envs/workflow.yaml"
    params:
        method=METHOD_VERSION,
    shell:
        "kldaudit disclosure --results $(dirname {output.record:q}) 2> >(tee {log:q} >&2)"
