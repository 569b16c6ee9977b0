# Acceptance: from the hidden states of held-out rows, and in real decoding of the prompt sets, beside baselines.


rule evaluate:
    input:
        **PLAN.response_files.all_inputs("rows"),
        manifest=f"{RUN}/hidden_states/data_config.json",
        trained=f"{RUN}/drafters/{{drafter}}/best/model.safetensors",
        untrained=f"{RUN}/drafters/{{drafter}}/epoch_0/model.safetensors",
        prompt_sets=PLAN.evaluation_files,
        # What a server loads, where one decodes.
        export=lambda wildcards: PLAN.evaluation_export(wildcards.drafter),
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
        **allocation(CONFIG.evaluation),
        sglang=PLAN.evaluation_options,
        server=lambda wildcards: PLAN.evaluation_server(wildcards.drafter, drafting=True),
        plain_server=lambda wildcards: PLAN.evaluation_server(wildcards.drafter, drafting=False),
    params:
        version=PLAN.versions["evaluation"],
        rows=PLAN.rows,
        shard_rows=CONFIG.data.shard_rows,
        # A function: braces in it are not wildcards.
        settings=lambda wildcards: PLAN.evaluation_settings,
        target=TARGET,
    shell:
        'python "$EYAS_SCRIPTS"/evaluate_drafter.py --log {log:q} --label {wildcards.drafter}/evaluation '
        f"--threads {{threads}} --gpu {{resources.{GRANTED}}} --gpu-wanted {{resources.gpu_wanted}} "
        "--manifest {input.manifest:q} --rows {params.rows} --shard-rows {params.shard_rows} "
        "--trained {input.trained:q} --untrained {input.untrained:q} --target {params.target:q} "
        "--settings {params.settings:q} --sglang {resources.sglang:q} --server {resources.server:q} "
        "--plain-server {resources.plain_server:q} --output {output:q}"
