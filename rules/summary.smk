# One table of what the run made, and the page that shows it.

VOCABULARIES = sorted({f"{RUN}/vocab_map/{drafter.draft_vocab_size}.json" for drafter in CONFIG.drafters.values()})


rule summarise:
    input:
        manifest=f"{RUN}/hidden_states/data_config.json",
        vocabularies=VOCABULARIES,
        evaluations=expand(f"{RUN}/drafters/{{drafter}}/evaluation.json", drafter=CONFIG.drafters),
        exports=expand(
            f"{RUN}/drafters/{{drafter}}/export/{{server}}/{{name}}",
            drafter=CONFIG.drafters,
            server=SERVERS,
            name=("export.json", "README.md"),
        ),
    output:
        table=f"{RUN}/summary.txt",
        values=f"{RUN}/summary.json",
    log:
        f"{RUN}/logs/summary.log",
    benchmark:
        f"{RUN}/benchmarks/summary.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        drafters=PLAN.drafters_json,
    shell:
        'python "$EYAS_SCRIPTS"/summarise.py --log {log:q} --label summary --manifest {input.manifest:q} '
        "--drafters {params.drafters:q} --output {output.values:q}"


rule write_report:
    input:
        summary=f"{RUN}/summary.json",
        statistics=f"{RUN}/tokens/statistics.json",
        vocabularies=VOCABULARIES,
    output:
        f"{RUN}/report.html",
    log:
        f"{RUN}/logs/report.log",
    benchmark:
        f"{RUN}/benchmarks/report.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["report"],
    shell:
        'python "$EYAS_SCRIPTS"/write_report.py --log {log:q} --label report --summary {input.summary:q} '
        "--statistics {input.statistics:q} --vocabularies {input.vocabularies:q} --output {output:q}"
