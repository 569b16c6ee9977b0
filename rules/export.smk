# The best epoch in the form that SGLang loads.


rule export_sglang:
    input:
        model=f"{RUN}/drafters/{{drafter}}/best/model.safetensors",
        config=f"{RUN}/drafters/{{drafter}}/best/config.json",
        target=ancient(PLAN.target_files),
    output:
        model=f"{RUN}/drafters/{{drafter}}/export/sglang/model.safetensors",
        config=f"{RUN}/drafters/{{drafter}}/export/sglang/config.json",
        facts=f"{RUN}/drafters/{{drafter}}/export/sglang/export.json",
    log:
        f"{RUN}/logs/{{drafter}}/export_sglang.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/export_sglang.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["export"],
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/export_sglang.py --log {log:q} --label {wildcards.drafter}/export '
        "--model {input.model:q} --target {params.target:q} --output {output.facts:q}"
