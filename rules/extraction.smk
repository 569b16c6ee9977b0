# Hidden states of the target, shard by shard, and the manifest over all of them.


rule extract:
    input:
        tokens=f"{RUN}/tokens/{{shard}}.safetensors",
        facts=f"{RUN}/tokens/{{shard}}.json",
        target=ancient(PLAN.target_files),
    output:
        states=f"{RUN}/hidden_states/{{shard}}.safetensors",
        facts=f"{RUN}/hidden_states/{{shard}}.json",
    log:
        f"{RUN}/logs/hidden_states/{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/hidden_states/{{shard}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    threads: CONFIG.extraction.threads
    resources:
        gpu=CONFIG.extraction.gpu,
        gpu_wanted=CONFIG.extraction.gpu,
        batch_tokens=CONFIG.extraction.batch_tokens,
    params:
        version=PLAN.versions["hidden_states"],
        settings=PLAN.extraction_settings,
        target=TARGET,
    shell:
        'python "$EYAS_SCRIPTS"/extract.py --log {log:q} --label hidden_states/{wildcards.shard} --threads {threads} '
        "--gpu {resources.gpu} --gpu-wanted {resources.gpu_wanted} --tokens {input.tokens:q} "
        "--target {params.target:q} --settings {params.settings:q} "
        "--batch-tokens {resources.batch_tokens} --output {output.states:q}"


rule write_manifest:
    input:
        states=expand(f"{RUN}/hidden_states/{{shard}}.safetensors", shard=SHARDS),
        facts=expand(f"{RUN}/hidden_states/{{shard}}.json", shard=SHARDS),
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
