# The drafter: epoch 0 is the initial one, epoch n is trained from epoch n - 1; the best one by the held-out rows.


rule initialise_drafter:
    input:
        manifest=f"{RUN}/hidden_states/data_config.json",
        vocabulary=vocabulary_of,
        target=ancient(PLAN.target_files),
        start=initial_files,
    output:
        **epoch_files(0),
    log:
        f"{RUN}/logs/{{drafter}}/epoch_0.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/epoch_0.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["drafter"],
        settings=lambda wildcards: PLAN.model_settings(wildcards.drafter),
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/initialise_drafter.py --log {log:q} --label {wildcards.drafter}/epoch_0 '
        "--manifest {input.manifest:q} --vocabulary {input.vocabulary:q} --target {params.target:q} "
        "--settings {params.settings:q} --output {output.facts:q}"


rule train_epoch:
    input:
        manifest=f"{RUN}/hidden_states/data_config.json",
        previous=previous_epoch,
        target=ancient(PLAN.target_files),
    output:
        **epoch_files("{epoch}"),
        metrics=f"{RUN}/drafters/{{drafter}}/epoch_{{epoch}}/metrics.jsonl",
    log:
        f"{RUN}/logs/{{drafter}}/epoch_{{epoch}}.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/epoch_{{epoch}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    threads: training_option("threads")
    resources:
        **(allocation(training) | over_nodes(training)),
        processes=training_option("world_size"),
        parallel=training_option("parallel"),
        micro_tokens=training_option("micro_tokens"),
        checkpoint_seconds=training_option("checkpoint_seconds"),
        early_stop=training_option("early_stop", 0),
        compile=training_option("compile"),
        tensorboard=training_option("tensorboard"),
    params:
        version=PLAN.versions["training"],
        settings=lambda wildcards: PLAN.training_settings(wildcards.drafter),
        expected=PLAN.expected_json,
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/train_epoch.py --log {log:q} --label {wildcards.drafter}/epoch_{wildcards.epoch} '
        f"--threads {{threads}} --gpu {{resources.{GRANTED}}} --gpu-wanted {{resources.gpu_wanted}} "
        "--processes {resources.processes} --nodes {resources.nodes} --parallel {resources.parallel} --micro-tokens {resources.micro_tokens} "
        "--checkpoint-seconds {resources.checkpoint_seconds} --early-stop {resources.early_stop} "
        "--compile {resources.compile} --tensorboard {resources.tensorboard} --manifest {input.manifest:q} "
        "--target {params.target:q} --settings {params.settings:q} --expected {params.expected:q} "
        "--epoch {wildcards.epoch} --output {output.facts:q}"


rule select_best:
    input:
        epochs=all_epochs,
    output:
        model=f"{RUN}/drafters/{{drafter}}/best/model.safetensors",
        config=f"{RUN}/drafters/{{drafter}}/best/config.json",
        selection=report(
            f"{RUN}/drafters/{{drafter}}/best/selection.json",
            caption="../workflow/report/selection.rst",
            category="Drafters",
            labels={"file": "epochs on held-out rows", "drafter": "{drafter}"},
        ),
    log:
        f"{RUN}/logs/{{drafter}}/best.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/best.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["selection"],
        last=lambda wildcards: CONFIG.drafters[wildcards.drafter].training.epochs,
    shell:
        'python "$EYAS_SCRIPTS"/select_best.py --log {log:q} --label {wildcards.drafter}/best '
        "--last-epoch {params.last} --output {output.selection:q}"
