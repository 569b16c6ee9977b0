# The drafter: epoch 0 is the initial one, epoch n is trained from epoch n - 1.


rule initialise_drafter:
    input:
        manifest=f"{RUN}/hidden_states/data_config.json",
        vocabulary=vocabulary_of,
        target=ancient(PLAN.target_files),
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
    log:
        f"{RUN}/logs/{{drafter}}/epoch_{{epoch}}.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/epoch_{{epoch}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    threads: lambda wildcards: CONFIG.drafters[wildcards.drafter].training.threads
    resources:
        gpu=lambda wildcards: CONFIG.drafters[wildcards.drafter].training.gpu,
        gpu_wanted=lambda wildcards: CONFIG.drafters[wildcards.drafter].training.gpu,
    params:
        version=PLAN.versions["training"],
        settings=lambda wildcards: PLAN.training_settings(wildcards.drafter),
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/train_epoch.py --log {log:q} --label {wildcards.drafter}/epoch_{wildcards.epoch} '
        "--threads {threads} --gpu {resources.gpu} --gpu-wanted {resources.gpu_wanted} --manifest {input.manifest:q} "
        "--target {params.target:q} --settings {params.settings:q} "
        "--epoch {wildcards.epoch} --output {output.facts:q}"
