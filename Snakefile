# kldaudit: from an audit file to a disclosure sheet and a report.
# Steps, in run order: image, checkpoint, prompt, capture, verify, divergence, disclosure, report.


configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/image.smk"
include: "rules/checkpoint.smk"
include: "rules/prompt.smk"
include: "rules/capture.smk"
include: "rules/verify.smk"
include: "rules/divergence.smk"
include: "rules/disclosure.smk"
include: "rules/report.smk"


localrules:
    all,


rule all:
    default_target: True
    input:
        rules.report.output,
