"""More of the gallery: trainers of larger code bases.

In: the module that a source's file is. Out: what `program.run` takes.
"""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from program import Made, Program

ROWS, LENGTH, VOCABULARY = 16, 8, 64


def tokens(*shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(0), shape or (ROWS, LENGTH), 1, VOCABULARY)


def make_gemma(train: Any) -> Made:
    nnx, models = train.nnx, train.transformer_lib
    config = models.TransformerConfig(
        num_layers=2,
        num_embed=VOCABULARY,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=importlib.import_module(
            "transformer_cfg"
        ).GEMMA3_ATTENTION_PATTERN[-2:],
        sliding_window_size=4,
    )
    model = models.Transformer(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
    )
    places = jnp.tile(jnp.arange(LENGTH), (ROWS, 1))
    batch = {
        "inputs": tokens(),
        "targets": tokens() * 3 % VOCABULARY,
        "inputs_position": places,
        "inputs_segmentation": jnp.where(places < 5, 1, 2),
    }
    return Made((model, optimizer, nnx.Rngs(1), batch, metrics))


def nnx_train_step(train: Any, bound: dict[str, Any]) -> Any:
    return train.nnx_train_step


def make_scenic(trainer: Any) -> Made:
    models = importlib.import_module("scenic.projects.baselines.fully_connected")
    config = trainer.ml_collections.ConfigDict({"hid_sizes": [32, 32]})
    about = {"num_classes": 8, "target_is_onehot": True}
    model = models.FullyConnectedClassificationModel(config, about)
    images = jax.random.normal(jax.random.key(0), (ROWS, 4, 4, 3))
    variables = model.flax_model.init(jax.random.key(1), images, train=False)
    tx = optax.adamw(1e-3)
    state = trainer.train_utils.TrainState(
        tx=tx,
        params=variables["params"],
        opt_state=tx.init(variables["params"]),
        global_step=jnp.int32(0),
        rng=jax.random.PRNGKey(2),
    )
    label = jax.nn.one_hot(jnp.arange(ROWS) % 8, 8)
    batch = {"inputs": images, "label": label, "batch_mask": jnp.ones(ROWS)}
    bound = {
        "flax_model": model.flax_model,
        "loss_fn": model.loss_function,
        "lr_fn": optax.constant_schedule(1e-3),
        "metrics_fn": model.get_metrics_fn("train"),
        "config": trainer.ml_collections.ConfigDict({"max_grad_norm": 1.0}),
    }
    return Made((state, batch), bound)


def bind(train: Any, bound: dict[str, Any]) -> Any:
    return functools.partial(train.train_step, **bound)


def make_simply(lib: Any) -> Made:
    given = importlib.import_module("simply.config_lib").lm_test()
    config = dataclasses.replace(
        given, vocab_size=VOCABULARY, activation_dtype_name="float32"
    )
    model = lib.TransformerLM(config)
    opt = lib.opt_lib.Adam(beta1=0.9, beta2=0.95, epsilon=1e-8)
    state = jax.device_get(opt.init(model.init(jax.random.key(0))))
    batch = {
        "decoder_input_tokens": tokens(),
        "decoder_target_tokens": tokens() * 3 % VOCABULARY,
        "decoder_loss_weights": jnp.ones((ROWS, LENGTH)),
    }
    bound = {"model": model, "opt": opt, "clip_grad_norm": 1.0, "add_log_info": True}
    return Made((state, batch), bound)


def one_step(lib: Any, bound: dict[str, Any]) -> Any:
    return functools.partial(lib.train_one_step, **bound)


def as_simply_shards(lib: Any, made: Made) -> Any:
    """Parameters where its `init` puts them, batches over its mesh, the constraints of
    its layers."""
    mesh = lib.sharding_lib.get_default_mesh()
    with jax.set_mesh(mesh):
        model, opt = made.bound["model"], made.bound["opt"]
        state = opt.init(model.init(jax.random.key(0)))
        rows = jax.NamedSharding(mesh, jax.P(("replica", "data")))
        batch = jax.device_put(made.args[1], rows)
        return jax.jit(one_step(lib, made.bound), donate_argnums=0).lower(state, batch)


def make_tunix(trainer: Any) -> Made:
    nnx, qwix = trainer.nnx, importlib.import_module("qwix")
    llama = importlib.import_module("tunix.models.llama3.model")
    config = llama.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    lora = qwix.LoraProvider(module_path=".*(q_proj|v_proj|up_proj)", rank=8, alpha=2.0)
    model = qwix.apply_lora_to_model(model, lora, **model.get_model_input())
    settings = trainer.TrainingConfig(eval_every_n_steps=10, max_steps=3)
    peft = trainer.PeftTrainer(model, optax.adamw(1e-3), settings)
    peft.with_gen_model_input_fn(inputs_of)
    batch = trainer.TrainingInput(tokens(), jnp.ones((ROWS, LENGTH), jnp.bool_))
    accumulator = peft.grad_accumulator
    args = (peft.model, peft.optimizer, accumulator, batch, jnp.asarray(True))
    return Made(args, {"peft": peft})


def inputs_of(x: Any) -> dict[str, jax.Array]:
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), jnp.bool_))
    shape = x.input_tokens.shape
    return {
        "input_tokens": x.input_tokens,
        "input_mask": x.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(LENGTH), shape),
        "attention_mask": jnp.broadcast_to(causal, (*shape, LENGTH)),
    }


def peft_step(trainer: Any, bound: dict[str, Any]) -> Any:
    return bound["peft"].create_train_step_fn()


def make_levanter(lib: Any) -> Made:
    llama = importlib.import_module("levanter.models.llama")
    optim = importlib.import_module("levanter.optim.config")
    config = llama.LlamaConfig(
        max_seq_len=LENGTH,
        hidden_dim=32,
        intermediate_dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
    )
    tracker = lib.levanter.tracker
    tracker.set_global_tracker(tracker.NoopTracker())
    # haliax takes mappings of axes with a mesh alone: the step for one has none.
    unmapped = lib.MeshConfig(
        shared_mapping={"mlp": None, "heads": None},
        compute_mapping={"batch": None},
        param_mapping={},
    )
    settings = lib.TrainerConfig(
        id="tiny", train_batch_size=ROWS, tracker=tracker.NoopConfig()
    )
    optimizer = optim.AdamConfig().build(10)
    alone, trainer = (
        lib.Trainer(x, optimizer, levanter_loss, add_default_hooks=False)
        for x in (dataclasses.replace(settings, mesh=unmapped), settings)
    )
    model = config.build(lib.Axis("vocab", VOCABULARY), key=jax.random.PRNGKey(0))
    state = lib.TrainerState.init(
        optimizer, model, key=jax.random.PRNGKey(1), mp=trainer.mp
    )
    axes = (settings.TrainBatch, config.max_Pos)
    ends = jnp.arange(ROWS)[:, None] % 5 < jnp.arange(LENGTH, 0, -1)
    example = importlib.import_module("levanter.models.lm_model").LmExample(
        lib.hax.named(tokens(), axes),
        lib.hax.named(ends.astype(jnp.float32), axes),
    )
    return Made((state, (example,), {}), {"alone": alone, "trainer": trainer})


def levanter_loss(model: Any, example: Any, *, key: Any = None) -> Any:
    """As its `train_lm` has it, inside its main function."""
    return model.compute_next_token_loss(example, key=key, logsumexp_weight=0.0)


def levanter_step(lib: Any, bound: dict[str, Any]) -> Any:
    return functools.partial(bound["alone"]._train_step, _no_hooks=True)


def as_levanter_shards(lib: Any, made: Made) -> Any:
    """Parameters and the batch as its mappings of axes say."""
    state, batch, named = made.args
    with made.bound["trainer"] as trainer:
        state = lib.hax.shard(state, trainer.parameter_axis_mapping)
        batch = lib.hax.shard(batch, trainer.compute_axis_mapping)
        return trainer._jit_train_step_fn_no_hook.lower(state, batch, named)


def make_nanodo(train: Any) -> Made:
    """Its default configuration, tiny, in float32, with the metrics of every layer off:
    they are of rounding alone where a layer's mean is zero."""
    sizes = {"D": 32, "H": 4, "L": LENGTH, "N": 2, "F": 64, "dtype": "float32"}
    config = importlib.import_module("nanodo.configs.default").get_config()
    config.model.update(sizes)
    config.log_internal_metrics = False
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    model, loss = train.model_factory.get_model_and_loss(config, VOCABULARY)
    stored, state = train._init_train_state(config, model, jax.random.key(0), mesh)
    trainer = train.Trainer(config, state, mesh, stored, loss)
    bound = {"c": config, "get_loss_fn": loss}
    return Made((state, tokens()), {"of_step": bound, "trainer": trainer})


def nanodo_step(train: Any, bound: dict[str, Any]) -> Any:
    return functools.partial(train._train_step, **bound["of_step"])


def as_nanodo_shards(train: Any, made: Made) -> jax.stages.Lowered:
    """With its partitioning of each kind of layer, FSDP."""
    return made.bound["trainer"].step_fn.lower(*made.args)


def of_spec(key: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Values as those of the program's own data set for its smallest configuration,
    which is random; every flag is set."""
    if jnp.issubdtype(spec.dtype, jnp.floating):
        return jax.random.uniform(key, spec.shape, spec.dtype, -1, 1)
    if jnp.issubdtype(spec.dtype, jnp.integer):
        return jax.random.randint(key, spec.shape, 0, 2048, spec.dtype)
    return jnp.ones(spec.shape, spec.dtype)


def make_openpi(train: Any) -> Made:
    """The program's own smallest configuration, with an image encoder of one layer: it
    has one of 27 alone."""
    siglip = importlib.import_module("openpi.models.siglip")
    small = siglip.decode_variant("mu/14")
    siglip.decode_variant = lambda _: small
    config = train._config.get_config("debug")
    model = dataclasses.replace(
        config.model, dtype="float32", action_horizon=8, max_token_len=8
    )
    config = dataclasses.replace(config, batch_size=8, fsdp_devices=8, model=model)
    mesh = train.sharding.make_mesh(config.fsdp_devices)
    state, _ = train.init_train_state(config, jax.random.key(0), mesh, resume=False)
    state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    specs = model.inputs_spec(batch_size=config.batch_size)
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(specs))))
    batch = jax.tree.map(lambda spec: of_spec(next(keys), spec), specs)
    return Made((jax.random.key(1), state, batch), {"config": config})


def openpi_step(train: Any, bound: dict[str, Any]) -> Any:
    return functools.partial(train.train_step, bound["config"])


TRAINERS = {
    "gemma": Program(
        *("google/flax", "examples/gemma/train.py"), make_gemma, nnx_train_step
    ),
    "scenic": Program(
        *("google-research/scenic", "scenic/train_lib/classification_trainer.py"),
        *(make_scenic, bind),
        axis="batch",
    ),
    "simply": Program(
        *("google-deepmind/simply", "simply/model_lib.py"),
        *(make_simply, one_step),
        own=as_simply_shards,
    ),
    "levanter": Program(
        *("marin-community/marin", "src/levanter/trainer.py"),
        *(make_levanter, levanter_step),
        own=as_levanter_shards,
        python=(3, 12),
    ),
    "nanodo": Program(
        *("google-deepmind/nanodo", "nanodo/train.py"),
        *(make_nanodo, nanodo_step),
        own=as_nanodo_shards,
    ),
    "openpi": Program(
        *("Physical-Intelligence/openpi", "scripts/train.py"),
        *(make_openpi, openpi_step),
        tol=5e-5,
    ),
    "tunix": Program(
        *("google/tunix", "tunix/sft/peft_trainer.py"), make_tunix, peft_step
    ),
}
