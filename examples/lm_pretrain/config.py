"""Every choice of a run, and named model sizes; flags in, a frozen `Config` out."""

import dataclasses
import json
import shutil
import textwrap
import typing
from pathlib import Path
from typing import Any, Literal

Preset = Literal["1m", "10m", "100m", "1b", "8b", "gpt"]


class ConfigError(ValueError):
    """Flags that cannot be run."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network."""

    family: Literal["llama", "gpt"] = "llama"
    """`llama` is written in flax.nnx, `gpt` in flax.linen."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    """Heads of keys and values; `gpt` has as many as of queries."""
    mlp_width: int = 384
    context: int = 128
    """Tokens in one training window."""
    vocabulary: int = 256
    tied: bool = True
    """The head is the embedding; `gpt` always does this."""
    rope_base: float = 1e4
    dropout: float = 0.0
    """`gpt` only."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the blocks compute in; parameters are float32."""
    attention_block: int = 512
    """Queries that attend at a time, to bound the memory of their scores."""

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width {self.width} does not split into {self.heads} heads of even "
                "width; make --model.width a multiple of 2 * --model.heads."
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.kv_heads} heads of keys evenly"
                "; make --model.heads a multiple of --model.kv-heads."
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def residual_scale(self) -> float:
        """Of weights that write to the residual stream: each block adds twice, and this
        keeps the sum's size at any depth."""
        return (2 * self.layers) ** -0.5


# The two largest have the shapes of Llama 3.2 1B and Llama 3.1 8B (arXiv:2407.21783).
LLAMA_3 = ModelConfig(
    width=2048, heads=32, kv_heads=8, vocabulary=128256, rope_base=5e5
)
PRESETS: dict[str, ModelConfig] = {
    "1m": ModelConfig(),
    "10m": ModelConfig(
        layers=6, width=384, heads=6, kv_heads=2, mlp_width=1024, context=256
    ),
    "100m": ModelConfig(
        layers=12,
        width=768,
        heads=12,
        kv_heads=4,
        mlp_width=2048,
        context=1024,
        vocabulary=32768,
    ),
    "1b": dataclasses.replace(LLAMA_3, layers=16, mlp_width=8192, context=4096),
    "8b": dataclasses.replace(
        LLAMA_3, layers=32, width=4096, mlp_width=14336, context=8192, tied=False
    ),
    "gpt": ModelConfig(family="gpt", kv_heads=4, mlp_width=512),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up, then a cosine to a tenth of the peak."""

    learning_rate: float = 4e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read; without `files` and `hf`, Python's help topics."""

    files: tuple[str, ...] = ()
    """UTF-8 files or glob patterns; each file is a document."""
    hf: str | None = None
    """Name of a Hugging Face data set, or the folder of one that was saved to disk."""
    hf_config: str | None = None
    hf_split: str = "train"
    hf_column: str = "text"
    tokenizer: str = "bytes"
    """`bytes`, or a file of the `tokenizers` library, as train_tokenizer.py makes."""
    end: str = "<|endoftext|>"
    """That tokenizer's token that stands in front of each document."""


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every: int = 1
    """Steps between two lines of metrics."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard; needs the package `tensorboardX`."""
    plot: bool = True
    """Draw the loss at the end; needs the package `matplotlib`."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a language model on text, its state sharded over every device."""

    preset: Preset = "1m"
    """Named sizes of the model; single ones can be changed with `--model.*`."""
    run_dir: str | None = None
    """Where the run is written, and resumed from; none makes a new folder in `runs`."""
    devices: int | None = None
    """Make this many CPU devices; none stands for the devices that JAX finds."""
    coordinator: str | None = None
    """`HOST:PORT` of process 0, if several processes share the run; `auto` on clusters
    that JAX knows, such as TPU slices and Slurm."""
    process_count: int = 1
    process_id: int = 0
    join_seconds: int = 45
    """How long processes wait for each other at the start."""
    heartbeat_seconds: int = 20
    """After this long without a sign of life from one process the others end."""
    plain: bool = False
    """Run the same step on one device, without shardfn."""
    plan: bool = False
    """Print what one step communicates, and stop."""
    steps: int = 300
    save_every: int = 100
    """Steps between two checkpoints; zero saves none."""
    keep: int = 3
    """How many checkpoints are kept."""
    eval_every: int = 0
    """Steps between two losses on held-out text, of which the state with the lowest is
    kept in `best`; zero takes one at the end."""
    profile: str | None = None
    """Steps to trace, such as `20:25`, into `profile` in the run's folder."""
    batch_size: int = 32
    """Windows in a batch, over all processes."""
    seed: int = 0
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    log: LogConfig = LogConfig()

    def check(self) -> None:
        """Raises ConfigError for flags that contradict each other."""
        for name in ("steps", "batch_size", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {value}: give a number above zero.")
        if self.save_every < 0 or self.keep < 1:
            raise ConfigError(
                f"--save-every {self.save_every} --keep {self.keep}: give at least 0 "
                "and 1; --save-every 0 saves nothing."
            )
        if self.eval_every < 0:
            raise ConfigError(
                f"--eval-every {self.eval_every}: give a number of steps, or 0."
            )
        self.traced()
        if self.plain and self.plan:
            raise ConfigError("--plan needs shardfn: leave --plain out.")
        if self.coordinator and (self.plain or not self.run_dir):
            raise ConfigError("--coordinator needs --run-dir, and shardfn: no --plain.")
        if self.coordinator not in (None, "auto"):
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(
                    f"--coordinator {self.coordinator}: give HOST:PORT of process 0, "
                    "such as 10.0.0.1:1234, or auto."
                )
        if (self.process_count > 1 or self.process_id) and not self.coordinator:
            raise ConfigError("--process-count and --process-id need --coordinator.")
        if not 0 <= self.process_id < self.process_count:
            raise ConfigError(
                f"--process-id {self.process_id}: of --process-count "
                f"{self.process_count} the first is 0."
            )
        if self.data.files and self.data.hf:
            raise ConfigError("--data.files and --data.hf: give one of them.")

    def traced(self) -> range:
        """The steps of `--profile FIRST:LAST`, both with it; of one number, that."""
        if self.profile is None:
            return range(0)
        first, _, last = self.profile.partition(":")
        numbers = [first, last or first]
        found = [int(x) for x in numbers if x.isdecimal()]
        if len(found) < 2 or not 0 < found[0] <= found[1]:
            raise ConfigError(
                f"--profile {self.profile}: give steps FIRST:LAST, such as 20:25."
            )
        return range(found[0], found[1] + 1)

    def lines(self) -> list[str]:
        """Every choice that processes have to share, one per line."""
        own = dataclasses.replace(self, process_id=0, devices=None)
        return to_json(own).splitlines()

    def check_devices(self, count: int) -> None:
        if not self.plain and self.batch_size % count:
            more = -(-self.batch_size // count) * count
            raise ConfigError(
                f"--batch-size {self.batch_size}: {count} devices cannot split it "
                f"evenly. Give a multiple of {count}, such as {more}, or other devices."
            )

    def check_vocabulary(self, size: int) -> None:
        if size > self.model.vocabulary:
            raise ConfigError(
                f"--model.vocabulary {self.model.vocabulary}: the tokenizer has {size} "
                "tokens. Give at least as many; a multiple of 128 is fastest."
            )


def describe(config: Config) -> str:
    """Returns every choice, by groups, in lines that fit the terminal."""
    groups = {"run": {}}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            groups[name] = value
        else:
            groups["run"][name] = value
    columns = max(shutil.get_terminal_size().columns, 40)
    return "\n".join(
        textwrap.fill(
            " ".join(f"{k}={v}" for k, v in choices.items()),
            width=columns,
            initial_indent=f"{group + ':':<11}",
            subsequent_indent=" " * 11,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for group, choices in groups.items()
    )


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(path: Path) -> Config:
    """Returns the config that a run was started with."""
    if not path.is_file():
        raise ConfigError(
            f"--run-dir {path.parent}: no run is there, with config.json."
        )
    try:
        return rebuild(Config, json.loads(path.read_text()))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not what a run has written ({error}). Bring it back, or start "
            "the run again with all of its flags: it goes on, and writes it anew."
        ) from None


def rebuild(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: rebuild(hints[name], x) for name, x in value.items()})
    return tuple(value) if isinstance(value, list) else value


def with_preset(argv: list[str]) -> Config:
    """Returns the defaults that go with the flags: those of the run in `--run-dir`, if
    there is one, or of the `--preset`."""
    told = {}
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        flag, is_whole, value = word.partition("=")
        told[flag.replace("_", "-")] = value if is_whole else after
    name, folder = told.get("--preset"), told.get("--run-dir")
    if name in PRESETS:
        return Config(preset=name, model=PRESETS[name])  # pyright: ignore
    if name or not folder:
        return Config()  # the parser of the flags says which presets there are
    try:
        before = from_json(Path(folder) / "config.json")
    except ConfigError:  # the checkpoints know what the run was started with
        return Config()
    alone = dict(coordinator=None, process_count=1, process_id=0, plan=False)
    return dataclasses.replace(before, **alone)
