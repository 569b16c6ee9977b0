# Hidden states of the target, shard by shard, and the manifest over all of them.

# A job makes one shard, or a range of shards where loading the target takes long.
for JOB in PLAN.extraction_jobs:

    rule:
        name:
            JOB.name
        input:
            **PLAN.token_files.inputs(JOB, "tokens", "facts"),
            # Not for what it says: all tokens are counted then, and it is known whether the states fit on the disk.
            totals=ancient(f"{RUN}/tokens/totals.json"),
            target=ancient(PLAN.target_files),
        output:
            **PLAN.state_files.outputs(JOB),
        log:
            f"{RUN}/logs/hidden_states/{JOB.log_name}.log",
        benchmark:
            f"{RUN}/benchmarks/hidden_states/{JOB.log_name}.tsv"
        conda:
            "../workflow/envs/eyas.yaml"
        threads: CONFIG.extraction.threads
        resources:
            **allocation(CONFIG.extraction),
            rows=JOB.rows,
            total_rows=PLAN.rows,
            batch_tokens=CONFIG.extraction.batch_tokens,
            max_failed_rows=CONFIG.extraction.max_failed_rows,
            sglang=PLAN.server_options,
            server=PLAN.server_command,
            recorded=int(PLAN.state_files.recorded),
        params:
            version=PLAN.versions["hidden_states"],
            # A function: braces in it are not wildcards.
            settings=lambda wildcards: PLAN.extraction_settings,
            target=TARGET,
            run=lambda wildcards: RUN,
            shard_rows=CONFIG.data.shard_rows,
        shell:
            'python "$EYAS_SCRIPTS"/extract.py --log {log:q} --label hidden_states/{resources.rows} '
            f"--threads {{threads}} --gpu {{resources.{GRANTED}}} --gpu-wanted {{resources.gpu_wanted}} --run {{params.run:q}} "
            "--rows {resources.rows} --total-rows {resources.total_rows} --shard-rows {params.shard_rows} "
            "--target {params.target:q} --settings {params.settings:q} --batch-tokens {resources.batch_tokens} "
            "--max-failed-rows {resources.max_failed_rows} --sglang {resources.sglang:q} "
            "--server {resources.server:q} --recorded {resources.recorded}"


rule write_manifest:
    input:
        **PLAN.state_files.all_inputs("states", "facts"),
    output:
        f"{RUN}/hidden_states/data_config.json",
    log:
        f"{RUN}/logs/manifest.log",
    benchmark:
        f"{RUN}/benchmarks/manifest.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["manifest"],
        rows=PLAN.rows,
        shard_rows=CONFIG.data.shard_rows,
    shell:
        'python "$EYAS_SCRIPTS"/write_manifest.py --log {log:q} --label manifest --rows {params.rows} '
        "--shard-rows {params.shard_rows} --output {output:q}"
