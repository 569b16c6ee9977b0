# The draft vocabulary, from the supervised tokens; runs beside the extraction.


rule map_vocabulary:
    input:
        **PLAN.token_files.all_inputs("tokens", "facts"),
        target=ancient(PLAN.target_files),
    output:
        mapping=f"{RUN}/vocab_map/{{draft_vocab_size}}.safetensors",
        facts=report(
            f"{RUN}/vocab_map/{{draft_vocab_size}}.json",
            caption="../workflow/report/vocabulary.rst",
            category="Data",
            labels={"file": "draft vocabulary of {draft_vocab_size}", "drafter": "all"},
        ),
    log:
        f"{RUN}/logs/vocab_map/{{draft_vocab_size}}.log",
    benchmark:
        f"{RUN}/benchmarks/vocab_map/{{draft_vocab_size}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["vocabulary"],
        tokens_folder=lambda wildcards: f"{RUN}/tokens",
        rows=PLAN.rows,
        shard_rows=CONFIG.data.shard_rows,
        held_out_every=CONFIG.data.held_out_every,
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/map_vocabulary.py --log {log:q} --label vocabulary --tokens-folder {params.tokens_folder:q} '
        "--rows {params.rows} --shard-rows {params.shard_rows} --held-out-every {params.held_out_every} "
        "--target {params.target:q} --draft-vocab-size {wildcards.draft_vocab_size} --output {output.mapping:q}"
