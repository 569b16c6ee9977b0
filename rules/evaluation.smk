# Acceptance: from the hidden states of held-out rows, and in real decoding of the prompt sets, beside baselines.


rule evaluate:
    input:
        **PLAN.response_files.all_inputs("rows"),
        manifest=f"{RUN}/hidden_states/data_config.json",
        trained=f"{RUN}/drafters/{{drafter}}/best/model.safetensors",
        untrained=f"{RUN}/drafters/{{drafter}}/epoch_0/model.safetensors",
        prompt_sets=PLAN.evaluation_files,
        target=ancient(PLAN.target_files),
    output:
        report(
            f"{RUN}/drafters/{{drafter}}/evaluation.json",
            caption="../workflow/report/evaluation.rst",
            category="Drafters",
            labels={"file": "acceptance", "drafter": "{drafter}"},
        ),
    log:
        f"{RUN}/logs/{{drafter}}/evaluation.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/evaluation.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    threads: CONFIG.evaluation.threads
    resources:
        gpu=CONFIG.evaluation.gpu,
        gpu_wanted=CONFIG.evaluation.gpu,
    params:
        version=PLAN.versions["evaluation"],
        rows=PLAN.rows,
        shard_rows=CONFIG.data.shard_rows,
        # A function: braces in it are not wildcards.
        settings=lambda wildcards: PLAN.evaluation_settings,
        target=TARGET,
    shell:
        'python "$EYAS_SCRIPTS"/evaluate_drafter.py --log {log:q} --label {wildcards.drafter}/evaluation '
        "--threads {threads} --gpu {resources.gpu} --gpu-wanted {resources.gpu_wanted} "
        "--manifest {input.manifest:q} --rows {params.rows} --shard-rows {params.shard_rows} "
        "--trained {input.trained:q} --untrained {input.untrained:q} --target {params.target:q} "
        "--settings {params.settings:q} --output {output:q}"
