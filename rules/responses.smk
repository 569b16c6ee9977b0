# The target's own responses, shard by shard.


rule respond:
    input:
        prompts=f"{RUN}/prompts/{{shard}}.jsonl",
        target=ancient(PLAN.target_files),
    output:
        rows=f"{RUN}/conversations/{{shard}}.jsonl",
        facts=f"{RUN}/conversations/{{shard}}.json",
    params:
        version=PLAN.versions["conversations"],
        settings=PLAN.response_settings,
        target=TARGET,
    log:
        f"{RUN}/logs/responses/{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/responses/{{shard}}.tsv"
    threads: CONFIG.responses.threads
    resources:
        gpu=CONFIG.responses.gpu,
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "python {SCRIPTS:q}/respond.py --log {log:q} --label responses/{wildcards.shard} --threads {threads} "
        "--gpu {resources.gpu} --gpu-wanted {CONFIG.responses.gpu} --prompts {input.prompts:q} "
        "--target {params.target:q} --settings {params.settings:q} "
        "--batch-rows {CONFIG.responses.batch_rows} --output {output.rows:q}"
