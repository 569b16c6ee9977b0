# Prompt files to numbered rows, cut into shards.


rule number_prompts:
    input:
        PLAN.prompt_paths,
    output:
        **({} if PLAN.prompt_files.recorded else {"shards": PLAN.prompt_files.wanted()}),
        index=f"{RUN}/prompts/index.json",
        skipped=f"{RUN}/prompts/skipped.jsonl",
    log:
        f"{RUN}/logs/prompts.log",
    benchmark:
        f"{RUN}/benchmarks/prompts.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    resources:
        # No param: tolerating more bad records changes nothing in the shards that were written.
        max_bad_rows=CONFIG.data.max_bad_rows,
    params:
        version=PLAN.versions["prompts"],
        rows=PLAN.rows,
        shard_rows=CONFIG.data.shard_rows,
        # A function: braces in it are not wildcards.
        files=lambda wildcards: PLAN.prompt_files_json,
        format=CONFIG.data.format,
        duplicates=CONFIG.data.duplicates,
    shell:
        'python "$EYAS_SCRIPTS"/number_prompts.py --log {log:q} --label prompts --files {params.files:q} '
        "--format {params.format} --duplicates {params.duplicates} "
        "--rows {params.rows} --shard-rows {params.shard_rows} --max-bad-rows {resources.max_bad_rows} "
        "--output {output.index:q}"
