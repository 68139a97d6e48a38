"""Preemption notices to any rank, which all ranks obey at the same step."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

pytestmark = pytest.mark.calls
STEPS = 8


class Job:
    """A training whose exit function returns, so that the test can continue."""

    def __init__(self, strategy: Any, folder: Path, **config: Any) -> None:
        self.strategy = strategy
        self.saved: list[int] = []
        self.left: list[int] = []
        with strategy.scope():
            self.total = hs.Variable(0.0, name="total", aggregation="sum")
        self.manager = hs.CheckpointManager(
            folder, max_to_keep=None, independent=True, total=self.total
        )
        config.setdefault("signals", "SIGUSR2")
        config.setdefault("exit_fn", lambda: self.left.append(self.step))
        self.handler = hs.PreemptionCheckpointHandler(
            None,
            self.manager,
            termination_config=hs.TerminationConfig(job_end=None, **config)
            if "job_end" not in config
            else hs.TerminationConfig(**config),
        )

    @property
    def step(self) -> int:
        return int(self.handler.total_run_calls)

    def run(self, function: Any = None) -> None:
        """Make a step that adds the number of replicas to the total."""
        add = function or (lambda: self.total.assign_add(1.0))
        self.handler.run(self.strategy.run, add)

    def check(self) -> None:
        """Check that the newest checkpoint has the step at which it was saved."""
        with self.strategy.scope():
            total = hs.Variable(0.0, name="total", aggregation="sum")
        manager = hs.CheckpointManager(
            self.manager.directory, independent=True, total=total
        )
        with hs.PreemptionCheckpointHandler(
            None, manager, termination_config=hs.TerminationConfig(signals=())
        ) as handler:
            size = self.strategy.num_replicas_in_sync
            assert float(total.numpy()) == size * handler.total_run_calls
            assert handler.total_run_calls == self.left[-1]


def test_a_signal_to_any_rank_is_one_to_all(strategy: Any, folder: Path) -> None:
    """All ranks finish the current step; then all save and leave."""
    size = strategy.num_replicas_in_sync
    for number, victims in enumerate([{0}, {size - 1}, set(range(size))]):
        job = Job(strategy, folder / str(number))
        for step in range(STEPS):
            if step == 3 and strategy.replica_id in victims:
                os.kill(os.getpid(), signal.SIGUSR2)
            job.run()
        # An ``exit_fn`` that returns has consumed the notice.
        assert job.left == [4]
        assert job.step == STEPS
        job.handler.close()
        job.check()


def test_a_signal_to_one_rank_of_a_replica_is_one_to_all_ranks(
    job: Any, folder: Path
) -> None:
    """Steps call inside of replicas only, so their headers reach some ranks only."""
    counts = [n for n in range(2, job.size + 1) if job.size % n == 0]
    restores = iter([*counts[1:], 1])
    for count in counts:
        with hs.MultiWorkerMirroredStrategy(ranks_per_replica=count) as strategy:
            inside = strategy.inside
            for victim in range(job.size):
                training = Job(strategy, folder / f"{count}-{victim}")
                for step in range(STEPS):
                    if step == 3 and job.rank == victim:
                        os.kill(os.getpid(), signal.SIGUSR2)
                    training.run(functools.partial(inside.sum, 1.0))
                assert training.left == [4], (count, victim, training.left)
                assert training.step == STEPS
                training.handler.close()
        with hs.MultiWorkerMirroredStrategy(ranks_per_replica=next(restores)) as other:
            continued = Job(other, folder / f"{count}-0")
            assert continued.step == 4
            continued.handler.close()


def test_without_a_notice_a_step_makes_no_call_more(
    strategy: Any, folder: Path
) -> None:
    job = Job(strategy, folder)
    channel = strategy.collectives.channel
    if channel is None:
        pytest.skip("one replica makes no calls")
    # If ranks freed variables of earlier tests at different times, they compare all
    # copies, and agree once more.
    gc.collect()
    job.run()
    before = channel.num_calls
    strategy.run(lambda: job.total.assign_add(1.0))
    alone = channel.num_calls - before
    job.run()
    assert channel.num_calls - before == 2 * alone
    job.handler.close()


def test_steps_without_calls_learn_of_it_with_the_next_one(
    strategy: Any, folder: Path
) -> None:
    job = Job(strategy, folder)
    if strategy.replica_id == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    for _ in range(2):
        job.run(lambda: None)
    told = job.left[:]
    job.run()
    job.run()
    assert told == ([] if strategy.num_replicas_in_sync > 1 else [1])
    assert len(job.left) == 1
    job.handler.close()


def test_a_notice_within_a_step_ends_no_call(strategy: Any, folder: Path) -> None:
    """A notice between two calls of one step leaves the results of both calls right."""
    job, size = Job(strategy, folder), strategy.num_replicas_in_sync
    last = strategy.replica_id == size - 1

    def add() -> None:
        context = hs.get_replica_context()
        assert context is not None
        first = context.all_reduce("sum", np.float64(strategy.replica_id))
        if last:
            os.kill(os.getpid(), signal.SIGUSR2)
        second = context.all_reduce("sum", np.ones(3))
        assert float(first) == size * (size - 1) / 2
        assert second.tolist() == [size] * 3

    job.run(add)
    last = False
    job.run(add)
    assert job.left == [1]
    job.handler.close()


def test_a_notice_and_a_failure_in_one_call_lose_neither(
    make_strategy: Any, folder: Path
) -> None:
    with make_strategy(on_error="raise") as strategy:
        job, size = Job(strategy, folder), strategy.num_replicas_in_sync

        def fail() -> None:
            if strategy.replica_id == size - 1:
                raise ValueError("a bad batch")
            context = hs.get_replica_context()
            assert context is not None
            context.all_reduce("sum", np.ones(1))

        if strategy.replica_id == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        with pytest.raises(ValueError, match="a bad batch"):
            job.run(fail)
        assert job.left == []
        for _ in range(2):
            job.run()
        # The handler counts only steps that were made.
        assert job.left == [1]
        job.handler.close()


@pytest.mark.once
def test_a_time_that_comes_near_is_a_notice(strategy: Any, folder: Path) -> None:
    # Before the first save, a save is assumed to last 5 seconds, and the margin is
    # three times as long.
    job = Job(strategy, folder, job_end=time.time() + 16, signals=())
    limit = time.monotonic() + 30
    while not job.left and time.monotonic() < limit:
        time.sleep(0.05)
        job.run()
    assert len(job.left) == 1
    job.handler.close()


@pytest.mark.once
def test_a_function_of_the_program_is_asked(strategy: Any, folder: Path) -> None:
    asked = []

    def watched() -> bool:
        asked.append(0)
        return strategy.replica_id == 0 and len(asked) == 2

    job = Job(strategy, folder, termination_watcher_fn=watched)
    limit = time.monotonic() + 30
    while not job.left and time.monotonic() < limit:
        time.sleep(0.05)
        job.run()
    assert len(job.left) == 1
    job.handler.close()


@pytest.mark.once
def test_in_a_grace_period_the_training_goes_on(strategy: Any, folder: Path) -> None:
    saves: list[int] = []
    job = Job(
        strategy,
        folder,
        grace_period=12.0,
        save_fn=lambda: saves.append(job.step),
    )
    job.run()
    if strategy.replica_id == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    job.run()
    job.run()
    assert (saves, job.left) == ([2], [])
    # A further signal changes nothing.
    os.kill(os.getpid(), signal.SIGUSR2)
    limit = time.monotonic() + 30
    while not job.left and time.monotonic() < limit:
        time.sleep(0.05)
        job.run()
    assert len(saves) == 2
    assert job.left == [saves[1]]
    job.handler.close()


def test_a_loop_of_its_own_repeats_no_step(strategy: Any, folder: Path) -> None:
    job = Job(strategy, folder)
    for step in range(STEPS):
        if step == 3 and strategy.replica_id == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        strategy.run(lambda: job.total.assign_add(1.0))
        job.handler.save_checkpoint_if_preempted()
    assert job.left == [5]
    job.handler.close()
    job.check()


def test_checkpoints_of_before_have_no_count(strategy: Any, folder: Path) -> None:
    with strategy.scope():
        total = hs.Variable(0.0, name="total", aggregation="sum")
    manager = hs.CheckpointManager(folder, independent=True, total=total)
    total.assign(5.0)
    manager.save(7)
    job = Job(strategy, folder)
    assert (job.step, float(job.total.numpy())) == (0, 5.0)
    job.handler.close()


def test_mistakes_are_errors_on_every_rank(strategy: Any, folder: Path) -> None:
    with strategy.scope():
        total = hs.Variable(0.0, name="total")
    manager = hs.CheckpointManager(
        folder, independent=True, preemption=total, total=total
    )
    with pytest.raises(ValueError, match="expected no object named 'preemption'"):
        hs.PreemptionCheckpointHandler(None, manager)
    given: Any = {"total": total}
    with pytest.raises(ValueError, match=r"a mapping of objects and a checkpoint_dir"):
        hs.PreemptionCheckpointHandler(None, given)
    before = signal.getsignal(signal.SIGTERM)
    handler = hs.PreemptionCheckpointHandler(None, given, folder / "own")
    assert signal.getsignal(signal.SIGTERM) != before
    handler.close()
    assert signal.getsignal(signal.SIGTERM) == before
