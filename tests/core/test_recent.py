"""In: entries of a cache. Out: those used last, no more than its limit."""

from shardfn._core.recent import Recent


def test_the_last_used_stay() -> None:
    cache = Recent[str, int](2)
    cache["a"], cache["b"] = 1, 2
    assert cache["a"] == 1
    cache["c"] = 3
    assert [*cache] == ["a", "c"] and "b" not in cache
    assert cache.find("b") is None and cache.find("a") == 1
    cache["d"] = 4
    assert {*cache} == {"a", "d"}
    cache["a"] = 5
    assert cache["a"] == 5 and len(cache) == 2
