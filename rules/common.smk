# Paths, shard lists and what jobs ask for, nothing else.

from eyas.plan.export import SERVERS

CONFIG = PLAN.config
RUN = PLAN.run_folder
SHARDS = PLAN.shard_names
TARGET = PLAN.target_json  # the target as it computes
SOURCE = PLAN.source_json  # the target as it lies on disk

# Resources besides `gpu`: `gpu_wanted` is what was asked for (Snakemake cuts `gpu` to its pool in
# silence; the job compares), `batch_…` are speeds. Unlike params they re-run nothing.


def epoch_files(epoch):
    folder = f"{RUN}/drafters/{{drafter}}/epoch_{epoch}"
    return {
        "model": f"{folder}/model.safetensors",
        "config": f"{folder}/config.json",
        "state": f"{folder}/trainer_state.safetensors",
        "facts": f"{folder}/trainer_state.json",
    }


def previous_epoch(wildcards):
    files = epoch_files(int(wildcards.epoch) - 1)
    return [path.format(drafter=wildcards.drafter) for path in files.values()]


def all_epochs(wildcards):
    last = CONFIG.drafters[wildcards.drafter].training.epochs
    folder = f"{RUN}/drafters/{wildcards.drafter}"
    names = ("model.safetensors", "config.json", "trainer_state.json")
    return [f"{folder}/epoch_{epoch}/{name}" for epoch in range(last + 1) for name in names]


def last_epoch_facts(wildcards):
    last = CONFIG.drafters[wildcards.drafter].training.epochs
    return epoch_files(last)["facts"].format(drafter=wildcards.drafter)


def initial_files(wildcards):
    return PLAN.initial_files(wildcards.drafter)


def training_option(name, none=None):
    """A function of the wildcards: how a drafter is trained, which re-runs nothing. `none` stands for null."""

    def option(wildcards):
        value = getattr(CONFIG.drafters[wildcards.drafter].training, name)
        return none if value is None else value if isinstance(value, str) else int(value)

    return option


# How SLURM is asked for GPUs: `--gpus=8`, or, on sites that take only `--gres`, EYAS_SLURM_GRES=gpu (or gpu:h200).
GRES = os.environ.get("EYAS_SLURM_GRES")
GRANTED = "gpu_wanted" if GRES else "gpu"  # the resource that says how many GPUs a job was given


def allocation(settings):
    """What a job asks for: GPUs, nodes, memory and time, the last two more at each try.

    `settings` is a section of the configuration, or a function of the wildcards that finds it.
    """

    def resource(value):
        return (lambda wildcards: value(settings(wildcards))) if callable(settings) else value(settings)

    def at_attempt(value):
        return lambda wildcards, attempt: value(settings(wildcards) if callable(settings) else settings, attempt)

    asked = {
        "gpu": 0 if GRES else resource(lambda section: section.gpu),
        "gpu_wanted": resource(lambda section: section.gpu),
        "mem_mb": at_attempt(lambda section, attempt: section.memory_mb(attempt)),
        "runtime": at_attempt(lambda section, attempt: section.minutes(attempt)),
    }
    if GRES:
        asked["gres"] = resource(lambda section: f"{GRES}:{section.gpu}" if section.gpu else None)
    return asked


def over_nodes(settings):
    """What a job over several machines asks for besides: the words by which the SLURM executor knows them."""

    def where_many(value):
        return lambda wildcards: value(settings(wildcards)) if settings(wildcards).nodes > 1 else None

    def gres(wildcards):  # of each machine; GPUs counted for the whole job could be spread unevenly
        section = settings(wildcards)
        each = section.gpu // section.nodes
        return f"{GRES or 'gpu'}:{each}" if each and (GRES or section.nodes > 1) else None

    return {
        "nodes": lambda wildcards: settings(wildcards).nodes,
        "tasks": where_many(lambda section: section.nodes),
        "tasks_per_gpu": where_many(lambda section: 0),
        "mpi": where_many(lambda section: "srun"),
        "gres": gres,
    }


def training(wildcards):
    return CONFIG.drafters[wildcards.drafter].training


def vocabulary_of(wildcards):
    return f"{RUN}/vocab_map/{CONFIG.drafters[wildcards.drafter].draft_vocab_size}.safetensors"


wildcard_constraints:
    shard=r"rows_\d+-\d+",
    drafter="|".join(map(re.escape, CONFIG.drafters)),
    draft_vocab_size=r"\d+",
    epoch=r"[1-9]\d*",
    server="|".join(SERVERS),
    packaged="|".join(map(re.escape, CONFIG.packages)) or r"(?!)",
