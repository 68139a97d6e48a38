"""PyTorch programs drawn from seeds train like one process with all rows.

Each program draws a model (shared, frozen, conditional and sparse parameters), an
optimizer, a way to distribute it, and then steps, accumulation, errors, checkpoints and
scalers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from hpcstrat.integrations.torch.process_group import BACKEND
from tests.integrations.ranks.drawn import seeds

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS, WIDTH = 6, 4
# Optimizers that divide by square roots amplify rounding errors.
CLOSE = {"rtol": 1e-7, "atol": 1e-8}


class Net(nn.Module):
    """A model from words to scores; a replica may skip the branch."""

    def __init__(self, draw: np.random.Generator) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=bool(draw.random() < 0.2))
        count = int(draw.integers(1, 4))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WORDS, bias=bool(draw.random() < 0.5))
        if not self.words.sparse and draw.random() < 0.3:
            self.last.weight = self.words.weight
        self.recompute = bool(draw.random() < 0.2)

    def forward(self, words: Any, branch: bool) -> Any:
        found = self.words(words)
        for layer in self.layers:
            if self.recompute and self.training:
                found = torch.utils.checkpoint.checkpoint(
                    layer, found, use_reentrant=False
                ).tanh()
            else:
                found = layer(found).tanh()
        if branch:
            found = found + self.branch(found)
        return self.last(found)


def _optimizer(draw: np.random.Generator, sparse: bool, whole: bool) -> Any:
    """Return a function that makes a random optimizer for parameters."""
    sgd = [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    ]
    dense = [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, nesterov=True),
        lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.02, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
        lambda p: torch.optim.Adagrad(p, 0.05),
    ]
    if whole:
        dense.append(lambda p: torch.optim.NAdam(p, 0.02))
    choices = sgd if sparse else sgd + dense
    return choices[draw.integers(len(choices))]


@pytest.fixture(scope="module")
def group(strategy: Any) -> Iterator[None]:
    """Make the default process group of the job."""
    dist.init_process_group(BACKEND)
    yield
    dist.destroy_process_group()


class Job:
    """A program on this replica, and the same program in one process with all rows."""

    def __init__(self, strategy: Any, seed: int, folder: Path) -> None:
        self.strategy, self.folder = strategy, folder
        self.size, self.rank = strategy.num_replicas_in_sync, strategy.replica_id
        # All ranks draw the same numbers.
        self.draw = draw = np.random.default_rng(seed)
        self.way = str(draw.choice(["replicate", "replicate", "sum", "ddp", "fsdp"]))
        torch.manual_seed(seed)
        self.alone = Net(draw).double()
        if self.alone.words.sparse and self.way in ("ddp", "fsdp"):
            self.way = "replicate"
        make = _optimizer(draw, self.alone.words.sparse, self.way != "fsdp")
        self.model: Any = copy.deepcopy(self.alone)
        self.wrapped = self.model
        if self.way == "ddp":
            self.wrapped = nn.parallel.DistributedDataParallel(
                self.model,
                find_unused_parameters=True,
                gradient_as_bucket_view=bool(draw.random() < 0.5),
            )
        elif self.way == "fsdp":
            for layer in self.model.layers:
                fsdp.fully_shard(layer)
            fsdp.fully_shard(self.model)
        else:
            op = "sum" if self.way == "sum" else "mean"
            hst.replicate(self.model, strategy, op=op)
        self.pairs = [(m, make(m.parameters())) for m in (self.alone, self.model)]
        self.scalers = None
        if self.way == "replicate" and draw.random() < 0.3:
            self.scalers = [torch.amp.GradScaler("cpu", 1024.0) for _ in range(2)]
        self.checkpoints: Any = None
        if self.way in ("replicate", "sum"):
            state = hst.state(self.model, self.pairs[1][1])
            self.checkpoints = hs.CheckpointManager(folder, **state)
            self.saved: Any = None
        self.saves = 0

    def play(self, length: int) -> None:
        """Run ``length`` drawn actions, and compare the two programs after each."""
        kinds = ["step", "step", "accumulate", "freeze", "look"]
        if self.checkpoints is not None:
            kinds += ["save", "restore", "fail"]
        for _ in range(length):
            kind = str(self.draw.choice(kinds))
            getattr(self, f"_{kind}")()
            self._compare(kind)

    def _batch(self) -> list[tuple[Any, bool]]:
        """Return for each replica its rows, and whether it uses the branch."""
        draw, found = self.draw, []
        for _ in range(self.size):
            rows = int(draw.integers(0, 4))
            words = torch.from_numpy(draw.integers(0, WORDS, (rows, 2)))
            # FSDP2 gathers parameters together, so all replicas must use them.
            branch = self.way == "fsdp" or bool(draw.random() < 0.5)
            found.append((words, branch))
        if not any(len(words) for words, _ in found):
            found[0] = torch.ones(1, 2, dtype=torch.int64), found[0][1]
        return found

    def _loss(self, model: Any, words: Any, branch: bool) -> Any:
        return (model(words, branch) - 1).square().sum()

    def _backward(self, bad: int | None = None) -> None:
        """Run one backward of both programs; the loss of rank ``bad`` is infinite."""
        batch = self._batch()
        total = sum(len(words) for words, _ in batch)
        scale = [torch.ones((), dtype=torch.float64)] * self.size
        if bad is not None:
            scale[bad] = torch.tensor(float("inf"), dtype=torch.float64)
        loss = sum(
            self._loss(self.alone, words, branch) * scale[rank]
            for rank, (words, branch) in enumerate(batch)
        )
        loss = loss / total
        words, branch = batch[self.rank]
        own = self._loss(self.wrapped, words, branch) * scale[self.rank]
        if self.way in ("replicate", "sum"):
            mean = hst.global_mean(own, len(words), strategy=self.strategy)
            own = mean if self.way == "replicate" else own / total
        else:
            own = own * self.size / total
        losses = [loss, own]
        if self.scalers:
            losses = [s.scale(v) for s, v in zip(self.scalers, losses, strict=True)]
        for value in losses:
            value.backward()

    def _end(self) -> None:
        clip = self.draw.choice([0.0, 0.5]) if not self.scalers else 0.0
        if self.alone.words.sparse:
            clip = 0.0
        nothing = bool(self.draw.random() < 0.7)
        for index, (model, optimizer) in enumerate(self.pairs):
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if self.scalers:
                self.scalers[index].step(optimizer)
                self.scalers[index].update()
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=nothing)

    def _step(self) -> None:
        bad = None
        if self.scalers and self.draw.random() < 0.3:
            bad = int(self.draw.integers(self.size))
        self._backward(bad)
        self._end()

    def _accumulate(self) -> None:
        quiet = bool(self.draw.random() < 0.6) and self.way != "fsdp"
        for _ in range(int(self.draw.integers(1, 3))):
            with contextlib.ExitStack() as stack:
                if quiet and self.way == "ddp":
                    stack.enter_context(self.wrapped.no_sync())
                elif quiet:
                    stack.enter_context(hst.no_sync(self.model))
                self._backward()
        self._backward()
        self._end()

    def _freeze(self) -> None:
        if self.way in ("ddp", "fsdp"):
            return  # DDP and FSDP cannot change parameters after they are made.
        name = str(self.draw.choice(["words", "branch", "layers"]))
        wanted = bool(self.draw.random() < 0.6)
        for model, _ in self.pairs:
            getattr(model, name).requires_grad_(wanted)

    def _look(self) -> None:
        words = torch.from_numpy(self.draw.integers(0, WORDS, (2, 2)))
        with torch.no_grad():
            found = [model(words, True) for model, _ in self.pairs]
        torch.testing.assert_close(*found, **CLOSE)

    def _save(self) -> None:
        self.saves += 1
        self.checkpoints.save(self.saves)
        self.saved = copy.deepcopy(
            [self.alone.state_dict(), self.pairs[0][1].state_dict()]
        )

    def _restore(self) -> None:
        if self.saved is None:
            return
        self.checkpoints.restore()
        model, optimizer = self.pairs[0]
        model.load_state_dict(self.saved[0])
        optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def _fail(self) -> None:
        """A backward that fails on one rank is an error on all; the next is right."""
        bad = int(self.draw.integers(self.size))
        (words, branch), *_ = self._batch()
        loss = self._loss(self.model, words, branch)
        if not loss.requires_grad:
            return  # All parameters that the ranks' common batch uses are frozen.
        if self.rank == bad:
            loss.register_hook(_planted)
        with pytest.raises(RuntimeError):
            loss.backward()
        if self.rank == bad and self.size > 1:
            # The error came before the module's hooks, so the next call reports it.
            with pytest.raises(hs.errors.CollectiveError):
                self.strategy.check_equal(words.numpy())
        for _, optimizer in self.pairs:
            optimizer.zero_grad()

    def _compare(self, kind: str) -> None:
        parameters = []
        how = f"{self.way}, {type(self.pairs[0][1]).__name__}, after {kind}"
        for module in self.model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
        for (name, own), wanted in zip(
            self.model.named_parameters(), self.alone.parameters(), strict=True
        ):
            whole = own.full_tensor() if self.way == "fsdp" else own
            parameters.append(whole.detach().numpy())
            torch.testing.assert_close(
                *(whole, wanted),
                **CLOSE,
                msg=lambda text, name=name: f"{how}, {name}: {text}",
            )
        self.strategy.check_equal(parameters)


def _planted(_: Any) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("seed", seeds(30))
def test_programs_train_as_one_process(
    strategy: Any, group: None, folder: Path, seed: int
) -> None:
    Job(strategy, seed, folder).play(8)
