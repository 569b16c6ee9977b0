# Paths and shard lists, nothing else.

CONFIG = PLAN.config
RUN = PLAN.run_folder
SHARDS = PLAN.shard_names
TARGET = PLAN.target_json  # the target as it computes
SOURCE = PLAN.source_json  # the target as it lies on disk

# Rules say `python`: the one that runs Snakemake, with the package of this checkout.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(workflow.basedir) / "workflow"), os.environ.get("PYTHONPATH", "")])
)
os.environ["EYAS_SCRIPTS"] = str(Path(workflow.basedir) / "workflow" / "scripts")

# Resources besides `gpu`: `gpu_wanted` is what was asked for (Snakemake cuts `gpu` to its pool in
# silence; the job compares), `batch_…` are speeds. Unlike params they re-run nothing.


wildcard_constraints:
    shard=r"rows_\d+-\d+",
    drafter="|".join(map(re.escape, CONFIG.drafters)),
    draft_vocab_size=r"\d+",
    epoch=r"[1-9]\d*",
    packaged="|".join(map(re.escape, CONFIG.packages)) or r"(?!)",
