"""What a training step sends whose attention is a kernel, compiled for machines that
are not there (extra `aot`): with the kernel split as its rule says, and on whole
operands.

A kernel of tokamax is in the table where tokamax is installed (JAX 0.12).

    python benchmarks/attention_kernels.py           # 1 minute
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from criteria_table import markdown

import shardfn
from shardfn._core import rule_registry

LAYERS, ROWS, SIZE, HEADS, WIDTH = 4, 16, 1024, 8, 128
H100, V5P = "h100:8", "tpu:v5p:2x2x2"

Attention = Callable[..., jax.Array]
"""Of queries, keys and values `[rows, positions, heads, width]`."""


def heads_first(attend: Attention) -> Attention:
    """The same of a function whose heads come before the positions."""

    def call(*qkv: jax.Array) -> jax.Array:
        return attend(*(x.swapaxes(1, 2) for x in qkv)).swapaxes(1, 2)

    return call


def cudnn(*qkv: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="cudnn")


def on_triton(*qkv: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.attention import mha

    return mha(*qkv, None, causal=True)


def flash(*qkv: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return flash_attention(*qkv, causal=True)


def splash(*qkv: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention

    causal = splash_attention.CausalMask((SIZE, SIZE))
    mask = splash_attention.MultiHeadMask([causal] * HEADS)
    kernel = splash_attention.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(*qkv)


def of_tokamax(implementation: str) -> Attention:
    def attend(*qkv: jax.Array) -> jax.Array:
        import tokamax

        return tokamax.dot_product_attention(
            *qkv, is_causal=True, implementation=implementation
        )

    return attend


def kernels() -> Iterator[tuple[str, str, Attention]]:
    """Names, machines and functions."""
    yield "JAX, cuDNN", H100, cudnn
    yield "JAX, Triton", H100, on_triton
    yield "JAX, flash", V5P, heads_first(flash)
    yield "JAX, splash", V5P, heads_first(splash)
    if importlib.util.find_spec("tokamax"):
        import tokamax

        tokamax.config.cross_compile(True).__enter__()  # to the end of the program
        yield "tokamax, triton", H100, of_tokamax("triton")
        yield "tokamax, mosaic_tpu", V5P, of_tokamax("mosaic_tpu")


def train_step(attend: Attention) -> Callable[..., Any]:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        qkv = ((x @ weights[n]).reshape(*x.shape[:2], HEADS, WIDTH) for n in "qkv")
        return x + attend(*qkv).reshape(x.shape) @ weights["o"], None

    def step(state: Any, x: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state)
            out, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), low)
            return jnp.square(out.astype(jnp.float32)).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    return step


def report_of(target: str, attend: Attention) -> Any:
    model = HEADS * WIDTH
    weights = jax.ShapeDtypeStruct((LAYERS, model, model), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, SIZE, model), jnp.float32)
    step = shardfn.fully_shard(train_step(attend), jax.make_mesh((8,), ("data",)))
    return step.on(target, dict.fromkeys("qkvo", weights), x)


def whole(target: str, attend: Attention) -> Any:
    """The same where no rule is known for a kernel."""
    known = rule_registry._entry_of

    def entry_of(primitive: Any) -> Any:
        is_kernel = primitive.name.startswith(("pallas_call", "dot_product_attention"))
        return None if is_kernel else known(primitive)

    with mock.patch.object(rule_registry, "_entry_of", entry_of):
        return report_of(target, attend)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    rows = []
    for name, target, attend in kernels():
        split, gathered = report_of(target, attend), whole(target, attend)
        row = [name, target]
        for report in (split, gathered):
            sent = report.plan.wire_bytes / report.plan.parameter_bytes
            planned = "" if report.verification.ok else ", not as planned"
            row.append(f"{sent:.2f} M{planned}")
            row.append(f"{report.memory.temporary / 2**20:,.0f} MiB")
        rows.append(row)
        print(*row, flush=True)
    names = "kernel, machine, split, temporary, whole, temporary".split(", ")
    print(f"\nJAX {jax.__version__}\n")
    print(markdown(tuple(names), [tuple(row) for row in rows]))


if __name__ == "__main__":
    main()
