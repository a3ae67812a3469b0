# Replay the prompts through one launch of one arm.
# Input: the arm's spec, image.json, its checkpoint, the prompts.  Output: the capture (HDF5) and its manifest.
# An arm that the engine refuses is an outcome: both files say so, and the other arms go on.


rule capture:
    input:
        spec=f"{RESULTS}/arms/{{arm}}.json",
        image=rules.image.output,
        checkpoint=lambda wildcards: f"{RESULTS}/checkpoints/{AUDIT.arms[wildcards.arm].checkpoint}.json",
        prompts=expand(rules.prompt.output, prompt=AUDIT.prompts),
    output:
        capture=f"{RESULTS}/captures/{{arm}}/launch{{launch}}.h5",
        manifest=f"{RESULTS}/captures/{{arm}}/launch{{launch}}.manifest.json",
    log:
        f"{LOGS}/captures/{{arm}}/launch{{launch}}.log",
    benchmark:
        f"{LOGS}/captures/{{arm}}/launch{{launch}}.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    threads: lambda wildcards: AUDIT.arms[wildcards.arm].settings.threads
    params:
        prompts=lambda wildcards, input: [
            f"--prompt={prompt}" for prompt in input.prompts
        ],
    shell:
        "kldaudit capture --spec {input.spec:q} --image {input.image:q} --checkpoint {input.checkpoint:q} "
        "{params.prompts:q} --launch {wildcards.launch} --output {output.capture:q} "
        "--manifest {output.manifest:q} --log {log:q}"
