# Bring every checkpoint's files together.
# Input: image.json, for a quantized one its base's record.  Output: checkpoints/{checkpoint}.json and the folder beside it.


def base_checkpoint(wildcards):
    quantize = AUDIT.checkpoints[wildcards.checkpoint].quantize
    return f"{RESULTS}/checkpoints/{quantize.base}.json" if quantize else []


rule checkpoint:
    input:
        image=rules.image.output,
        base=base_checkpoint,
    output:
        record=f"{RESULTS}/checkpoints/{{checkpoint}}.json",
        folder=directory(f"{RESULTS}/checkpoints/{{checkpoint}}"),
    params:
        audit=AUDIT_FILE,
        content=lambda wildcards: AUDIT.checkpoints[wildcards.checkpoint].model_dump_json(),
    log:
        f"{LOGS}/checkpoints/{{checkpoint}}.log",
    benchmark:
        f"{LOGS}/checkpoints/{{checkpoint}}.benchmark.tsv"
    threads: 2
    shell:
        "kldaudit checkpoint --audit {params.audit:q} --name {wildcards.checkpoint:q} --image {input.image:q} "
        "--output {output.record:q} --log {log:q}"
