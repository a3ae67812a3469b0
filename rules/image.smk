# Make the engine runnable.
# Input: the engine's locks, kldaudit's capture code.  Output: image.json (what was made, and its digest).
# Steps: virtual environment, hash-locked wheels, kldaudit itself.  Other runtimes get their rule here.

CAPTURE_CODE = sorted(
    str(path)
    for pattern in (
        "errors.py",
        "digests.py",
        "records.py",
        "audit.py",
        "capture_file.py",
        "runtime.py",
    )
    + ("capture/*.py", "checkpoint/*.py", "prompt/*.py")
    for path in Path("src/kldaudit").glob(pattern)
)


rule image:
    input:
        locks=["envs/torch-cpu.txt", f"envs/{AUDIT.engine}.txt"],
        code=CAPTURE_CODE,
    output:
        f"{RESULTS}/image.json",
    log:
        f"{LOGS}/image.log",
    benchmark:
        f"{LOGS}/image.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    params:
        engine=AUDIT.engine,
        locks=lambda wildcards, input: [f"--lock={lock}" for lock in input.locks],
        location=f"{config['engines']}/{AUDIT.engine}",
    shell:
        "kldaudit image --engine {params.engine:q} {params.locks:q} --location {params.location:q} --source . "
        "--output {output:q} --log {log:q}"
