"""In: a program of each kind. Out: it computes the same over 1, 2 and 4 devices, over a
2 x 4 hybrid mesh, and over meshes whose axes are automatic.
"""

import programs
import pytest
from sharded_and_plain import assert_parity, make_mesh
from tiers import tiered

pytestmark = pytest.mark.standard_promotion

OF_EACH_KIND = [
    "gpt_scan_remat",
    "dropout_raw_key_in_state",
    "contrastive",
    "along_the_batch",
    "size_norms_of_padded",
    "state_of_everything",
]
MORE = [
    "conv_batch_norm",
    "opt_adafactor",
    "opt_adamw_clip_warmup_cosine",
    "accumulate_scan",
    "masked_mean",
    "size_17",
]
FEW = ["gpt_scan_remat", "masked_mean", "dropout_raw_key_in_batch"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", ["2x4", "4", "2", "1"])
@pytest.mark.parametrize("name", tiered(OF_EACH_KIND + MORE, OF_EACH_KIND))
def test_every_mesh_computes_what_one_device_does(name: str, mesh: str) -> None:
    assert_parity(programs.get(name), make_mesh(mesh), born_sharded=False)


@pytest.mark.exhaustive
def test_tied_tables_on_a_hybrid_mesh() -> None:
    assert_parity(programs.get("gpt_tied"), make_mesh("2x4"), born_sharded=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", ["8-auto", "2x4-auto"])
@pytest.mark.parametrize("name", tiered(FEW, FEW[1:]))
def test_automatic_axes_compute_what_one_device_does(name: str, mesh: str) -> None:
    assert_parity(programs.get(name), make_mesh(mesh))


@pytest.mark.parametrize("min_size", [0, 10**9])
def test_what_is_sharded_changes_no_result(min_size: int) -> None:
    program, mesh = programs.get("opt_lamb"), make_mesh("2")
    if min_size:
        with pytest.raises(AssertionError, match="is whole on every device"):
            assert_parity(program, mesh, min_size=min_size)
        mesh = make_mesh("1")
    assert_parity(program, mesh, min_size=min_size)
