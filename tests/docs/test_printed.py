"""Objects of public classes have an informative repr."""

from __future__ import annotations

import inspect

import pytest

from tests.docs import public

# Programs have objects of their subclasses only; the last class has no instances.
_ABSTRACT = {
    "hpcstrat.DistributedValues",
    "hpcstrat.partitioners.Partitioner",
    "hpcstrat.experimental.PreemptionWatcher",
}
_FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.framework(name))
    for name in ("jax", "keras", "torch")
]


@pytest.mark.parametrize("framework", ["", *_FRAMEWORKS])
def test_each_public_class_has_a_repr(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    start = f"hpcstrat.integrations.{framework}."
    silent = []
    for name in public.names_of_reference():
        is_wanted = (
            name.startswith(start) if framework else ".integrations." not in name
        )
        value = public._resolve(name) if is_wanted and name not in _ABSTRACT else None
        if (
            inspect.isclass(value)
            and value.__repr__ is object.__repr__
            and not getattr(value, "_is_protocol", False)
        ):
            silent.append(name)
    assert silent == [], "give these a __repr__"
