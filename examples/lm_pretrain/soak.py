"""Trains for minutes with a save and a restore every few steps; draws host memory.

python examples/lm_pretrain/soak.py --minutes 30 --run.devices 8 --run.run-dir runs/soak
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import machine
import metrics
import tyro
from config import Config, to_json
from data import pack, training_batches
from documents import load_documents, split
from loop import train
from saving import Saves
from tokens import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Flags:
    """Restores the last save, takes `steps` steps and saves, again and again."""

    minutes: float = 30
    steps: int = 20
    run: Config = Config(run_dir="runs/soak", steps=10**6)


def main(flags: Flags) -> str:
    machine.start(flags.run)
    folder = Path(str(flags.run.run_dir)).absolute()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(flags.run))
    tokenizer = load_tokenizer(flags.run.data)
    text = pack(split(load_documents(flags.run.data))[0], tokenizer)
    on = machine.prepare(flags.run)
    share, context = on.share, flags.run.model.context
    batches = training_batches(text, context, share, flags.run.seed)
    state, done, until = on.init(), 0, time.monotonic() + 60 * flags.minutes
    with Saves(flags.run, folder, on, text) as saves:
        while time.monotonic() < until:
            if resumed := saves.resume():
                state, done = resumed.state, resumed.done
                batches.set_state(resumed.position)
            with metrics.Metrics(flags.run, folder, done) as lines:
                numbers = range(done + 1, done + flags.steps + 1)
                choices = dict(save_every=flags.steps, must_stop=lambda _: False)
                train(on, state, batches, numbers, lines, saves.save, **choices)
            state = None  # as it is restored, it is not in memory twice
            saves.wait()
    return draw(folder, flags.steps)


def draw(folder: Path, steps: int) -> str:
    """Draws host memory over the steps; returns how much it grew."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = metrics.read(folder / "metrics.jsonl")
    memory = [line["memory_bytes"] / 2**20 for line in lines]
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    axes.plot([line["step"] for line in lines], memory, linewidth=1)
    axes.set(xlabel="step", ylabel="memory of the process, MiB", ylim=(0, None))
    axes.set_title(f"a save and a restore every {steps} steps")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "memory.png", dpi=120)
    tenth = max(1, len(memory) // 10)
    early, late = (
        sum(part) / len(part) for part in (memory[tenth : 2 * tenth], memory[-tenth:])
    )
    numbers = {"steps": len(lines), "early_MiB": early, "late_MiB": late}
    (folder / "memory.json").write_text(json.dumps(numbers, indent=2))
    return (
        f"{len(lines)} steps, {len(lines) // steps} saves and restores; in use after a "
        f"tenth of the run {early:.0f} MiB, in its last tenth {late:.0f} MiB: {folder}"
    )


if __name__ == "__main__":
    print(main(tyro.cli(Flags, args=sys.argv[1:])))
