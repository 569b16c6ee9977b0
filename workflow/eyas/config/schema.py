"""The configuration of a run, typed. Unknown keys and wrong types are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from eyas.config.evaluation import Evaluation, PromptSet
from eyas.config.fields import Asked, Dtype, Name, Number, PromptFormat, StoredDtype, Strict, identity, runtime
from eyas.config.responses import Endpoint, EndpointOptions, Responses
from eyas.config.sglang import Sglang

__all__ = [
    "Config", "Drafter", "Endpoint", "EndpointOptions", "Evaluation", "PromptFiles", "PromptSet", "Responses",
    "Training", "identity",
]  # fmt: skip


class ExpectedSizes(Strict):
    """Sizes of the target, for checks before its folder exists; compared with its config.json."""

    vocab_size: int = Field(ge=2)
    """Entries of the target's vocabulary, as in its config.json."""
    num_hidden_layers: int = Field(ge=1)
    """Decoder layers of the target."""
    hidden_size: int = Field(ge=1)
    """Width of the target's hidden states."""


class Target(Strict):
    """The model that the drafter is to make faster."""

    path: str = Field(min_length=1)
    """A local transformers model folder, or the name of a model on a hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; null takes the default branch."""
    trust_remote_code: bool = False
    """Run code that the model folder carries. Only for models whose code you have read."""
    dtype: Dtype = "float32"
    """Computing precision of the target in-process. float32 on CPUs; bfloat16 on GPUs."""
    gguf: str | None = None
    """Build the folder `path` from this GGUF file, once (bfloat16 safetensors)."""
    expect: ExpectedSizes | None = None
    """The target's sizes, when its folder is not there yet as the Snakefile is parsed."""


class PackagedFile(Strict):
    """A file that a Python package on PyPI carries."""

    package: str = Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+$")
    """The package with its version, `name==1.2.3`."""
    archive: Literal["wheel", "sdist"] = "wheel"
    """Which archive of the package carries the file."""
    member: str = Field(min_length=1)
    """Path of the file inside the archive (without the sdist's top folder)."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum of the file; anything else is refused."""


class PromptFiles(Strict):
    """A prompt file, or several by a pattern."""

    path: str = Field(min_length=1)
    """A file (.jsonl, .json, .parquet; .jsonl and .json also as .gz or .zst), or a pattern of files
    (`data/*.jsonl`, `**` for all folders below)."""
    format: PromptFormat | None = None
    """What the records look like; null takes `data.format`."""
    source: str | None = Field(None, min_length=1)
    """Name of the data set in the statistics; null takes a record's own `source`, else the file's name."""


def _prompt_files(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class Data(Strict):
    """The prompts and how they are cut into rows and shards."""

    prompts: list[Annotated[PromptFiles, BeforeValidator(_prompt_files)]] = Field(min_length=1)
    """Prompt files, read one after the other; record i is row i. Each is a path or a pattern, or a
    mapping of `path`, `format` and `source`."""
    format: PromptFormat = "auto"
    """What the records look like: `messages` (OpenAI), `sharegpt` (`conversations`), `prompt` (`prompt`,
    `instruction` and `input`, `question`, or the first of `turns`), `text` (ready text, supervised from end
    to end). `auto` looks."""
    rows: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows to use. `auto` counts local files as the Snakefile is parsed."""
    shard_rows: int = Field(500, ge=1)
    """Rows in a shard: the unit of work, of files and of resuming."""
    shards_per_job: int | None = runtime(None, ge=1)
    """Shards that one job answers, tokenizes or extracts (`engine: transformers`). null takes 1, and with more than
    256 shards so many that there are 128 jobs: Snakemake plans hundreds of jobs in seconds, tens of thousands in
    minutes."""
    held_out_every: int = Field(20, ge=2)
    """Every n-th row is kept out of training and used to measure acceptance."""
    max_bad_rows: int = Field(0, ge=0)
    """Records that may be unusable (not JSON, no user turn, wrong roles) before the run stops."""
    duplicates: Literal["skip", "keep"] = "skip"
    """Records with the very content of an earlier one: record as skipped, or keep."""

    @field_validator("rows", mode="before")
    @classmethod
    def _number_or_auto(cls, rows: Any) -> Any:
        # pydantic would complain once for each branch of the union
        if rows != "auto" and (type(rows) is not int or rows < 1):
            raise ValueError("must be a whole number of at least 1, or auto")
        return rows


class Tokenization(Strict):
    """Chat template to token ids and loss mask."""

    max_length: int = Field(4096, ge=8)
    """Longest row, in tokens."""
    overlong: Literal["skip", "truncate"] = "skip"
    """Rows over max_length: record as skipped, or cut at a token boundary."""
    truncation_side: Literal["right", "left"] = "right"
    """Where `overlong: truncate` cuts: the end of the row, or its beginning."""
    train_on: Literal["all_turns", "last_turn"] = "all_turns"
    """Which answers of a conversation are supervised."""
    reasoning: Literal["train", "mask", "strip"] = "train"
    """The thinking of reasoning targets: supervise it (one row for each answer, where the template drops
    the thinking of earlier ones), leave it in without supervision, or take it out."""
    template_options: dict[str, Any] = {}
    """Variables for the chat template, as in `{enable_thinking: false}`; in-process answers are
    prompted with them too."""


class Extraction(Asked):
    """Hidden states of the target, shard by shard."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """What runs the target's prefill: this process, or an SGLang server with the capture plugin."""
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    """Three decoder layers (0-based, ascending) whose outputs the drafter reads.
    null takes [1, n//2 - 1, n - 4] for a target of n layers, and [0, n//2, n - 1] where these
    are not three different ones."""
    dtype: StoredDtype = "bfloat16"
    """Stored precision of the states. `fp8_e4m3` takes half the bytes of bfloat16: eight bits a value, and a
    float32 scale for each token and state."""
    batch_tokens: int = runtime(4096, ge=1)
    """Padded tokens in a prefill batch (`engine: transformers`)."""
    max_failed_rows: int = runtime(0, ge=0)
    """Rows of a shard that may have no states (refused by the server, NaN) before the shard fails. They are
    recorded with their reason and left out of training."""
    shards_per_job: int | None = runtime(None, ge=1)
    """Shards that one job makes, loading the target once; null takes `data.shards_per_job` for `transformers`, and
    for `sglang` all shards of a replica."""
    replicas: int = runtime(1, ge=1)
    """Servers side by side (`engine: sglang`): the shards are cut into so many jobs, each with `gpu` GPUs."""
    sglang: Sglang = Sglang()
    gpu: int = runtime(0, ge=0)
    """GPUs of a job (of each server, with `engine: sglang`)."""

    @property
    def estimated_gb(self) -> float:
        """With the states that wait in memory, which counts as the job's."""
        return super().estimated_gb + (self.sglang.dump_gb if self.engine == "sglang" else 0)

    @model_validator(mode="after")
    def _whose(self) -> Extraction:
        if self.engine == "transformers" and self.replicas > 1:
            raise ValueError("replicas is for engine: sglang; with transformers, jobs run side by side by themselves")
        if self.replicas > 1 and self.shards_per_job:
            raise ValueError("replicas and shards_per_job both say how the shards are cut into jobs; delete one")
        tp = self.sglang.tp
        if self.engine == "sglang" and tp and self.gpu and self.gpu % tp:
            raise ValueError(f"gpu {self.gpu} is no multiple of sglang.tp {tp}")
        return self

    @field_validator("layers")
    @classmethod
    def _three_ascending(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and (len(layers) != 3 or sorted(set(layers)) != layers):
            raise ValueError("must be three different layer ids in ascending order")
        return layers


class DrafterModel(Strict):
    """Shape of the drafter: one Llama decoder layer over [embedding ; fused states]."""

    init: Literal["target_layer", "random", "checkpoint"] = "target_layer"
    """Start from a decoder layer of the target and its head, from random weights, or from another
    drafter, `init_from` (the embedding is the target's whenever the widths agree)."""
    init_layer: int | None = Field(None, ge=0)
    """The target's layer that `init: target_layer` starts from; null takes the last one."""
    init_from: str | None = Field(None, min_length=1)
    """Folder of a drafter (config.json, model.safetensors) that `init: checkpoint` starts from: a
    checkpoint or an export of Eyas, or a published EAGLE-3 head with the same names."""
    hidden_size: int | None = Field(None, ge=2)
    """Width; null takes the target's."""
    intermediate_size: int | None = Field(None, ge=1)
    """Width of the MLP; null takes the target's."""
    num_attention_heads: int | None = Field(None, ge=1)
    """Attention heads; null takes the target's."""
    num_key_value_heads: int | None = Field(None, ge=1)
    """Key/value heads; null takes the target's."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head; null takes the target's."""
    norm_before_residual: bool = False
    """Add attention's output to the normed state, not to the state itself, as some published heads in speculators' form
    do: for starting from one. vLLM serves such drafters, SGLang does not."""

    @model_validator(mode="after")
    def _possible(self) -> DrafterModel:
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        if heads and kv and heads % kv:
            raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv}")
        if self.head_dim and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")
        for key, needed in (("init_layer", "target_layer"), ("init_from", "checkpoint")):
            if getattr(self, key) is not None and self.init != needed:
                raise ValueError(f"{key} is for init: {needed}, and init is {self.init}; delete it or change init")
        if self.init == "checkpoint" and self.init_from is None:
            raise ValueError("init: checkpoint needs init_from, the folder of the drafter to start from")
        return self


class Training(Asked):
    """The drafter's training."""

    epochs: int = Field(3, ge=1)
    """Passes over the training rows; one checkpoint each. Raising it trains only the rest."""
    ttt_steps: int = Field(7, ge=1, le=32)
    """Steps of training-time test: how far ahead the drafter learns to chain."""
    loss_decay: Number = Field(0.8, gt=0, le=1)
    """Weight of step i is loss_decay ** i."""
    learning_rate: Number = Field(4e-4, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Decay from the peak, over schedule_epochs. `wsd` (warm-up, stable, decay) stays at the peak
    and falls linearly in the last `decay_share` of them."""
    decay_share: Number = Field(0.2, gt=0, le=1)
    """Share of schedule_epochs in which `wsd` falls."""
    schedule_epochs: int = Field(3, ge=1)
    """Epochs after which the rate stays at its floor. Not tied to `epochs`, so that more
    epochs leave the finished ones as they are."""
    min_learning_rate_ratio: Number = Field(0.05, ge=0, le=1)
    """Floor of the schedule, as a share of the peak."""
    warmup_steps: int = Field(20, ge=0)
    """Optimizer steps of linear warm-up."""
    weight_decay: Number = Field(0.0, ge=0)
    """AdamW's decoupled weight decay (matrices only)."""
    beta1: Number = Field(0.9, ge=0, lt=1)
    """AdamW's first moment."""
    beta2: Number = Field(0.95, ge=0, lt=1)
    """AdamW's second moment."""
    grad_clip: Number = Field(1.0, gt=0)
    """Largest norm of the gradient."""
    batch_tokens: int = Field(2048, ge=1)
    """Tokens in an optimizer step, over all processes; rows are packed whole, a longer row goes alone."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the matrix products; masters, moments and the loss are float32. `auto` takes
    bfloat16 on GPUs and float32 on CPUs."""
    early_stop: int | None = runtime(None, ge=1)
    """Stop after so many epochs without a better acceptance length on the held-out rows; the
    epochs that are left repeat the last one trained. null trains them all. Finished epochs stay
    as they are when this is changed."""
    threads: int = runtime(2, ge=1)
    """CPU threads of the job on each machine, over its processes there."""
    gpu: int = runtime(0, ge=0)
    """GPUs of the job, over all its machines; one process each."""
    processes: int | None = runtime(None, ge=1)
    """Processes of the job, over all its machines. null is one for each GPU, or a single one on the CPU."""
    nodes: int = runtime(1, ge=1)
    """Machines of the job, which share its GPUs and processes evenly; more than one needs SLURM."""
    parallel: Literal["ddp", "fsdp2"] = runtime("ddp")
    """How several processes share the drafter: every one holds it whole, or each a part (PyTorch's
    FSDP2), for drafters that do not fit one GPU with their optimizer."""
    micro_tokens: int = runtime(8192, ge=1)
    """Tokens that a process takes through the drafter at once: what bounds its memory. A step
    with more is cut into several passes."""
    checkpoint_minutes: Number = runtime(10.0, ge=0)
    """Minutes between saves inside an epoch, from which a killed job goes on; 0 saves after every step."""
    compile: bool = runtime(False)
    """Compile the element-wise parts with torch.compile (needs a C++ compiler on a CPU)."""
    tensorboard: bool = runtime(False)
    """Write TensorBoard event files to the run's `logs/{drafter}/tensorboard` (needs the
    package tensorboard)."""

    @model_validator(mode="after")
    def _a_process_a_gpu(self) -> Training:
        if self.gpu and self.processes not in (None, self.gpu):
            raise ValueError(f"processes {self.processes} and gpu {self.gpu} disagree: a job has one process a GPU")
        for key, count in (("gpu", self.gpu), ("processes", self.world_size)):
            if count % self.nodes:
                raise ValueError(f"{key} {count} cannot be shared evenly by {self.nodes} nodes")
        return self

    @property
    def estimated_gb(self) -> float:
        """On one of the job's machines."""
        return 8 + 4 * self.threads + 16 * self.gpu // self.nodes

    @property
    def world_size(self) -> int:
        """Processes of a training job."""
        return self.processes or max(self.gpu, 1)

    @property
    def checkpoint_seconds(self) -> int:
        return round(60 * self.checkpoint_minutes)


class Drafter(Strict):
    """One drafter; several of them share the hidden states."""

    draft_vocab_size: int = Field(32000, ge=2)
    """Tokens that the drafter can propose."""
    model: DrafterModel = DrafterModel()
    training: Training = Training()


class Config(Strict):
    """Everything that a run depends on."""

    name: Name
    """The run: its files lie in `{results}/{name}/`."""
    results: str = Field("results", min_length=1)
    """Folder of all runs."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of sampling, initialisation and shuffling."""
    target: Target
    packages: dict[str, PackagedFile] = {}
    """Files to take from PyPI packages before anything else, by the place to put them."""
    data: Data
    responses: Responses = Responses()
    tokenization: Tokenization = Tokenization()
    extraction: Extraction = Extraction()
    drafters: dict[Name, Drafter] = Field(min_length=1)
    """The drafters to train, by name."""
    evaluation: Evaluation = Evaluation()
