# The DAG of a run with one drafter and no packaged files, in plain Snakemake: the same rules, jobs and files, none of
# Eyas's code. config: shards, shard_rows, jobs (ranges of shards), run, target, epochs, vocabulary.

RUN, TARGET = config["run"], config["target"]
COUNT, SIZE = config["shards"], config["shard_rows"]
RANGES = [f"rows_{a * SIZE}-{min(a + config['step'], COUNT) * SIZE}" for a in range(0, COUNT, config["step"])]
DRAFTER = f"{RUN}/drafters/{{drafter}}"
ONE = f"{RUN}/drafters/eagle3"
EPOCH = ("model.safetensors", "config.json", "trainer_state.safetensors", "trainer_state.json")
VOCABULARY = f"{RUN}/vocab_map/{config['vocabulary']}"


def records(stage):
    return [f"{RUN}/{stage}/ranges/{rows}.json" for rows in RANGES]


wildcard_constraints:
    drafter="eagle3",
    draft_vocab_size=r"\d+",
    epoch=r"[1-9]\d*",
    server="sglang|vllm",


localrules:
    all,


rule all:
    default_target: True
    input:
        TARGET,
        records("conversations"),
        records("tokens"),
        records("hidden_states"),
        f"{RUN}/hidden_states/data_config.json",
        [f"{ONE}/epoch_{n}/model.safetensors" for n in range(config["epochs"] + 1)],
        f"{ONE}/evaluation.json",
        [
            f"{ONE}/export/{server}/{name}"
            for server in ("sglang", "vllm")
            for name in ("config.json", "export.json", "README.md", "provenance.json", "model.safetensors")
        ],
        f"{RUN}/tokens/statistics.json",
        f"{RUN}/summary.txt",
        f"{RUN}/report.html",


rule number_prompts:
    input:
        "prompts.jsonl",
    output:
        f"{RUN}/prompts/index.json",
        f"{RUN}/prompts/skipped.jsonl",
    log:
        f"{RUN}/logs/prompts.log",
    benchmark:
        f"{RUN}/benchmarks/prompts.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {input} {output}"


for ROWS in RANGES:

    rule:
        name:
            f"respond_{ROWS}"
        input:
            f"{RUN}/prompts/index.json",
            ancient(TARGET),
        output:
            f"{RUN}/conversations/ranges/{ROWS}.json",
        log:
            f"{RUN}/logs/responses/{ROWS}.log",
        benchmark:
            f"{RUN}/benchmarks/responses/{ROWS}.tsv"
        conda:
            "../workflow/envs/eyas.yaml"
        threads: 1
        resources:
            gpu=0,
        params:
            version=1,
            target="target",
        shell:
            "work {params.target} {input} {output}"

    rule:
        name:
            f"tokenize_{ROWS}"
        input:
            f"{RUN}/conversations/ranges/{ROWS}.json",
            ancient(TARGET),
        output:
            f"{RUN}/tokens/ranges/{ROWS}.json",
        log:
            f"{RUN}/logs/tokens/{ROWS}.log",
        benchmark:
            f"{RUN}/benchmarks/tokens/{ROWS}.tsv"
        conda:
            "../workflow/envs/eyas.yaml"
        params:
            version=1,
            target="target",
        shell:
            "work {params.target} {input} {output}"

    rule:
        name:
            f"extract_{ROWS}"
        input:
            f"{RUN}/tokens/ranges/{ROWS}.json",
            ancient(f"{RUN}/tokens/totals.json"),
            ancient(TARGET),
        output:
            f"{RUN}/hidden_states/ranges/{ROWS}.json",
        log:
            f"{RUN}/logs/hidden_states/{ROWS}.log",
        benchmark:
            f"{RUN}/benchmarks/hidden_states/{ROWS}.tsv"
        conda:
            "../workflow/envs/eyas.yaml"
        threads: 1
        resources:
            gpu=0,
        params:
            version=1,
            target="target",
        shell:
            "work {params.target} {input} {output}"


rule count_tokens:
    input:
        records("tokens"),
    output:
        f"{RUN}/tokens/totals.json",
    log:
        f"{RUN}/logs/totals.log",
    benchmark:
        f"{RUN}/benchmarks/totals.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule describe_tokens:
    input:
        records("tokens"),
        ancient(TARGET),
    output:
        f"{RUN}/tokens/statistics.json",
    log:
        f"{RUN}/logs/statistics.log",
    benchmark:
        f"{RUN}/benchmarks/statistics.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule map_vocabulary:
    input:
        records("tokens"),
        ancient(TARGET),
    output:
        f"{RUN}/vocab_map/{{draft_vocab_size}}.safetensors",
        f"{RUN}/vocab_map/{{draft_vocab_size}}.json",
    log:
        f"{RUN}/logs/vocab_map/{{draft_vocab_size}}.log",
    benchmark:
        f"{RUN}/benchmarks/vocab_map/{{draft_vocab_size}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule write_manifest:
    input:
        records("hidden_states"),
    output:
        f"{RUN}/hidden_states/data_config.json",
    log:
        f"{RUN}/logs/manifest.log",
    benchmark:
        f"{RUN}/benchmarks/manifest.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule initialise_drafter:
    input:
        f"{RUN}/hidden_states/data_config.json",
        f"{VOCABULARY}.safetensors",
        ancient(TARGET),
    output:
        [f"{DRAFTER}/epoch_0/{name}" for name in EPOCH],
    log:
        f"{RUN}/logs/{{drafter}}/epoch_0.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/epoch_0.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule train_epoch:
    input:
        f"{RUN}/hidden_states/data_config.json",
        lambda wildcards: [f"{ONE}/epoch_{int(wildcards.epoch) - 1}/{name}" for name in EPOCH],
        ancient(TARGET),
    output:
        [f"{DRAFTER}/epoch_{{epoch}}/{name}" for name in EPOCH],
        f"{DRAFTER}/epoch_{{epoch}}/metrics.jsonl",
    log:
        f"{RUN}/logs/{{drafter}}/epoch_{{epoch}}.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/epoch_{{epoch}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule select_best:
    input:
        [
            f"{ONE}/epoch_{n}/{name}"
            for n in range(config["epochs"] + 1)
            for name in ("model.safetensors", "config.json", "trainer_state.json")
        ],
    output:
        [f"{DRAFTER}/best/{name}" for name in ("model.safetensors", "config.json", "selection.json")],
    log:
        f"{RUN}/logs/{{drafter}}/best.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/best.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule evaluate:
    input:
        f"{RUN}/hidden_states/data_config.json",
        records("conversations"),
        f"{DRAFTER}/best/model.safetensors",
        f"{DRAFTER}/epoch_0/model.safetensors",
        ancient(TARGET),
    output:
        f"{DRAFTER}/evaluation.json",
    log:
        f"{RUN}/logs/{{drafter}}/evaluation.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/evaluation.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule export_drafter:
    input:
        f"{DRAFTER}/best/model.safetensors",
        f"{DRAFTER}/best/config.json",
        ancient(TARGET),
    output:
        [f"{DRAFTER}/export/{{server}}/{name}" for name in ("model.safetensors", "config.json", "export.json")],
    log:
        f"{RUN}/logs/{{drafter}}/export_{{server}}.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/export_{{server}}.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule export_cards:
    input:
        [f"{DRAFTER}/export/{server}/export.json" for server in ("sglang", "vllm")],
        f"{RUN}/hidden_states/data_config.json",
        f"{RUN}/tokens/statistics.json",
        f"{VOCABULARY}.json",
        f"{DRAFTER}/best/selection.json",
        f"{DRAFTER}/epoch_{config['epochs']}/trainer_state.json",
        f"{DRAFTER}/evaluation.json",
        ancient(TARGET),
    output:
        [
            f"{DRAFTER}/export/{server}/{name}"
            for server in ("sglang", "vllm")
            for name in ("README.md", "provenance.json")
        ],
    log:
        f"{RUN}/logs/{{drafter}}/export_cards.log",
    benchmark:
        f"{RUN}/benchmarks/{{drafter}}/export_cards.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule summarise:
    input:
        f"{RUN}/hidden_states/data_config.json",
        f"{VOCABULARY}.json",
        f"{ONE}/evaluation.json",
        [f"{ONE}/export/{server}/{name}" for server in ("sglang", "vllm") for name in ("export.json", "README.md")],
    output:
        f"{RUN}/summary.txt",
        f"{RUN}/summary.json",
    log:
        f"{RUN}/logs/summary.log",
    benchmark:
        f"{RUN}/benchmarks/summary.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"


rule write_report:
    input:
        f"{RUN}/tokens/statistics.json",
        f"{VOCABULARY}.json",
        f"{RUN}/hidden_states/data_config.json",
        records("hidden_states"),
        f"{ONE}/epoch_{config['epochs']}/trainer_state.json",
        [f"{ONE}/epoch_{n}/metrics.jsonl" for n in range(1, config["epochs"] + 1)],
        f"{ONE}/best/selection.json",
        f"{ONE}/evaluation.json",
        [f"{ONE}/export/{server}/{name}" for server in ("sglang", "vllm") for name in ("export.json", "provenance.json")],
    output:
        f"{RUN}/report.html",
    log:
        f"{RUN}/logs/report.log",
    benchmark:
        f"{RUN}/benchmarks/report.tsv"
    conda:
        "../workflow/envs/eyas.yaml"
    shell:
        "work {output}"
