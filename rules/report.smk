# The page that a person reads.
# Input: the sheet, every position's figures.  Output: report.html (self-contained).


rule report:
    input:
        rules.disclosure.output,
        expand(rules.divergence.output.positions, variant=AUDIT.variants),
    output:
        f"{RESULTS}/report.html",
    log:
        f"{LOGS}/report.log",
    conda:
        "../envs/workflow.yaml"
    shell:
        "kldaudit report --results $(dirname {output:q}) 2> >(tee {log:q} >&2)"
