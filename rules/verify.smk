# Does the same arm give the same bits again?
# Input: all launches of an arm.  Output: verification/{arm}.json (identical, or where they part; refused arms say why).


rule verify:
    input:
        expand(rules.capture.output.capture, launch=LAUNCHES, allow_missing=True),
    output:
        f"{RESULTS}/verification/{{arm}}.json",
    log:
        f"{LOGS}/verification/{{arm}}.log",
    conda:
        "../envs/workflow.yaml"
    shell:
        "kldaudit verify {input:q} --output {output:q} 2> >(tee {log:q} >&2)"
