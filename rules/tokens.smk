# Chat template to token ids and loss masks, shard by shard.


rule tokenize:
    input:
        conversations=f"{RUN}/conversations/{{shard}}.jsonl",
        target=ancient(PLAN.target_files),
    output:
        tokens=f"{RUN}/tokens/{{shard}}.safetensors",
        facts=f"{RUN}/tokens/{{shard}}.json",
    log:
        f"{RUN}/logs/tokens/{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/tokens/{{shard}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["tokens"],
        # A function: braces in it are not wildcards.
        settings=lambda wildcards: PLAN.token_settings,
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/tokenize_conversations.py --log {log:q} --label tokens/{wildcards.shard} '
        "--conversations {input.conversations:q} --target {params.target:q} --settings {params.settings:q} "
        "--output {output.tokens:q}"


rule count_tokens:
    input:
        tokens=expand(f"{RUN}/tokens/{{shard}}.safetensors", shard=SHARDS),
        facts=expand(f"{RUN}/tokens/{{shard}}.json", shard=SHARDS),
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
        tokens_folder=lambda wildcards, input: os.path.dirname(input.tokens[0]),
    shell:
        'python "$EYAS_SCRIPTS"/count_tokens.py --log {log:q} --label totals --tokens-folder {params.tokens_folder:q} '
        "--rows {resources.rows} --shard-rows {resources.shard_rows} --output {output:q}"


rule describe_tokens:
    input:
        tokens=expand(f"{RUN}/tokens/{{shard}}.safetensors", shard=SHARDS),
        facts=expand(f"{RUN}/tokens/{{shard}}.json", shard=SHARDS),
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
        tokens_folder=lambda wildcards, input: os.path.dirname(input.tokens[0]),
        rows=PLAN.rows,
        shard_rows=CONFIG.data.shard_rows,
        dtype=CONFIG.extraction.dtype,
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/describe_tokens.py --log {log:q} --label statistics --tokens-folder {params.tokens_folder:q} '
        "--rows {params.rows} --shard-rows {params.shard_rows} --dtype {params.dtype} --target {params.target:q} "
        "--output {output:q}"
