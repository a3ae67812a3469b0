# Render every prompt with the reference checkpoint's tokenizer and chat template.
# Input: the prompt's source, image.json, the reference checkpoint.  Output: prompts/{prompt}.json (token ids, spans).

REFERENCE_CHECKPOINT = AUDIT.arms[AUDIT.reference].checkpoint


rule prompt:
    input:
        source=lambda wildcards: AUDIT.prompts[wildcards.prompt].file,
        image=rules.image.output,
        checkpoint=f"{RESULTS}/checkpoints/{REFERENCE_CHECKPOINT}.json",
    output:
        f"{RESULTS}/prompts/{{prompt}}.json",
    log:
        f"{LOGS}/prompts/{{prompt}}.log",
    benchmark:
        f"{LOGS}/prompts/{{prompt}}.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    params:
        about=lambda wildcards: AUDIT.prompts[wildcards.prompt].about,
    shell:
        "kldaudit prompt --name {wildcards.prompt:q} --source {input.source:q} --about {params.about:q} "
        "--image {input.image:q} --checkpoint {input.checkpoint:q} --output {output:q} --log {log:q}"
