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
