"""What a run is: typed, validated dataclasses, one per config group of ``conf/``.

Hydra composes a DictConfig against these schemas; :func:`to_config` turns it into dataclasses and
:func:`resolve` fills in everything that depends on the world and the machine. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.clock import LAWS, STRAGGLER_SHARE, read_trace

LARGEST = 2**63  # of any number in a config
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
OBJECTIVES = (
    "final_loss", "eval_loss", "tokens_per_s", "tokens_per_s_per_rank", "samples_per_s", "step_time_s_median",
    "step_time_s_p90", "mfu", "hfu", "tflops_per_rank", "peak_memory_bytes", "comm_traffic_bytes", "wall_s",
    "sim_time_s",
)  # fmt: skip


class ConfigError(ValueError):
    """A user's mistake, told in one line, whatever the value holds: key, value, limit, remedy."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def one_line(error: BaseException, length: int = 200) -> str:
    """An error of somebody else's in one line: its kind and the start of what it says."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:length]


def check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: choose one of {', '.join(choices)}")


def check_at_least(key: str, value: float | None, limit: float) -> None:
    finite = isinstance(value, int) or value is None or math.isfinite(value)
    if value is not None and not (finite and limit <= value < LARGEST):
        raise ConfigError(f"{key}={str(value)[:40]}: must be a finite number of at least {limit}")


def check_study(name: str) -> str:
    if not name or name.startswith(".") or any(character in name for character in "/\\\0\n"):
        raise ConfigError(f"study={name!r}: must be a plain folder name")
    return name


@dataclass
class ModelConfig:
    name: str = MISSING
    family: str | None = None  # a transformers model_type; the model is built from `config`, weights random
    config: dict[str, Any] = field(default_factory=dict)  # arguments of the family's transformers config
    path: str | None = None  # hub name or folder; the weights are pretrained
    dropout: float = 0.0  # every dropout probability of the model
    attention: str = "sdpa"  # attn_implementation of transformers
    compile: bool = False  # torch.compile of every transformer block
    kernels: str = "none"  # `liger`: fused kernels for the loss, norms, rotary embedding and activation; GPU only
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.path is None and self.family is None:
            raise ConfigError("model.path: model=hub needs model.path=NAME_OR_FOLDER")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout={self.dropout}: must be in [0, 1)")
        check_choice("model.attention", self.attention, ("sdpa", "eager", "flash_attention_2", "flex_attention"))
        check_choice("model.kernels", self.kernels, ("none", "liger"))


def list_of_paths(key: str, value: Any) -> list[str] | None:
    paths = [value] if isinstance(value, str) else value
    if paths is not None and not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
        raise ConfigError(f"{key}={value}: must be a path or a list of paths")
    return paths


@dataclass
class DataConfig:
    kind: str = MISSING
    seq_len: int = 128  # tokens per sequence
    tokenizer: str | None = "bytes"  # `bytes`, or a Hugging Face tokenizer by hub name or folder
    pack: bool = True  # documents joined and cut into blocks; false: one document per sequence, padded
    ragged: bool = False  # synthetic only: lengths drawn from 2..seq_len
    path: Any = None  # file, folder, glob, or a list of them
    name: str | None = None
    config: str | None = None
    files: Any = None  # what data.name=json, parquet, … reads: file, folder, glob, or a list of them
    split: str = "train"
    eval_split: str | None = None  # its first eval_samples sequences are evaluated; null: eval_samples of data.split
    column: str = "text"
    prompt_column: str | None = None  # text put before that of data.column, read and never predicted
    # Read as a stream, never whole and in its own order, which no seed changes: shuffle it where it is stored.
    streaming: bool = False
    eval_samples: int = 64  # sequences held out for evaluation, never trained on
    cache_dir: str | None = None  # tokenised corpora; null: $XDG_CACHE_HOME/harness

    def __post_init__(self) -> None:
        check_choice("data.kind", self.kind, ("stdlib", "synthetic", "text", "hub"))
        check_at_least("data.seq_len", self.seq_len, 2)
        check_at_least("data.eval_samples", self.eval_samples, 0)
        if self.ragged and self.kind != "synthetic":
            raise ConfigError(f"data.ragged=true: only data=synthetic draws lengths, not data={self.kind}")
        self.path = list_of_paths("data.path", self.path)
        self.files = list_of_paths("data.files", self.files)
        if self.kind != "hub":
            for key in ("files", "eval_split", "prompt_column", "streaming"):
                if value := getattr(self, key):
                    raise ConfigError(f"data.{key}={value}: only data=hub has it, not data={self.kind}; drop it")
        if self.files is not None and self.name is None:
            raise ConfigError(f"data.files={self.files}: needs data.name=json, parquet, csv or text, which reads them")
        if self.prompt_column == self.column:
            raise ConfigError(f"data.prompt_column={self.column}: is data.column too; name the column before it")
        if self.eval_split == self.split:
            raise ConfigError(f"data.eval_split={self.split}: is data.split too; drop it to hold sequences out")
        if self.eval_split is not None and self.eval_samples == 0:
            raise ConfigError(f"data.eval_split={self.eval_split}: data.eval_samples=0 evaluates nothing; drop one")
        if self.kind == "text" and not self.path:
            raise ConfigError("data.path: data=text needs data.path=FILE_FOLDER_OR_GLOB")
        if self.kind == "hub" and (self.name is None) == (self.path is None):
            raise ConfigError("data=hub: needs either data.name=DATASET or data.path=SAVED_FOLDER")


@dataclass
class BatchConfig:
    kind: str = MISSING
    global_size: int | None = None  # sequences per update, all ranks
    per_rank_size: int | None = None  # sequences per update and rank
    micro_size: int | None = None  # sequences per forward pass and rank; null: no accumulation

    def __post_init__(self) -> None:
        check_choice("batch.kind", self.kind, ("strong", "weak"))
        for key in ("global_size", "per_rank_size", "micro_size"):
            check_at_least(f"batch.{key}", getattr(self, key), 1)


@dataclass
class EngineConfig:
    kind: str = MISSING
    bucket_mb: float | None = None  # gradient bucket in MiB; null: fitted to the model
    overlap: bool = True  # communicate gradients while the backward pass goes on
    reshard: bool = True  # fsdp: free a block's gathered parameters after its forward pass

    def __post_init__(self) -> None:
        check_choice("engine.kind", self.kind, ("deepspeed", "ddp", "fsdp"))
        if self.bucket_mb is not None and not (math.isfinite(self.bucket_mb) and self.bucket_mb > 0):
            raise ConfigError(f"engine.bucket_mb={self.bucket_mb}: must be a finite number above 0")
        if self.kind == "fsdp" and self.bucket_mb is not None:
            raise ConfigError(
                f"engine.bucket_mb={self.bucket_mb}: engine=fsdp exchanges gradients block by block; drop it"
            )
        if self.kind == "fsdp" and not self.overlap:
            raise ConfigError("engine.overlap=false: engine=fsdp always overlaps; drop it or use engine=ddp")
        if self.kind != "fsdp" and not self.reshard:
            raise ConfigError(f"engine.reshard=false: engine={self.kind} has no such choice; use engine=fsdp")


@dataclass
class ZeroConfig:
    """ZeRO stage and the DeepSpeed knobs that matter. Sizes are in elements; null is fitted to the model."""

    stage: int = MISSING
    offload_optimizer: bool = False
    offload_params: bool = False
    contiguous_gradients: bool = True
    multi_rank_allreduce: bool = True  # stages 1, 2: all-reduce gradients; false: reduce each to its owner
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    prefetch_bucket_size: int | None = None
    param_persistence_threshold: int | None = None  # stage 3 keeps smaller parameters on every rank
    whole_blocks: bool | None = None  # stage 3: gather a transformer block as one; null: with model.compile
    max_live_parameters: int | None = None
    max_reuse_distance: int | None = None
    sub_group_size: int = 1_000_000_000

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero.stage={self.stage}: choose one of 0, 1, 2, 3")
        for key in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"):
            check_at_least(f"zero.{key}", getattr(self, key), 1)
        for key in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
            check_at_least(f"zero.{key}", getattr(self, key), 0)
        if self.whole_blocks and self.stage != 3:
            raise ConfigError(f"zero.whole_blocks=true: needs zero.stage=3, not {self.stage}")
        if self.offload_optimizer and self.stage < 2:
            raise ConfigError(f"zero.offload_optimizer=true: needs zero.stage of 2 or 3, not {self.stage}")
        if self.offload_params and self.stage != 3:
            raise ConfigError(f"zero.offload_params=true: needs zero.stage=3, not {self.stage}")


@dataclass
class CheckpointingConfig:
    mode: str = MISSING
    every: int = 2  # selective: recompute every so many blocks
    part: str = "block"  # selective: `block`, or `attention` for the attention of every block
    reentrant: bool = False

    def __post_init__(self) -> None:
        check_choice("checkpointing.mode", self.mode, ("none", "full", "selective"))
        check_choice("checkpointing.part", self.part, ("block", "attention"))
        check_at_least("checkpointing.every", self.every, 1)


@dataclass
class ParallelConfig:
    """Logical workers of data parallelism, and the clock that says how long they compute."""

    kind: str = MISSING
    workers: int | None = None  # null: one per rank
    clock: str = "lognormal"
    clock_mean_s: float | None = None  # seconds per sequence of one worker; null: 1, or a trace's times as they are
    clock_cv: float = 0.1  # standard deviation / mean, of the clocks lognormal and stragglers
    speeds: list[float] = field(default_factory=list)  # relative speed per worker; empty: all alike
    trace: str | None = None  # CSV of measured seconds per sequence: one column, or one per worker

    def __post_init__(self) -> None:
        check_at_least("parallel.workers", self.workers, 1)
        check_choice("parallel.clock", self.clock, LAWS)
        if self.clock_mean_s is not None and not 0 < self.clock_mean_s < math.inf:
            raise ConfigError(f"parallel.clock_mean_s={self.clock_mean_s}: must be a finite number above 0")
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ConfigError(f"parallel.speeds={self.speeds}: must be finite numbers above 0")
        check_at_least("parallel.clock_cv", self.clock_cv, 0)
        limit = math.sqrt((1 - STRAGGLER_SHARE) / STRAGGLER_SHARE)
        if self.clock == "stragglers" and self.clock_cv >= limit:
            raise ConfigError(f"parallel.clock_cv={self.clock_cv}: must be below {limit:g} with clock=stragglers")
        if self.clock == "trace" and self.trace is None:
            raise ConfigError("parallel.trace: parallel.clock=trace needs parallel.trace=FILE.csv")
        if self.clock != "trace" and self.trace is not None:
            raise ConfigError(f"parallel.trace={self.trace}: needs parallel.clock=trace, not {self.clock}")
        self.check_workers()

    @property
    def computing_workers(self) -> int | None:
        """Workers that need a speed and a clock."""
        return self.workers

    def check_workers(self) -> None:
        workers = self.computing_workers
        if workers is not None and self.speeds and len(self.speeds) != workers:
            raise ConfigError(f"parallel.speeds={self.speeds}: needs one speed for each of {workers} workers, or none")
        if self.trace is None:
            return
        try:
            columns = read_trace(self.trace)
        except ValueError as error:
            raise ConfigError(f"parallel.trace={self.trace}: {error}") from error
        if workers is None:
            return
        if len(columns) not in (1, workers):
            raise ConfigError(
                f"parallel.trace={self.trace}: has {len(columns)} columns; needs 1, or one for each of {workers} workers"
            )
        if len(columns) == 1 and len(columns[0]) < workers:
            raise ConfigError(
                f"parallel.trace={self.trace}: has too few times, {len(columns[0])}; needs at least one for each of "
                f"{workers} workers"
            )


@dataclass
class SyncConfig(ParallelConfig):
    backup_workers: int = 0  # an update takes the first `workers` of `workers` + `backup_workers`

    def __post_init__(self) -> None:
        check_choice("parallel.kind", self.kind, ("sync",))
        check_at_least("parallel.backup_workers", self.backup_workers, 0)
        super().__post_init__()

    @property
    def computing_workers(self) -> int | None:
        return None if self.workers is None else self.workers + self.backup_workers


@dataclass
class AsyncConfig(ParallelConfig):
    remedy: str = "none"
    dc_lambda: float | None = None  # dc_asgd: strength of the correction; null: 0.04, or 2 if adaptive
    dc_adaptive: bool = False  # dc_asgd: divide by the root mean square of the gradients
    dc_decay: float = 0.95  # dc_asgd: of that mean square
    max_staleness: int | None = None  # gradients a worker may be ahead of the slowest; null: unbounded
    lr_mode: str = "per_update"  # match_sync: rate x gradients of the update
    gradients_per_update: int = 1  # averaged
    drain: str = "apply"  # what becomes of pending gradients at the end
    pending_device: str = "same"

    def __post_init__(self) -> None:
        check_choice("parallel.kind", self.kind, ("async",))
        check_choice("parallel.remedy", self.remedy, ("none", "lr_over_staleness", "dc_asgd"))
        check_at_least("parallel.dc_lambda", self.dc_lambda, 0)
        if not 0 <= self.dc_decay < 1:
            raise ConfigError(f"parallel.dc_decay={self.dc_decay}: must be in [0, 1)")
        check_at_least("parallel.max_staleness", self.max_staleness, 0)
        check_choice("parallel.lr_mode", self.lr_mode, ("per_update", "match_sync"))
        check_at_least("parallel.gradients_per_update", self.gradients_per_update, 1)
        check_choice("parallel.drain", self.drain, ("apply", "drop"))
        check_choice("parallel.pending_device", self.pending_device, ("same", "cpu"))
        super().__post_init__()
        if self.workers is not None and self.gradients_per_update > self.workers:
            raise ConfigError(
                f"parallel.gradients_per_update={self.gradients_per_update}: must be at most "
                f"parallel.workers={self.workers}"
            )


@dataclass
class OptimizerConfig:
    kind: str = MISSING
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # 0 = off

    def __post_init__(self) -> None:
        check_at_least("optimizer.weight_decay", self.weight_decay, 0)
        check_at_least("optimizer.clip_norm", self.clip_norm, 0)


@dataclass
class AdamWConfig(OptimizerConfig):
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("optimizer.kind", self.kind, ("adamw",))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas={self.betas}: must be two numbers in [0, 1)")
        check_at_least("optimizer.eps", self.eps, 0)


@dataclass
class SGDConfig(OptimizerConfig):
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("optimizer.kind", self.kind, ("sgd",))
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum={self.momentum}: must be in [0, 1)")


@dataclass
class LRConfig:
    base: float | None = None
    base_batch_size: int = 32  # sequences
    rule: str = "none"
    warmup_samples: int = 0
    schedule: str = "constant"
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("lr.base", self.base, 0)
        check_at_least("lr.base_batch_size", self.base_batch_size, 1)
        check_choice("lr.rule", self.rule, ("none", "linear", "sqrt"))
        check_at_least("lr.warmup_samples", self.warmup_samples, 0)
        check_choice("lr.schedule", self.schedule, ("constant", "linear", "cosine"))
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"lr.final_fraction={self.final_fraction}: must be in [0, 1]")


@dataclass
class TrainConfig:
    samples: int = 4800
    steps: int | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    resume: str = "auto"
    log_every: int = 10

    def __post_init__(self) -> None:
        for key in ("samples", "steps", "eval_every", "checkpoint_every", "keep", "log_every"):
            check_at_least(f"train.{key}", getattr(self, key), 1)


@dataclass
class LaunchConfig:
    world_size: int | None = None
    timeout_s: float | None = None
    rerun: str = "none"

    def __post_init__(self) -> None:
        check_choice("launch.rerun", self.rerun, ("none", "failed", "all"))
        check_at_least("launch.world_size", self.world_size, 1)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"launch.timeout_s={self.timeout_s}: must be above 0")


@dataclass
class PlanConfig:
    """What `python -m harness.plan` is asked; no run reads it."""

    device: str | None = None  # a name of harness.measure.devices; null: this machine
    tokens: float | None = None  # to train on, all ranks; null: 20 per parameter
    world_sizes: list[int] = field(default_factory=lambda: [1, 8, 64, 4096])
    efficiency: float = 0.5  # share of the device's peak that computation reaches, where nothing was measured
    bandwidth: float | None = None  # bytes/s of a collective's bus, where nothing was measured

    def __post_init__(self) -> None:
        check_at_least("plan.tokens", self.tokens, 1)
        check_at_least("plan.bandwidth", self.bandwidth, 1)
        if not self.world_sizes:
            raise ConfigError("plan.world_sizes=[]: name at least one")
        for size in self.world_sizes:
            check_at_least("plan.world_sizes", size, 1)
        if not 0 < self.efficiency <= 1:
            raise ConfigError(f"plan.efficiency={self.efficiency}: must be above 0 and at most 1")


@dataclass
class WandbConfig:
    mode: str = "auto"
    project: str = "harness"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("wandb.mode", self.mode, ("auto", "online", "offline", "disabled"))
        if not self.project or set(self.project) & set("/\\#?%:"):
            raise ConfigError(f"wandb.project={self.project}: must be a name without any of / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ConfigError(f"wandb.tags={self.tags}: a tag must have 1 to 64 characters")


@dataclass
class Config:
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    batch: BatchConfig = MISSING
    engine: EngineConfig = MISSING
    zero: ZeroConfig = MISSING
    checkpointing: CheckpointingConfig = MISSING
    parallel: ParallelConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    lr: LRConfig = field(default_factory=LRConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    study: str = "default"
    runs_dir: str = "runs"
    seed: int = 0
    precision: str = "auto"
    objective: str = "final_loss"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)
        check_at_least("seed", self.seed, 0)
        if self.precision == "fp16" and isinstance(self.parallel, AsyncConfig):
            raise ConfigError(
                "precision=fp16: a pending gradient would outlive its loss scale under parallel=async; "
                "use precision=bf16 or fp32"
            )
        check_study(self.study)
        check_choice("objective", self.objective, OBJECTIVES)


GROUPS: dict[str, dict[str, type]] = {
    "model": {"model": ModelConfig},
    "data": {"data": DataConfig},
    "batch": {"batch": BatchConfig},
    "engine": {"engine": EngineConfig},
    "zero": {"zero": ZeroConfig},
    "checkpointing": {"checkpointing": CheckpointingConfig},
    "parallel": {"sync": SyncConfig, "async": AsyncConfig},
    "optimizer": {"adamw": AdamWConfig, "sgd": SGDConfig},
}


@cache
def register_schemas() -> None:
    """Make the dataclasses known to Hydra; ``conf/GROUP/*.yaml`` name them in their defaults."""
    store = ConfigStore.instance()
    store.store("config_schema", Config)
    for group, schemas in GROUPS.items():
        for name, schema in schemas.items():
            store.store(f"{name}_schema", schema, group=group)


def to_config(composed: DictConfig) -> Config:
    """Dataclasses from what Hydra composed.

    Raises:
        ConfigError: in one line, for a missing or invalid value.
    """
    nodes = {f"{key!s}.": composed._get_node(key) for key in composed}
    for prefix, node in {"": composed, **nodes}.items():
        schema = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if isinstance(node, DictConfig) and is_dataclass(schema):
            for key in set(node) - {known.name for known in fields(schema)}:
                raise ConfigError(f"{prefix}{key}={node[key]}: no such key; see --cfg job for those there are")
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from error
    assert isinstance(config, Config)
    return config


def first_line(error: BaseException) -> str:
    """The message of OmegaConf or Hydra without its positions and types, which are not the user's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    message = lines[0] if lines else type(error).__name__
    return message if not key or key in message else f"{key}: {message}"


def dump(config: Config) -> str:
    """YAML of a config, for ``config.yaml`` and for the ranks."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def load(text: str) -> Config:
    """The inverse of :func:`dump`."""
    values = OmegaConf.create(text)
    assert isinstance(values, DictConfig)
    schema = OmegaConf.structured(Config)
    for group, schemas in GROUPS.items():
        kind = values[group].get("kind")
        schema[group] = OmegaConf.structured(schemas.get(kind) or next(iter(schemas.values())))
    merged = OmegaConf.merge(schema, values)
    assert isinstance(merged, DictConfig)
    return to_config(merged)


def resolve(config: Config, world_size: int, on_gpu: bool) -> Config:
    """A config in which every value is decided: precision, rate, world size and batch.

    Args:
        world_size: ranks of the run.
        on_gpu: whether the ranks compute on GPUs.

    Raises:
        ConfigError: for combinations that cannot run, naming both values.
    """
    precision = resolve_precision(config.precision, on_gpu)
    if config.model.kernels == "liger" and not on_gpu:
        raise ConfigError("model.kernels=liger: its kernels need a GPU; use model.kernels=none")
    if config.engine.kind != "deepspeed":
        check_native_engine(config)
    asked = config.launch.world_size
    if asked is not None and asked != world_size:
        raise ConfigError(
            f"launch.world_size={asked}: the launcher started {world_size} ranks; drop the key or start with "
            f"`python harness/main.py`"
        )
    batch = resolve_batch(config.batch, world_size)
    assert batch.global_size is not None
    if config.train.steps is None and config.train.samples < batch.global_size:
        raise ConfigError(
            f"train.samples={config.train.samples}: less than one update of {batch.global_size} sequences "
            f"(batch.global_size); raise the one or lower the other"
        )
    base = config.lr.base
    if base is None:
        base = {"adamw": 2e-3, "sgd": 0.1}[config.optimizer.kind]
    return replace(
        config,
        precision=precision,
        batch=batch,
        parallel=resolve_parallel(config.parallel, batch.global_size, world_size),
        lr=replace(config.lr, base=base),
        launch=replace(config.launch, world_size=world_size),
    )


def check_native_engine(config: Config) -> None:
    """Refuse what only DeepSpeed does, where PyTorch's own engines would ignore it."""
    engine = config.engine.kind
    remedy = f"only engine=deepspeed does, not engine={engine}; drop the key or use engine=deepspeed"
    for key in fields(ZeroConfig):
        value = getattr(config.zero, key.name)
        if value != (0 if key.name == "stage" else key.default):
            raise ConfigError(f"zero.{key.name}={value}: {remedy}")
    if config.deepspeed:
        key_name, value = next(iter(config.deepspeed.items()))
        raise ConfigError(f"deepspeed.{key_name}={value}: {remedy}")
    if config.precision == "fp16":
        raise ConfigError(f"precision=fp16: engine={engine} does not scale losses; use bf16, fp32 or engine=deepspeed")


def resolve_precision(precision: str, on_gpu: bool) -> str:
    """What ``precision=auto`` means here.

    Raises:
        ConfigError: fp16 on a CPU.
    """
    if precision == "fp16" and not on_gpu:
        raise ConfigError("precision=fp16: needs a GPU; on CPU use precision=fp32 or bf16")
    return ("bf16" if on_gpu else "fp32") if precision == "auto" else precision


def resolve_batch(batch: BatchConfig, world_size: int) -> BatchConfig:
    """All three sizes of a batch; global = micro x accumulation x ranks holds exactly.

    Raises:
        ConfigError: when a size does not divide, naming the nearest that do.
    """
    wanted, other = ("global_size", "per_rank_size") if batch.kind == "strong" else ("per_rank_size", "global_size")
    size = getattr(batch, wanted)
    if size is None:
        raise ConfigError(f"batch.{wanted}: batch={batch.kind} needs it")
    if getattr(batch, other) is not None:
        raise ConfigError(
            f"batch.{other}={getattr(batch, other)}: batch={batch.kind} is set by batch.{wanted}; "
            f"use batch={'weak' if batch.kind == 'strong' else 'strong'}"
        )
    if batch.kind == "strong" and size % world_size:
        raise ConfigError(
            f"batch.global_size={size}: not divisible by {world_size} ranks; nearest valid: "
            f"{nearest_multiples(size, world_size)}"
        )
    per_rank = size // world_size if batch.kind == "strong" else size
    micro = batch.micro_size or per_rank
    if per_rank % micro:
        divisors = {
            d
            for small in range(1, math.isqrt(per_rank) + 1)
            if per_rank % small == 0
            for d in (small, per_rank // small)
        }
        below = max(d for d in divisors if d < micro or d == 1)
        above = min((d for d in divisors if d > micro), default=per_rank)
        raise ConfigError(
            f"batch.micro_size={micro}: does not divide the {per_rank} sequences of a rank "
            f"(batch.{wanted}={size}, {world_size} ranks); nearest valid: {' or '.join(map(str, sorted({below, above})))}"
        )
    return replace(batch, global_size=per_rank * world_size, per_rank_size=per_rank, micro_size=micro)


def resolve_parallel(parallel: ParallelConfig, global_batch_size: int, world_size: int) -> ParallelConfig:
    """The workers of a run decided: one per rank unless told otherwise.

    Raises:
        ConfigError: when synchronous workers cannot share the global batch evenly.
    """
    resolved = replace(parallel, workers=parallel.workers or world_size)
    assert resolved.workers is not None
    if isinstance(resolved, SyncConfig) and global_batch_size % resolved.workers:
        raise ConfigError(
            f"parallel.workers={resolved.workers}: does not divide batch.global_size={global_batch_size}; "
            f"nearest valid size: {nearest_multiples(global_batch_size, resolved.workers)}"
        )
    return resolved


def nearest_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return " or ".join(str(v) for v in (below, below + divisor) if v > 0)


def grad_accum_steps(batch: BatchConfig) -> int:
    """Forward passes per rank and update, of a resolved batch."""
    assert batch.per_rank_size is not None and batch.micro_size is not None
    return batch.per_rank_size // batch.micro_size


def total_steps(config: Config) -> int:
    """Updates of a resolved run; a remainder of ``train.samples`` smaller than a batch is left out."""
    assert config.batch.global_size is not None
    return config.train.steps or config.train.samples // config.batch.global_size
