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
        table=report(
            f"{RUN}/summary.txt",
            caption="../workflow/report/summary.rst",
            category="Run",
            labels={"file": "summary", "drafter": "all"},
        ),
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


# What the jobs cost is in the benchmark files of their rules. Rules of several shards are told by the plan.
OF_SEVERAL_SHARDS = {
    job.name for jobs in (PLAN.response_jobs, PLAN.token_jobs, PLAN.extraction_jobs) for job in jobs if job.shards
}
BENCHMARKS = json.dumps(
    {each.name: str(each.benchmark) for each in workflow.rules if each.benchmark and each.name not in OF_SEVERAL_SHARDS}
)
RUN_CONFIG = json.dumps(config)


rule write_report:
    input:
        **PLAN.state_files.all_inputs("facts"),
        statistics=f"{RUN}/tokens/statistics.json",
        vocabularies=VOCABULARIES,
        manifest=f"{RUN}/hidden_states/data_config.json",
        epochs=[
            f"{RUN}/drafters/{drafter}/epoch_{settings.training.epochs}/trainer_state.json"
            for drafter, settings in CONFIG.drafters.items()
        ],
        metrics=[
            f"{RUN}/drafters/{drafter}/epoch_{epoch}/metrics.jsonl"
            for drafter, settings in CONFIG.drafters.items()
            for epoch in range(1, settings.training.epochs + 1)
        ],
        selections=expand(f"{RUN}/drafters/{{drafter}}/best/selection.json", drafter=CONFIG.drafters),
        evaluations=expand(f"{RUN}/drafters/{{drafter}}/evaluation.json", drafter=CONFIG.drafters),
        exports=expand(
            f"{RUN}/drafters/{{drafter}}/export/{{server}}/{{name}}",
            drafter=CONFIG.drafters,
            server=SERVERS,
            name=("export.json", "provenance.json"),
        ),
    output:
        report(
            f"{RUN}/report.html",
            caption="../workflow/report/report.rst",
            category="Run",
            labels={"file": "report", "drafter": "all"},
        ),
    log:
        f"{RUN}/logs/report.log",
    benchmark:
        f"{RUN}/benchmarks/report.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    resources:
        # No params: a change of what re-runs nothing else re-runs no report.
        run_config=lambda wildcards: RUN_CONFIG,
        benchmark_files=lambda wildcards: BENCHMARKS,
    params:
        version=PLAN.versions["report"],
        rows=PLAN.rows,
    shell:
        'python "$EYAS_SCRIPTS"/write_report.py --log {log:q} --label report --config {resources.run_config:q} '
        "--rows {params.rows} --benchmarks {resources.benchmark_files:q} --output {output:q}"
