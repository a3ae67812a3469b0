# Make or adopt what the engine runs in.
# Input: the engine's locks, the base's lock and the recipe, kldaudit's capture code.  Output: image.json (what it is).
# Steps, by the audit's runtime: venv: virtual environment, hash-locked wheels, kldaudit itself.  docker and apptainer:
# base file system, the same wheels and kldaudit in an image.  An adopted image is pulled by digest and left as it is.

CAPTURE_CODE = sorted(
    str(path)
    for pattern in (
        "errors.py",
        "digests.py",
        "records.py",
        "audit.py",
        "capture_file.py",
        "history.py",
        "capture/*.py",
        "checkpoint/*.py",
        "prompt/*.py",
        "runtime/*.py",
        # the manifest's recorders; its presenters do not run in the engine
        *(
            f"manifest/{name}.py"
            for name in (
                "caches",
                "configuration",
                "elf",
                "environment",
                "gpu",
                "hashing",
                "kernels",
                "libraries",
                "machine",
                "packages",
                "record",
                "stack",
                "variables",
            )
        ),
    )
    for path in Path("src/kldaudit").glob(pattern)
)

DEVICE = AUDIT.engine.removeprefix("vllm-")
LOCKS = [
    *(["envs/torch-cpu.txt"] if DEVICE == "cpu" else []),
    f"envs/{AUDIT.engine}.txt",
]
ENVIRONMENT = f"adopted-{AUDIT.name}" if AUDIT.adopt else AUDIT.engine


rule image:
    input:
        locks=["envs/capture.txt"] if AUDIT.adopt else LOCKS,
        recipe=(
            [] if AUDIT.runtime == "venv" else f"containers/{AUDIT.engine}/Dockerfile"
        ),
        base=[] if AUDIT.runtime == "venv" else f"containers/base/{DEVICE}.json",
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
        what=(
            f"adopt {AUDIT.adopt}"
            if AUDIT.adopt
            else f"build --engine {AUDIT.engine} --recipe containers/{AUDIT.engine}/Dockerfile "
            f"--base containers/base/{DEVICE}.json --mirror {config['mirror']}"
        ),
        runtime=AUDIT.runtime,
        locks=lambda wildcards, input: [f"--lock={lock}" for lock in input.locks],
        location=f"{config['engines']}/{ENVIRONMENT}",
    shell:
        "kldaudit image {params.what} --runtime {params.runtime} {params.locks:q} --location {params.location:q} "
        "--source . --output {output:q} --log {log:q}"
