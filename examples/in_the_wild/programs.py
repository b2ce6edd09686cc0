"""The gallery: for each program how to make its arguments, tiny, and the adapter.

In: the module that a source's file is. Out: what `program.run` takes.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from mains import MAINS
from program import Made, Program
from trainers import TRAINERS

ROWS, LENGTH, VOCABULARY = 16, 8, 64
SMALL = dict(emb_dim=32, num_heads=4, num_layers=1, qkv_dim=32, mlp_dim=64, max_len=32)


def key() -> jax.Array:
    return jax.random.key(0)


def tokens(*shape: int, vocabulary: int = VOCABULARY) -> jax.Array:
    """Tokens, of which 0 pads; rows of different length, so that means are weighted."""
    found = jax.random.randint(key(), shape or (ROWS, LENGTH), 1, vocabulary)
    ends = LENGTH - jnp.arange(found.shape[0]) % 5
    return jnp.where(jnp.arange(found.shape[1]) < ends[:, None], found, 0)


def linen_state(module: Any, model: Any, params: Any, **others: Any) -> Any:
    """A TrainState of the file's own class, if it has one."""
    kind = getattr(module, "TrainState", train_state.TrainState)
    tx = optax.adamw(1e-3)
    return kind.create(apply_fn=model.apply, params=params, tx=tx, **others)


def make_lm1b(train: Any) -> Made:
    config = train.models.TransformerConfig(
        vocab_size=VOCABULARY, output_vocab_size=VOCABULARY, **SMALL
    )
    model = train.models.TransformerLM(config.replace(deterministic=True))
    state = linen_state(train, model, model.init(key(), tokens())["params"])
    rate = train.create_learning_rate_schedule(1e-3, 10)
    bound = {"config": config, "learning_rate_fn": rate, "dropout_rng": key()}
    return Made((state, {"inputs": tokens()}), bound)


def make_wmt(train: Any) -> Made:
    config = train.models.TransformerConfig(
        vocab_size=VOCABULARY, output_vocab_size=VOCABULARY, **SMALL
    )
    model = train.models.Transformer(config.replace(deterministic=True))
    params = model.init(key(), tokens(), tokens())["params"]
    state = linen_state(train, model, params, dynamic_scale=None)
    rate = train.create_learning_rate_schedule(1e-3, 10)
    bound = {"config": config, "learning_rate_fn": rate, "dropout_rng": key()}
    batch = {"inputs": tokens(), "targets": tokens() * 3 % VOCABULARY}
    return Made((state, batch), bound)


def make_nlp_seq(train: Any) -> Made:
    config = train.models.TransformerConfig(
        vocab_size=VOCABULARY, output_vocab_size=8, **SMALL
    )
    model = train.models.Transformer(config)
    params = model.init(key(), inputs=tokens(), train=False)["params"]
    rate = train.create_learning_rate_scheduler(base_learning_rate=1e-3)
    bound = {"model": model, "learning_rate_fn": rate, "dropout_rng": key()}
    batch = {"inputs": tokens(), "targets": tokens(vocabulary=8)}
    return Made((linen_state(train, model, params), batch), bound)


def bind(train: Any, bound: dict[str, Any]) -> Any:
    return functools.partial(train.train_step, **bound)


def make_imagenet(train: Any) -> Made:
    model = train.create_model(model_cls=train.models._ResNet1, half_precision=False)
    config = SimpleNamespace(half_precision=False, momentum=0.9)
    rate = optax.constant_schedule(0.1)
    state = train.create_train_state(key(), config, model, 16, rate)
    image = jax.random.normal(key(), (ROWS, 16, 16, 3))
    batch = {"image": image, "label": jnp.arange(ROWS) % 10}
    return Made((state, batch), {"learning_rate_fn": rate})


def make_vae(train: Any) -> Made:
    model, images = train.models.model(4), jax.random.bernoulli(key(), 0.3, (ROWS, 784))
    images = images.astype(jnp.float32)
    state = linen_state(train, model, model.init(key(), images, key())["params"])
    return Made((state, images, key()), {"latents": 4})


def make_ogbg(train: Any) -> Made:
    jraph, random = train.jraph, np.random.default_rng(0)
    graphs = [
        jraph.GraphsTuple(
            nodes=random.normal(size=(4, 9)).astype(np.float32),
            edges=random.normal(size=(6, 3)).astype(np.float32),
            senders=random.integers(0, 4, 6),
            receivers=random.integers(0, 4, 6),
            globals=random.integers(0, 2, (1, 5)).astype(np.float32),
            n_node=np.array([4]),
            n_edge=np.array([6]),
        )
        for _ in range(7)
    ]
    batch = jraph.pad_with_graphs(jraph.batch(graphs), 32, 48, 8)
    model = train.models.GraphConvNet(
        *(16, 2, 2, 5), dropout_rate=0.1, deterministic=False
    )
    params = model.init({"params": key(), "dropout": key()}, batch)
    return Made((linen_state(train, model, params), batch, {"dropout": key()}))


def make_sst2(train: Any) -> Made:
    model = train.models.TextClassifier(
        embedding_size=16,
        hidden_size=16,
        vocab_size=VOCABULARY,
        output_size=1,
        dropout_rate=0.1,
        word_dropout_rate=0.1,
        unk_idx=1,
    )
    config = SimpleNamespace(learning_rate=0.1, momentum=0.9, weight_decay=3e-6)
    state = train.create_train_state(key(), config, model)
    lengths = jnp.sum(tokens() > 0, axis=1)
    labels = (jnp.arange(ROWS) % 2).astype(jnp.float32)
    batch = {"token_ids": tokens(), "length": lengths, "label": labels}
    return Made((state, batch, {"dropout": key()}))


def as_it_is(train: Any, bound: dict[str, Any]) -> Any:
    return train.train_step


def make_haiku_transformer(train: Any) -> Made:
    train.NUM_LAYERS, train.MODEL_SIZE = 2, 32
    batch = train.dataset.Batch(tokens(vocabulary=128), tokens(vocabulary=96))
    return Made((train.init(jax.random.PRNGKey(0), batch), batch))


def haiku_update(train: Any, bound: dict[str, Any]) -> Any:
    return train.update


def make_diffusion(notebook: Any) -> Made:
    model = notebook.Mixer2d((1, 8, 8), 4, 16, 16, 16, 2, 10.0, key=key())
    optimizer = optax.adam(1e-3)
    state = optimizer.init(notebook.eqx.filter(model, notebook.eqx.is_inexact_array))
    data = jax.random.normal(key(), (ROWS, 1, 8, 8))
    functions = (jnp.tanh, jnp.abs)
    return Made(
        (model, *functions, data, 10.0, jax.random.PRNGKey(0), state, optimizer.update)
    )


def make_step(notebook: Any, bound: dict[str, Any]) -> Any:
    return notebook.make_step


def make_vision_transformer(notebook: Any) -> Made:
    vars(notebook).update(channels=3, num_classes=10)
    model = notebook.VisionTransformer(
        *(16, 16, 2, 2, 0.1, 4, 4, 10), key=jax.random.PRNGKey(0)
    )
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(notebook.eqx.filter(model, notebook.eqx.is_inexact_array))
    images = jax.random.normal(key(), (ROWS, 3, 8, 8))
    keys = jax.random.split(jax.random.PRNGKey(1), ROWS)
    return Made((model, optimizer, state, images, jnp.arange(ROWS) % 10, keys))


def step_model(notebook: Any, bound: dict[str, Any]) -> Any:
    return notebook.step_model


EQUINOX = "patrick-kidger/equinox"
FLAX = functools.partial(Program, "google/flax")
PROGRAMS = {
    "lm1b": FLAX("examples/lm1b/train.py", make_lm1b, bind),
    "wmt": FLAX("examples/wmt/train.py", make_wmt, bind, axis="batch"),
    "nlp_seq": FLAX("examples/nlp_seq/train.py", make_nlp_seq, bind, axis="batch"),
    "imagenet": FLAX("examples/imagenet/train.py", make_imagenet, bind, axis="batch"),
    "vae": FLAX("examples/vae/train.py", make_vae, bind),
    "ogbg": FLAX("examples/ogbg_molpcba/train.py", make_ogbg, as_it_is),
    "sst2": FLAX("examples/sst2/train.py", make_sst2, as_it_is),
    "haiku_transformer": Program(
        *("google-deepmind/dm-haiku", "examples/transformer/train.py"),
        *(make_haiku_transformer, haiku_update),
    ),
    "diffusion": Program(
        *(EQUINOX, "docs/examples/score_based_diffusion.ipynb"),
        *(make_diffusion, make_step),
    ),
    "vision_transformer": Program(
        *(EQUINOX, "docs/examples/vision_transformer.ipynb"),
        *(make_vision_transformer, step_model),
    ),
    **TRAINERS,
    **MAINS,
}
