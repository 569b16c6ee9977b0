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
        settings=PLAN.token_settings,
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/tokenize_conversations.py --log {log:q} --label tokens/{wildcards.shard} '
        "--conversations {input.conversations:q} --target {params.target:q} --settings {params.settings:q} "
        "--output {output.tokens:q}"
