"""The job's configuration tree: every key, its default and its constraints.

A tree is frozen and resolved: paths are absolute, `model.vocab_size` is the tokenizer's, `mirror` belongs to `storage`.
`rayjob/config_file.py` makes one from defaults < YAML < KEY=VALUE.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from model.config import ModelConfig
from rayjob.store.address import address_problems

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_USUAL_MICRO_BATCH = 32  # windows


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one sentence a line."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        # The default would rebuild the error from its message, and it must survive Ray's process boundaries.
        return ConfigError, (self.problems,)


@dataclass(frozen=True, slots=True)
class DataConfig:
    source: Literal["demo", "text", "parquet", "huggingface"] = "demo"
    paths: tuple[str, ...] = ()  # files, folders, globs; empty for `demo` and `huggingface`
    text_column: str = "text"
    doc_column: str | None = None  # None: a file of rows has no known document boundary
    revision: str | None = None  # of the Hugging Face data set; None: the newest, pinned at the first download
    detokenize: bool = False  # Penn Treebank style (BookCorpus) -> plain text
    lowercase: bool = False
    dedup: bool = True
    val_fraction: float = 0.005

    def problems(self) -> list[str]:
        found = []
        if self.source in ("text", "parquet") and not self.paths:
            found.append(f"data.paths is empty: data.source={self.source} needs files, folders or globs.")
        if self.source in ("demo", "huggingface") and self.paths:
            found.append(f"data.paths has no effect with data.source={self.source}: remove it.")
        if not 0 < self.val_fraction <= 0.5:
            found.append(f"data.val_fraction={self.val_fraction} must be in (0, 0.5]; 0.005 is usual.")
        return found


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    vocab_size: int = 50_304  # 393 x 128: matrix products are fastest at multiples of 16
    model_type: Literal["bpe", "unigram"] = "bpe"

    def problems(self) -> list[str]:
        if 300 <= self.vocab_size <= 65_536:
            return []
        return [
            f"tokenizer.vocab_size={self.vocab_size} must be in [300, 65536]: "
            "256 byte pieces and the control pieces need room, and tokens are stored as uint16."
        ]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    num_workers: int | tuple[int, int] = 4  # [min, max]: as many as there is room for
    use_gpu: bool = True
    global_batch_size: int = 384  # windows per optimizer step over all workers
    micro_batch_size: Literal["auto"] | int = 32  # windows per worker per forward; auto: measured before step 1
    epochs: int = 3
    max_steps: int | None = None  # replaces `epochs` when set
    precision: Literal["bf16", "fp32"] = "bf16"
    compile: bool | None = None  # torch.compile; None: on GPUs, where it pays
    allreduce_dtype: Literal["fp32", "bf16"] = "fp32"  # of the gradients between workers; bf16 halves the bytes
    eval_interval: int = 500  # steps; the last step is always evaluated
    grad_clip: float = 1.0
    step_timeout_s: float = 120.0  # a collective that takes longer is a hung worker
    preflight: bool = True  # check link, step, storage and space before each start of training

    @property
    def is_compiled(self) -> bool:
        return self.use_gpu if self.compile is None else self.compile

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one parameter's gradient on its way between workers."""
        return 2 if self.allreduce_dtype == "bf16" else 4

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def micro_batch_sizes(self) -> list[int]:
        """The sizes, ascending, of which every worker gets equally many in a step of the greatest number of workers."""
        share = self.global_batch_size // self.max_workers
        return [size for size in range(1, share + 1) if share % size == 0]

    @property
    def assumed_micro_batch_size(self) -> int:
        """The configured size; of `auto`, while no worker has measured, the largest one up to the usual 32."""
        if isinstance(self.micro_batch_size, int):
            return self.micro_batch_size
        return max(size for size in self.micro_batch_sizes if size <= _USUAL_MICRO_BATCH)

    @property
    def grad_accum_steps(self) -> int:
        """Micro-steps per optimizer step of all workers: its micro-batches dealt to them, rounded up."""
        return math.ceil(self.global_batch_size / (self.assumed_micro_batch_size * self.max_workers))

    def problems(self) -> list[str]:
        found = [
            f"train.{name}={value} must be at least 1."
            for name in (
                "global_batch_size",
                "micro_batch_size",
                "epochs",
                "max_steps",
                "eval_interval",
            )
            if (value := getattr(self, name)) not in (None, "auto") and value < 1
        ]
        if not 1 <= self.min_workers <= self.max_workers:
            given = self.num_workers if isinstance(self.num_workers, int) else list(self.num_workers)
            found.append(f"train.num_workers={given} must be at least 1, or [min, max] with 1 <= min <= max.")
        if not found:
            found += self._batch_problems()
        if not self.grad_clip > 0:
            found.append(f"train.grad_clip={self.grad_clip} must be above 0; 1.0 is usual.")
        if not self.step_timeout_s >= 1:
            found.append(f"train.step_timeout_s={self.step_timeout_s} must be at least 1 second.")
        return found

    def _batch_problems(self) -> list[str]:
        """Fewer workers than the greatest number are dealt hands that differ by a micro-batch at most."""
        size, workers = self.micro_batch_size, self.max_workers
        per_round = workers if size == "auto" else size * workers
        if self.global_batch_size % per_round == 0:
            return []
        lower = self.global_batch_size // per_round * per_round
        use = f"{lower} or {lower + per_round}" if lower else f"{per_round}"
        of = (
            f"num_workers ({workers})"
            if size == "auto"
            else f"micro_batch_size x num_workers ({size} x {workers} = {per_round})"
        )
        return [f"train.global_batch_size={self.global_batch_size} must be a multiple of {of}: use {use}."]


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    name: Literal["adamw", "muon"] = "adamw"  # muon: the matrices of the layers; embedding and norms stay with AdamW
    lr: float = 3e-4
    min_lr: float = 3e-5
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warm-up, stable, decay
    warmup_steps: int = 2_000
    decay_fraction: float = 0.2  # of the run's steps, at its end, in which wsd falls to min_lr
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.95  # of muon
    weight_decay: float = 0.1  # on matrices only

    def problems(self) -> list[str]:
        found = []
        if not 0 < self.lr < math.inf:
            found.append(f"optimizer.lr={self.lr} must be above 0; 3e-4 is usual.")
        if not 0 <= self.min_lr <= self.lr:
            found.append(f"optimizer.min_lr={self.min_lr} must be in [0, optimizer.lr={self.lr}].")
        if self.warmup_steps < 0:
            found.append(f"optimizer.warmup_steps={self.warmup_steps} must not be negative.")
        if not 0 < self.decay_fraction <= 1:
            found.append(f"optimizer.decay_fraction={self.decay_fraction} must be in (0, 1]; 0.2 is usual.")
        if not all(0 <= beta < 1 for beta in self.betas):
            found.append(f"optimizer.betas={list(self.betas)} must both be in [0, 1).")
        if not 0 <= self.momentum < 1:
            found.append(f"optimizer.momentum={self.momentum} must be in [0, 1); 0.95 is usual.")
        if not 0 <= self.weight_decay < math.inf:
            found.append(f"optimizer.weight_decay={self.weight_decay} must not be negative.")
        return found


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    interval_s: float | None = 180.0
    interval_steps: int | None = None
    keep: int = 2  # newest ones; the best by validation loss is kept beside them

    def problems(self) -> list[str]:
        found = []
        if self.interval_s is not None and not self.interval_s > 0:
            found.append(f"checkpoint.interval_s={self.interval_s} must be above 0, or null for none by time.")
        if self.interval_steps is not None and self.interval_steps < 1:
            found.append(f"checkpoint.interval_steps={self.interval_steps} must be at least 1, or null for none.")
        if self.keep < 1:
            found.append(f"checkpoint.keep={self.keep} must be at least 1: the run resumes from the newest.")
        return found


@dataclass(frozen=True, slots=True)
class FailureConfig:
    max_failures: int = 3  # worker groups lost to errors, without a checkpoint gained, before the job gives up
    max_preemptions: int = -1  # lost to announced preemptions; -1: no limit
    max_bad_steps: int = 5  # in a row, whose loss or gradient is not finite, end the run

    def problems(self) -> list[str]:
        found = [
            f"failure.{name}={value} must be -1 (no limit) or more."
            for name in ("max_failures", "max_preemptions")
            if (value := getattr(self, name)) < -1
        ]
        if self.max_bad_steps < 1:
            found.append(
                f"failure.max_bad_steps={self.max_bad_steps} must be at least 1; 1 ends at the first bad step."
            )
        return found


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    mlflow_uri: str | None = None  # None: the sqlite store in storage
    experiment: str = "pretraining"
    tensorboard: bool = True
    wandb: bool = True  # takes effect when WANDB_API_KEY is set


@dataclass(frozen=True, slots=True)
class CostConfig:
    gpu_usd_per_hour: float = 0.0  # per worker
    max_usd: float | None = None

    def problems(self) -> list[str]:
        found = []
        if not 0 <= self.gpu_usd_per_hour < math.inf:
            found.append(f"cost.gpu_usd_per_hour={self.gpu_usd_per_hour} must not be negative.")
        if self.max_usd is not None and not self.max_usd > 0:
            found.append(f"cost.max_usd={self.max_usd} must be above 0, or null for no limit.")
        if self.max_usd is not None and self.gpu_usd_per_hour == 0:
            found.append("cost.max_usd has no effect while cost.gpu_usd_per_hour is 0: set the price.")
        return found


@dataclass(frozen=True, slots=True)
class JobConfig:
    run_name: str = "run"
    storage: str = "storage"  # a folder, or s3://BUCKET/PREFIX
    mirror: str | None = None  # derived: the folder that stands for a `storage` in an object store, on every node
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=lambda: ModelConfig(vocab_size=TokenizerConfig().vocab_size))
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cost: CostConfig = field(default_factory=CostConfig)

    @property
    def storage_folder(self) -> Path:
        """Where everything is read and written; in a mirror, what is finished goes to the object store too."""
        return Path(self.mirror or self.storage)

    @property
    def runs_folder(self) -> Path:
        """Ray Train's `storage_path`; the run's own folder is `run_folder`."""
        return self.storage_folder / "runs"

    @property
    def run_folder(self) -> Path:
        return self.runs_folder / self.run_name

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.model.max_seq_len

    def problems(self) -> list[str]:
        """Every violated constraint, each a full sentence that names its key."""
        found = []
        if not RUN_NAME.fullmatch(self.run_name):
            found.append(
                f"run_name={self.run_name[:60]!r} must be 1 to 100 letters, digits, '.', '_' or '-', "
                "and begin with a letter or digit: it names a folder."
            )
        if "://" in self.storage:
            found += address_problems(self.storage)
        if not 0 <= self.seed < 2**63:
            found.append(f"seed={self.seed} must be in [0, 2^63).")
        sections = (self.data, self.tokenizer, self.model, self.train)
        sections += (self.optimizer, self.checkpoint, self.failure, self.cost)  # type: ignore[assignment]
        for section in sections:
            found += section.problems()
        return found
