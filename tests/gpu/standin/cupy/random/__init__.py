"""Random numbers from NumPy; CuPy's numbers differ for the same seed."""

import threading

import numpy as np

from cupy import _core, _creation, _submit

_local = threading.local()


def _given(host, dtype=None):
    return _creation._written(np.asarray(host, dtype))


class RandomState:
    """A random generator with the older interface."""

    def __init__(self, seed=None, method=100):
        self._state = np.random.RandomState(seed)

    def seed(self, seed=None):
        self._state.seed(seed)

    def rand(self, *size, dtype=float):
        return _given(self._state.rand(*size), dtype)

    def randn(self, *size, dtype=float):
        return _given(self._state.randn(*size), dtype)

    def random_sample(self, size=None, dtype=float):
        return _given(self._state.random_sample(size), dtype)

    def uniform(self, low=0.0, high=1.0, size=None, dtype=float):
        return _given(self._state.uniform(low, high, size), dtype)

    def normal(self, loc=0.0, scale=1.0, size=None, dtype=float):
        return _given(self._state.normal(loc, scale, size), dtype)

    def standard_normal(self, size=None, dtype=float):
        return _given(self._state.standard_normal(size), dtype)

    def randint(self, low, high=None, size=None, dtype=int):
        return _given(self._state.randint(low, high, size), dtype)

    def choice(self, a, size=None, replace=True, p=None):
        if _submit.is_array(a):
            return a[_given(self._state.choice(len(a), size, replace, p))]
        return _given(self._state.choice(a, size, replace, p))

    def permutation(self, a):
        if _submit.is_array(a):
            return a[_given(self._state.permutation(len(a)))]
        return _given(self._state.permutation(a))

    def shuffle(self, a):
        order = _given(self._state.permutation(len(a)))
        _core.copy_elements(a, a[order])


class Generator:
    """A random generator with the newer interface."""

    def __init__(self, bit_generator):
        self.bit_generator = bit_generator
        self._generator = np.random.Generator(bit_generator)

    def random(self, size=None, dtype=np.float64, out=None):
        return _given(self._generator.random(size, dtype))

    def standard_normal(self, size=None, dtype=np.float64, out=None):
        return _given(self._generator.standard_normal(size, dtype))

    def uniform(self, low=0.0, high=1.0, size=None, dtype=np.float64):
        return _given(self._generator.uniform(low, high, size), dtype)

    def integers(self, low, high=None, size=None, dtype=np.int64, endpoint=False):
        return _given(self._generator.integers(low, high, size, dtype, endpoint))


def default_rng(seed=None):
    """Return a new random generator."""
    return Generator(np.random.PCG64(seed))


def get_random_state():
    """Return the generator state that the functions of this module use."""
    if not hasattr(_local, "state"):
        _local.state = RandomState()
    return _local.state


def set_random_state(rs):
    """Set the generator state that the functions of this module use."""
    if not isinstance(rs, RandomState):
        raise TypeError(f"Random state must be an instance of RandomState: {type(rs)}")
    _local.state = rs


def seed(seed=None):
    """Seed the module's state."""
    get_random_state().seed(seed)


def rand(*size, **kwarg):
    return get_random_state().rand(*size, **kwarg)


def randn(*size, **kwarg):
    return get_random_state().randn(*size, **kwarg)


def random_sample(size=None, dtype=float):
    return get_random_state().random_sample(size, dtype)


random = random_sample


def uniform(low=0.0, high=1.0, size=None, dtype=float):
    return get_random_state().uniform(low, high, size, dtype)


def normal(loc=0.0, scale=1.0, size=None, dtype=float):
    return get_random_state().normal(loc, scale, size, dtype)


def standard_normal(size=None, dtype=float):
    return get_random_state().standard_normal(size, dtype)


def randint(low, high=None, size=None, dtype=int):
    return get_random_state().randint(low, high, size, dtype)


def choice(a, size=None, replace=True, p=None):
    return get_random_state().choice(a, size, replace, p)


def permutation(a):
    return get_random_state().permutation(a)


def shuffle(a):
    get_random_state().shuffle(a)
