# The target's own responses, shard by shard.


rule respond:
    input:
        prompts=f"{RUN}/prompts/{{shard}}.jsonl",
        target=ancient(PLAN.response_target_files),
    output:
        rows=f"{RUN}/conversations/{{shard}}.jsonl",
        facts=f"{RUN}/conversations/{{shard}}.json",
    log:
        f"{RUN}/logs/responses/{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/responses/{{shard}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    threads: CONFIG.responses.threads
    resources:
        **allocation(CONFIG.responses),
        batch_rows=CONFIG.responses.batch_rows,
        endpoint=PLAN.endpoint_json,
    params:
        version=PLAN.versions["conversations"],
        # A function: braces in it are not wildcards.
        settings=lambda wildcards: PLAN.response_settings,
        target=PLAN.response_target_json,
    shell:
        'python "$EYAS_SCRIPTS"/respond.py --log {log:q} --label responses/{wildcards.shard} --threads {threads} '
        f"--gpu {{resources.{GRANTED}}} --gpu-wanted {{resources.gpu_wanted}} --prompts {{input.prompts:q}} "
        "--target {params.target:q} --settings {params.settings:q} "
        "--batch-rows {resources.batch_rows} --endpoint {resources.endpoint:q} --output {output.rows:q}"
