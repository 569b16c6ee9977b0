# The target's own responses, shard by shard.

# A job makes one shard, or a range of shards where there are many.
for JOB in PLAN.response_jobs:

    rule:
        name:
            JOB.name
        input:
            **PLAN.prompt_files.inputs(JOB, "rows"),
            target=ancient(PLAN.response_target_files),
        output:
            **PLAN.response_files.outputs(JOB),
        log:
            f"{RUN}/logs/responses/{JOB.log_name}.log",
        benchmark:
            f"{RUN}/benchmarks/responses/{JOB.log_name}.tsv"
        conda:
            "../workflow/envs/eyas.yaml"
        threads: CONFIG.responses.threads
        resources:
            **allocation(CONFIG.responses),
            batch_rows=CONFIG.responses.batch_rows,
            endpoint=PLAN.endpoint_json,
            rows=JOB.rows,
            total_rows=PLAN.rows,
            shard_rows=CONFIG.data.shard_rows,
            run=RUN,
            recorded=int(PLAN.response_files.recorded),
        params:
            version=PLAN.versions["conversations"],
            # A function: braces in it are not wildcards.
            settings=lambda wildcards: PLAN.response_settings,
            target=PLAN.response_target_json,
        shell:
            'python "$EYAS_SCRIPTS"/respond.py --log {log:q} --label responses/{resources.rows} --threads {threads} '
            f"--gpu {{resources.{GRANTED}}} --gpu-wanted {{resources.gpu_wanted}} --run {{resources.run:q}} "
            "--rows {resources.rows} --total-rows {resources.total_rows} --shard-rows {resources.shard_rows} "
            "--target {params.target:q} --settings {params.settings:q} "
            "--batch-rows {resources.batch_rows} --endpoint {resources.endpoint:q} "
            "--recorded {resources.recorded}"
