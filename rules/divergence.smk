# KL(reference‖variant) from the stored bits.
# Input: first launch of both arms, the reference's second launch (noise floor), the prompts (spans).
# Output: divergence/{variant}.json (statistics) and .h5 (every position).


REFERENCE_CAPTURES = expand(
    rules.capture.output.capture, arm=AUDIT.reference, launch=LAUNCHES
)


rule divergence:
    input:
        reference=REFERENCE_CAPTURES[0],
        second_launch=REFERENCE_CAPTURES[1:2],
        variant=f"{RESULTS}/captures/{{variant}}/launch1.h5",
        prompts=expand(rules.prompt.output, prompt=AUDIT.prompts),
    output:
        record=f"{RESULTS}/divergence/{{variant}}.json",
        positions=f"{RESULTS}/divergence/{{variant}}.h5",
    log:
        f"{LOGS}/divergence/{{variant}}.log",
    conda:
        "../envs/workflow.yaml"
    params:
        audit=AUDIT_FILE,
        settings=lambda wildcards: AUDIT.divergence.model_dump_json(),
        method=METHOD_VERSION,
        prompts=lambda wildcards, input: [
            f"--prompt={prompt}" for prompt in input.prompts
        ],
        second=[f"--second-launch={path}" for path in REFERENCE_CAPTURES[1:2]],
    shell:
        "kldaudit divergence {input.reference:q} {input.variant:q} {params.second:q} {params.prompts:q} "
        "--audit {params.audit:q} --output {output.record:q} --positions {output.positions:q} 2> >(tee {log:q} >&2)"
