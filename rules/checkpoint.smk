# Bring every checkpoint's files together.
# Input: image.json, for a quantized one its base's record.  Output: checkpoints/{checkpoint}.json and the folder beside it,
# which is not named as an output: it may be a link to a folder of the user's, and Snakemake writes into its outputs.


rule checkpoint:
    input:
        image=rules.image.output,
        base=lambda wildcards: [
            f"{RESULTS}/checkpoints/{quantize.base}.json"
            for quantize in [AUDIT.checkpoints[wildcards.checkpoint].quantize]
            if quantize
        ],
    output:
        record=f"{RESULTS}/checkpoints/{{checkpoint}}.json",
    log:
        f"{LOGS}/checkpoints/{{checkpoint}}.log",
    benchmark:
        f"{LOGS}/checkpoints/{{checkpoint}}.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    threads: 2
    params:
        audit=AUDIT_FILE,
        content=lambda wildcards: AUDIT.checkpoints[
            wildcards.checkpoint
        ].model_dump_json(),
    shell:
        "kldaudit checkpoint --audit {params.audit:q} --name {wildcards.checkpoint:q} --image {input.image:q} "
        "--output {output.record:q} --log {log:q}"
