"""Rank tests that are changed or skipped with arrays on GPUs, with the reasons."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hpcstrat.engine.calls.reductions import Reductions
from hpcstrat.strategies import Strategy
from tests.gpu.ranks.rewriting import (
    at_once,
    at_seam,
    comparing,
    computing,
    drawing,
    giving,
    numpy_itself,
    settling,
    together,
    written_back,
)

__all__ = ["CHANGED", "NO_MEANING", "TYPE_LISTS", "reason_of"]

_NO_MARK = "CuPy's arrays cannot be made read-only"
_NO_LONG = "CuPy has no long doubles"
_HOST_ONLY = "of memory of other libraries on the host"
_OWN_ONLY = "CuPy's concatenate and @ take arrays of its own only"

NO_MEANING = {
    "check_all_reduce.py::test_matrices_are_arrays_and_threads_have_contexts_of_their"
    "_own": "CuPy has no matrices; see check_instead.py",
    "check_all_reduce.py::test_arrays_of_other_libraries_take_results": _HOST_ONLY,
    "check_all_reduce.py::test_outs_that_would_not_be_written_are_refused": _HOST_ONLY,
    "check_all_reduce.py::test_tensors_of_torch_take_results": _HOST_ONLY,
    "check_data.py::test_batches_may_be_written_and_the_data_stay": _NO_MARK,
    "check_divergence.py::test_padding_of_long_doubles_may_differ": _NO_LONG,
    "check_divergence.py::test_slices_take_every_byte_once": (
        "of slices in host memory; see check_instead.py"
    ),
    "check_divergence.py::test_tolerance_is_relative_to_the_variable[g]": _NO_LONG,
    "check_reductions.py::test_sum_and_mean_agree_with_numpy[big-endian]": (
        "CuPy computes in native byte order only"
    ),
    "check_gather_broadcast.py::test_gather_for_which_one_rank_has_no_memory": (
        "NumPy makes no room for rows on GPUs"
    ),
    "check_review.py::test_results_that_are_held_are_never_overwritten": (
        "CuPy's pool of memory reuses it; see check_instead.py"
    ),
    "check_variables.py::test_variables_act_as_arrays_in_arithmetic_and_functions": (
        f"{_OWN_ONLY}; see check_instead.py"
    ),
    "check_variables.py::test_views_are_read_only_and_copies_are_copies": (
        f"{_NO_MARK}; see check_instead.py"
    ),
}
"""The reason by file and test, and by its last parameter where that matters."""

TYPE_LISTS = ("DTYPES", "FAMILIES", "NATIVE", "TYPES")
"""Lists of types in the tests' modules, of which those of CuPy are kept."""

# Only NumPy has long doubles, Python integers in arrays, and max(initial=...).
CHANGED: dict[str, dict[str, Callable[[ModuleType, Any], Any]]] = {
    "check_all_reduce": {
        "_all_algorithms_agree": drawing,
        # Results of a started call belong to the stream of its wait(), if there is one.
        "assert_usable": settling,
        "expected": computing,
        "test_half_precision_between_workers_keeps_its_bound": at_seam(
            Reductions, "batch_reduce"
        ),
    },
    "check_checkpoint_chains": {"_next": computing, "_restored": computing},
    # On a GPU, differences of copies are reported some entries later.
    "check_divergence": {"flip": written_back},
    "differing": {"step": at_once},
    # h5py writes HDF5 files from NumPy arrays.
    "check_checkpoint_input": {"_foreign": numpy_itself},
    "check_data": {"path": numpy_itself},
    # The numbers come from hpcstrat's generators, which are NumPy's.
    "check_random": {"test_uniform_numbers_of_replicas_are_uncorrelated": numpy_itself},
    "check_reductions": {
        "_uneven": giving,
        "test_reduction_over_uneven_axes": at_seam(Strategy, "reduce"),
    },
    "sums": {"assert_sum": comparing, "random_parts": computing},
    # The test draws random numbers in a set, without arrays.
    "check_strategies": {
        "test_an_error_on_random_ranks_is_raised_on_all_and_training_goes_on": (
            numpy_itself
        )
    },
    # Results of variable.numpy() are on the host. The other test computes with
    # thousands of single numbers.
    "check_variables": {
        "apply": together,
        "test_shares_of_narrow_integers_exist_for_many_replicas": numpy_itself,
    },
}
"""What is changed, by file and function."""


def reason_of(nodeid: str) -> str:
    """Return why a test is skipped, or "" if it runs."""
    name, _, case = nodeid.rsplit("/", maxsplit=1)[-1].partition("[")
    for key, reason in NO_MEANING.items():
        wanted, _, last = key.partition("[")
        if name == wanted and f"-{case}".endswith(f"-{last}" if last else ""):
            return reason
    return ""
