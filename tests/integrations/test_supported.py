"""The guides' tables of supported features; each row has tests, named here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GUIDES = [
    HERE.parents[1] / "docs" / "user-guide" / name
    for name in ("torch-jax.md", "keras.md")
]

GROUP, BUILT = "check_process_group", "check_built_on_groups"
GRADIENTS, TRAINING = "check_torch_gradients", "check_torch_training"
EXCHANGES, STATE = "check_jax_exchanges", "check_jax_state"
FIT, CALLBACKS = "check_keras_training", "check_keras_callbacks"

# For each beginning of a row: a file, and words in the names of its tests.
TESTED: dict[str, list[tuple[str, str]]] = {
    "`digits_torch.py`": [("test_examples", "torch_digits")],
    "`gpt_torch.py`": [("test_examples", "gpt")],
    "`digits_ddp.py`": [("test_examples", "ddp_digits")],
    "`digits_jax.py`": [("test_examples", "jax_digits")],
    "batches with few or no rows": [
        (GRADIENTS, "ragged_batches"),
        (TRAINING, "one_process"),
    ],
    "several backward passes": [(GRADIENTS, "several_backwards_add_up")],
    "unused, frozen": [
        (GRADIENTS, "some_replicas_do_not_use"),
        (GRADIENTS, "frozen_and_thawed"),
    ],
    "bfloat16 and float16, autocast": [
        (GRADIENTS, "test_halves"),
        (GRADIENTS, "scaler_skips_the_same_steps"),
    ],
    "sparse gradients": [(GRADIENTS, "sparse_gradients")],
    "`torch.compile`, fused": [(GRADIENTS, "compiled_modules_and_fused_optimizers")],
    "activation checkpointing": [(GRADIENTS, "checkpointed_layers_are_reduced_once")],
    "`BatchNorm`": [
        (GRADIENTS, "running_means"),
        ("check_torch_batch_norm", "training_is_that_of_one_process"),
    ],
    "loaders with workers": [(TRAINING, "sampler_stands_where_the_program_is")],
    "`hs.elastic.run`": [("test_torch", "goes_on_when_a_rank_is_killed")],
    "`all_reduce`, coalesced": [
        (GROUP, "all_reduce_is_the_sum"),
        (GROUP, "several_tensors_go_in_one_call"),
        (GROUP, "operations_are_those_of_gloo"),
        (GROUP, "averages_keep_their_type"),
        (GROUP, "booleans_are_combined"),
    ],
    "`reduce`, `reduce_scatter`": [(GROUP, "reductions_end_where_they_should")],
    "`broadcast`, `all_gather`": [(GROUP, "what_is_moved_keeps_its_bits")],
    "`all_to_all`": [(GROUP, "rows_go_to_all"), (GROUP, "what_is_moved")],
    "`send`": [(GROUP, "messages_and_objects"), ("test_process_group", "another_size")],
    "a step that fails or is skipped": [
        (GRADIENTS, "backward_that_fails_on_one_replica"),
        ("check_torch_skipped_steps", "goes_on_after_a_skipped_step"),
    ],
    "`barrier`": [(GROUP, "messages_and_objects"), (GROUP, "sub_groups")],
    "`torch.distributed.pipelining`": [(GROUP, "pipelines_train_as_one_process")],
    "`all_reduce` of sparse": [(GROUP, "sparse_tensors_are_added")],
    "bfloat16, float16": [(GROUP, "all_reduce_is_the_sum")],
    "DDP: static graph": [
        (GROUP, "ddp_trains_as_one_process"),
        (BUILT, "ddp_without_communication_adds_up"),
        (BUILT, "ddp_join_lets_ranks_have_fewer_batches"),
        (BUILT, "ddp_compiled"),
    ],
    "DDP's Python hooks": [(BUILT, "ddp_hooks_of_python_compress")],
    "FSDP2, FSDP1": [
        (GROUP, "fsdp2_and_dtensor_train"),
        ("check_fsdp", "it_trains_as_on_gloo"),
        (GROUP, "fsdp1_trains"),
        (GROUP, "zero_redundancy_optimizer_trains"),
    ],
    "DTensor, tensor parallel": [
        (BUILT, "dtensors_are_redistributed"),
        (BUILT, "tensor_parallel_modules"),
        (GROUP, "functional_collectives"),
    ],
    "DCP": [
        (GROUP, "checkpoints_of_torch_are_read_back"),
        (BUILT, "what_some_ranks_have_saved_others_read"),
    ],
    "`async_op=True`": [(BUILT, "calls_have_ended_when_they_return")],
    "`torch.profiler`": [(BUILT, "profiler_shows_calls")],
    "PREMUL_SUM": [(GROUP, "what_cannot_be_says_so")],
    "DDP's built-in hooks": [(BUILT, "ddp_hooks_of_torch_itself")],
    "`monitored_barrier`": [(BUILT, "torch_has_for_its_own_backends")],
    "`global_mean` in and": [(EXCHANGES, "global_mean_of_ragged_batches")],
    "`all_reduce`, `all_gather`, `broadcast`": [
        (EXCHANGES, "sums_of_all_types"),
        (EXCHANGES, "means_gathers_and_broadcasts"),
        (EXCHANGES, "what_cannot_be_reduced_is_refused"),
    ],
    "`jax.grad`": [(EXCHANGES, "gradients_are_those_of_the_sum_of_all_losses")],
    "`scan`": [
        (EXCHANGES, "calls_in_loops_and_branches"),
        (EXCHANGES, "gradients_through_loops_and_checkpoints"),
    ],
    "arrays on GPUs": [("check_device_jax", "take_their_place_in_xlas_stream")],
    "`vmap`": [(EXCHANGES, "vmap_is_refused")],
    "optax": [(EXCHANGES, "optax_takes_it")],
    "asynchronous dispatch": [
        (EXCHANGES, "come_after_those_under_way"),
        (EXCHANGES, "independent_calls_have_one_order"),
        ("test_jax", "one_core_for_all_ranks"),
    ],
    "checkpoints": [
        (TRAINING, "saved_on_two_goes_on_on_three"),
        (STATE, "what_two_replicas_saved_comes_back_on_all"),
    ],
    "batches of any size": [
        (FIT, "fit_is_that_of_one_process"),
        (FIT, "arrays_are_global_batches"),
        (FIT, "data_of_the_programs_own_are_shares"),
    ],
    "losses that are sums": [(FIT, "losses_with_other_divisors")],
    "regularizers": [(FIT, "fit_is_that_of_one_process")],
    "metrics": [(FIT, "fit_is_that_of_one_process")],
    "several outputs": [(FIT, "embeddings_and_several_inputs")],
    "`clipnorm`": [(FIT, "optimizers_see_the_gradient")],
    "`gradient_accumulation_steps`": [(FIT, "optimizers_see_the_gradient")],
    "`LossScaleOptimizer`": [(FIT, "infinite_gradients_of_one_replica")],
    "custom `train_step`": [(FIT, "steps_of_the_programs_own")],
    "`steps_per_epoch`": [(FIT, "steps_of_an_epoch")],
    "`Dropout`": [(FIT, "dropout_differs_and_its_state_does_not")],
    "`BatchNormalization`": [
        (FIT, "moving_means_are_means"),
        (CALLBACKS, "what_cannot_be_is_refused"),
    ],
    "`ModelCheckpoint`": [
        (CALLBACKS, "callbacks_write_once"),
        (CALLBACKS, "backup_on_replica_0"),
    ],
    "`EarlyStopping`": [(CALLBACKS, "callbacks_write_once_and_decide_alike")],
    "custom callbacks": [
        (CALLBACKS, "callbacks_write_once_and_decide_alike"),
        (CALLBACKS, "error_of_one_replica"),
    ],
    "`model.save`": [(CALLBACKS, "saved_models_know_nothing_of_it")],
    "`jit_compile`": [(CALLBACKS, "what_cannot_be_is_refused")],
}
# Rows that the guides call untested, or tested by hand with libraries that these tests
# do not have.
UNTESTED = ["GPUs", "tensors on GPUs", "Lightning Fabric and Trainer"]


def lines() -> list[str]:
    """Return the first cells of all rows of the guides' tables."""
    text = "".join(guide.read_text() for guide in GUIDES)
    rows = re.findall(r"^\| (.*?) \|", text, re.M)
    heads = re.findall(r"^\| (.*?) \|.*\n\|---", text, re.M)
    return [row for row in rows if row not in heads]


def _of(line: str) -> str:
    """Return the longest known beginning of a row."""
    known = [start for start in (*TESTED, *UNTESTED) if line.startswith(start)]
    return max(known, key=len, default="")


def test_every_line_has_a_test() -> None:
    found = {line: _of(line) for line in lines()}
    assert len(found) > 30
    assert [line for line, start in found.items() if not start] == []
    assert {*TESTED, *UNTESTED} == set(found.values())


@pytest.mark.parametrize("start", TESTED)
def test_its_tests_are_there(start: str) -> None:
    for file, words in TESTED[start]:
        [path] = HERE.parent.rglob(f"{file}.py")
        assert re.search(rf"^def \w*{words}\w*\(", path.read_text(), re.M), words
