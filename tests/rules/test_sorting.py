"""Rules of sorts."""

from harness import integers
from jax import lax
from table import Row, table


@table(
    Row(lambda x: lax.sort(x, dimension=1), ((8, 4),), "a b -> a b  whole={b}"),
    Row(
        lambda x, y: lax.sort((x, y), dimension=0, num_keys=1),
        ((8, 5), integers((8, 5), "int32", 1)),
        "a b, a b -> a b, a b  whole={a}",
    ),
    Row(lambda x: lax.top_k(x, 3), ((8, 5),), "a b -> a c, a c  whole={b, c}"),
    Row(lambda x: lax.top_k(x, 3, axis=0), ((8, 5),), "a b -> c b, c b  whole={a, c}"),
    Row(
        lambda x: lax.approx_max_k(x, 2, reduction_dimension=0),
        ((8, 5),),
        "a b -> c b, c b  whole={a, c}",
    ),
    Row(
        lambda x: lax.approx_min_k(x, 2),
        ((8, 5),),
        "a b -> a c, a c  whole={b, c}",
    ),
)
def test_sorting_rule(row):
    row.check()
