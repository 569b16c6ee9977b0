# The best epoch in the forms that SGLang and vLLM load, and the model cards beside them.


rule export_drafter:
    input:
        model=f"{RUN}/drafters/{{drafter}}/best/model.safetensors",
        config=f"{RUN}/drafters/{{drafter}}/best/config.json",
        target=ancient(PLAN.target_files),
    output:
        # None where the drafter is too large for one file: how many there are is known only then, export.json lists them.
        weights=[f"{RUN}/drafters/{{drafter}}/export/{{server}}/{name}" for name in PLAN.export_weights],
        config=f"{RUN}/drafters/{{drafter}}/export/{{server}}/config.json",
        facts=f"{RUN}/drafters/{{drafter}}/export/{{server}}/export.json",
    log:
        f"{RUN}/logs/{{drafter}}/export_{{server}}.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/export_{{server}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    resources:
        one_file=int(bool(PLAN.export_weights)),
    params:
        version=PLAN.versions["export"],
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/export_drafter.py --log {log:q} --label {wildcards.drafter}/export '
        "--model {input.model:q} --server {wildcards.server} --target {params.target:q} "
        "--one-file {resources.one_file} --output {output.facts:q}"


# Apart from the export, so that another evaluation writes cards and no tensors.
rule export_cards:
    input:
        exports=expand(f"{RUN}/drafters/{{{{drafter}}}}/export/{{server}}/export.json", server=SERVERS),
        manifest=f"{RUN}/hidden_states/data_config.json",
        statistics=f"{RUN}/tokens/statistics.json",
        vocabulary=lambda wildcards: vocabulary_of(wildcards).replace(".safetensors", ".json"),
        selection=f"{RUN}/drafters/{{drafter}}/best/selection.json",
        training=last_epoch_facts,
        evaluation=f"{RUN}/drafters/{{drafter}}/evaluation.json",
        target=ancient(PLAN.target_files),
    output:
        expand(
            f"{RUN}/drafters/{{{{drafter}}}}/export/{{server}}/{{name}}",
            server=SERVERS,
            name=("README.md", "provenance.json"),
        ),
    log:
        f"{RUN}/logs/{{drafter}}/export_cards.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/export_cards.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        version=PLAN.versions["card"],
        # A function: braces in it are not wildcards.
        settings=lambda wildcards: PLAN.card_settings(wildcards.drafter),
        target=SOURCE,
    shell:
        'python "$EYAS_SCRIPTS"/export_cards.py --log {log:q} --label {wildcards.drafter}/export '
        "--manifest {input.manifest:q} --drafter {wildcards.drafter} --target {params.target:q} "
        "--settings {params.settings:q}"
