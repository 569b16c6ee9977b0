# Chat template to token ids and loss masks, shard by shard.

# A job makes one shard, or a range of shards where there are many.
for JOB in PLAN.token_jobs:

    rule:
        name:
            JOB.name
        input:
            **PLAN.response_files.inputs(JOB, "rows"),
            target=ancient(PLAN.target_files),
        output:
            **PLAN.token_files.outputs(JOB),
        log:
            f"{RUN}/logs/tokens/{JOB.log_name}.log",
        benchmark:
            f"{RUN}/benchmarks/tokens/{JOB.log_name}.tsv"
        conda:
            "../workflow/envs/eyas.yaml"
        resources:
            rows=JOB.rows,
            total_rows=PLAN.rows,
            shard_rows=CONFIG.data.shard_rows,
            run=RUN,
            recorded=int(PLAN.token_files.recorded),
        params:
            version=PLAN.versions["tokens"],
            # A function: braces in it are not wildcards.
            settings=lambda wildcards: PLAN.token_settings,
            target=SOURCE,
        shell:
            'python "$EYAS_SCRIPTS"/tokenize_conversations.py --log {log:q} --label tokens/{resources.rows} '
            "--run {resources.run:q} --rows {resources.rows} --total-rows {resources.total_rows} "
            "--shard-rows {resources.shard_rows} --target {params.target:q} --settings {params.settings:q} "
            "--recorded {resources.recorded}"


rule count_tokens:
    input:
        **PLAN.token_files.all_inputs("tokens", "facts"),
    output:
        f"{RUN}/tokens/totals.json",
    log:
        f"{RUN}/logs/totals.log",
    benchmark:
        f"{RUN}/benchmarks/totals.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    resources:
        rows=PLAN.rows,
        shard_rows=CONFIG.data.shard_rows,
    params:
        # Nothing that a change of could re-run it: jobs that wait for it would then not look at their own params.
        tokens_folder=lambda wildcards: f"{RUN}/tokens",
    shell:
        'python "$EYAS_SCRIPTS"/count_tokens.py --log {log:q} --label totals --tokens-folder {params.tokens_folder:q} '
        "--rows {resources.rows} --shard-rows {resources.shard_rows} --output {output:q}"


rule describe_tokens:
    input:
        **PLAN.token_files.all_inputs("tokens", "facts"),
        target=ancient(PLAN.target_files),
    output:
        report(
            f"{RUN}/tokens/statistics.json",
            caption="../workflow/report/statistics.rst",
            category="Data",
            labels={"file": "tokens", "drafter": "all"},
        ),
    log:
        f"{RUN}/logs/statistics.log",
    benchmark:
        f"{RUN}/benchmarks/statistics.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["statistics"],
        tokens_folder=lambda wildcards: f"{RUN}/tokens",
        rows=PLAN.rows,
        shard_rows=CONFIG.data.shard_rows,
        dtype=CONFIG.extraction.dtype,
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/describe_tokens.py --log {log:q} --label statistics --tokens-folder {params.tokens_folder:q} '
        "--rows {params.rows} --shard-rows {params.shard_rows} --dtype {params.dtype} --target {params.target:q} "
        "--output {output:q}"
