# One table of what the run made.


rule summarise:
    input:
        manifest=f"{RUN}/hidden_states/data_config.json",
        vocabularies=[f"{RUN}/vocab_map/{drafter.draft_vocab_size}.json" for drafter in CONFIG.drafters.values()],
        evaluations=expand(f"{RUN}/drafters/{{drafter}}/evaluation.json", drafter=CONFIG.drafters),
        exports=expand(f"{RUN}/drafters/{{drafter}}/export/sglang/export.json", drafter=CONFIG.drafters),
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
