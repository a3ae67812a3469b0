# KL(reference‖variant) from the stored bits.
# Input: first launch of both arms, the reference's second launch (noise floor), the prompts (spans).
# Output: divergence/{variant}.json (statistics) and .h5 (every position).


def reference_capture(launch):
    return f"{RESULTS}/captures/{AUDIT.reference}/launch{launch}.h5"


rule divergence:
    input:
        reference=reference_capture(1),
        second_launch=reference_capture(2) if len(LAUNCHES) > 1 else [],
        variant=f"{RESULTS}/captures/{{variant}}/launch1.h5",
        prompts=expand(rules.prompt.output, prompt=AUDIT.prompts),
    output:
        record=f"{RESULTS}/divergence/{{variant}}.json",
        positions=f"{RESULTS}/divergence/{{variant}}.h5",
    params:
        audit=AUDIT_FILE,
        settings=AUDIT.divergence.model_dump_json(),
        prompts=lambda wildcards, input: [f"--prompt={prompt}" for prompt in input.prompts],
        second=f"--second-launch={reference_capture(2)}" if len(LAUNCHES) > 1 else [],
    log:
        f"{LOGS}/divergence/{{variant}}.log",
    shell:
        "kldaudit divergence {input.reference:q} {input.variant:q} {params.second:q} {params.prompts:q} "
        "--audit {params.audit:q} --output {output.record:q} --positions {output.positions:q} 2> >(tee {log:q} >&2)"
