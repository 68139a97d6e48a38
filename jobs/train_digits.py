#!/usr/bin/env python3
"""Train a network on handwritten digits, on as many replicas as there are ranks.

Collective over all ranks of the job. Run it alone, under ``mpirun -n 4``, or under
``srun``: the same global batches give the same training, up to rounding, on any number
of ranks. The last line of the output is the accuracy on the test images.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
from digits_network import (
    forward,
    initial_parameters,
    least_loss,
    losses_and_gradients,
)
from digits_report import CURVES, draw, rate, replicas_and_hosts

import hpcstrat as hs
from hpcstrat.cluster_resolver import launch_from_environment

MAX_PIXEL = 16
MOMENTUM = 0.9
# The curves are saved as one variable, whose shape does not depend on --epochs, so that
# a longer run can restore the checkpoint of a shorter run.
MAX_EPOCHS = 1000


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line; ``main`` describes the options."""

    data: Path
    epochs: int
    global_batch: int
    learning_rate: float
    seed: int
    dtype: str
    checkpoint_dir: Path | None
    resume: bool
    tensorboard: bool
    picture: Path | None
    dump: Path | None
    progress: bool | None
    logical_replicas: int | None


@dataclass
class Sums:
    """Sums of the current epoch, saved because a job may end during an epoch."""

    num_images: int = 0
    loss: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.num_images, self.loss = int(state["num_images"]), float(state["loss"])


class Trainer:
    """The variables of the training, and the steps that change them.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The strategy whose replicas train.
    options : Options
        The command line.
    """

    def __init__(self, strategy: hs.MultiWorkerMirroredStrategy, options: Options):
        self.strategy = strategy
        self.options = options
        self.is_first = strategy.replica_id == 0
        # Open without locks, which some parallel file systems lack; no one writes the
        # file.
        file = h5py.File(options.data, "r", locking=False)
        batch = options.global_batch
        train = hs.Dataset(file["train"], batch, shuffle=True, seed=options.seed)
        self.train_batches = strategy.experimental_distribute_dataset(train)
        self.test_batches = strategy.experimental_distribute_dataset(
            hs.Dataset(file["test"], batch)
        )
        self.sums = Sums()
        # Saves checkpoints, also before Slurm ends the job.
        self.preemption: hs.PreemptionCheckpointHandler | None = None
        with strategy.scope():
            self.parameters = [
                hs.Variable(value, name=name)
                for name, value in initial_parameters(
                    options.seed, options.dtype
                ).items()
            ]
            self.optimizer = hs.optimizers.SGD(options.learning_rate, MOMENTUM)
            self.curves = hs.Variable(
                np.zeros((MAX_EPOCHS, len(CURVES))), trainable=False, name="curves"
            )
            self.correct, self.seen = (
                hs.Variable(
                    0,
                    name=name,
                    dtype="int64",
                    synchronization="on_read",
                    aggregation="sum",
                )
                for name in ("correct", "seen")
            )

    def pixels(self, batch: Any) -> Any:
        """Return this replica's images, scaled to 0 to 1.

        Not collective.
        """
        return batch["images"].astype(self.options.dtype) / MAX_PIXEL

    def train_step(self, batch: Any, num_global: int) -> Any:
        """Train on one batch, in replica context.

        Collective over all replicas.
        """
        losses, gradients, num_correct = losses_and_gradients(
            [variable.value() for variable in self.parameters],
            self.pixels(batch),
            batch["labels"],
            num_global,
        )
        self.optimizer.apply_gradients(zip(gradients, self.parameters, strict=True))
        self.correct.assign_add(num_correct)
        self.seen.assign_add(len(losses))
        return hs.compute_average_loss(losses, global_batch_size=num_global)

    def test_step(self, batch: Any) -> None:
        """Count the right answers for one batch, in replica context.

        Not collective.
        """
        parameters = [variable.value() for variable in self.parameters]
        _, logits = forward(parameters, self.pixels(batch))
        right = logits.argmax(axis=1) == batch["labels"]
        self.correct.assign_add(int(right.sum()))
        self.seen.assign_add(right.size)

    def accuracy(self) -> float:
        """Return the share of right answers since the last call, and reset the counts.

        Collective over all replicas.
        """
        share = int(self.correct.numpy()) / int(self.seen.numpy())
        self.correct.assign(0)
        self.seen.assign(0)
        return share

    def run_epoch(self, progress: hs.metrics.Progress) -> list[float]:
        """Train on every image once, test, and return a row for the curves.

        Collective over all replicas.
        """
        epoch, sums = self.train_batches.epoch, self.sums
        num_images = self.train_batches.num_rows
        for batch in self.train_batches:
            # The last batch of an epoch is smaller. The mean is over all images of the
            # batch on all replicas, so that each replica divides by their number.
            num_global = min(self.options.global_batch, num_images - sums.num_images)
            losses = self.strategy.run(self.train_step, args=(batch, num_global))
            loss = self.strategy.reduce("sum", losses, axis=None)
            sums.loss += float(loss) * num_global
            sums.num_images += num_global
            progress.advance()
            if self.preemption is not None:
                self.preemption.save_checkpoint_if_preempted()
        row = [sums.loss / num_images, self.accuracy()]
        self.sums.load_state_dict(asdict(Sums()))
        for batch in self.test_batches:
            self.strategy.run(self.test_step, args=(batch,))
        row.append(self.accuracy())
        curves = self.curves.numpy()
        curves[epoch] = row
        self.curves.assign(curves)
        return row

    def restore(self, checkpoints: hs.CheckpointManager) -> None:
        """Continue from the newest checkpoint, if any, and watch for the job's end.

        Collective over all replicas.
        """
        folder = self.options.checkpoint_dir
        try:
            self.preemption = hs.PreemptionCheckpointHandler(None, checkpoints)
        except hs.CheckpointError as exc:
            raise click.ClickException(
                f"no way to resume from {folder}: {exc}"
            ) from exc
        found = checkpoints.last_restore
        if found is not None:
            done = self.train_batches.epoch
            hs.print_once(
                f"resumed from {folder}: step {found.step}, {done} epochs are done"
            )
        elif self.options.resume:
            hs.print_once(f"no whole checkpoint in {folder}: starting at epoch 1")

    def fit(self) -> None:
        """Train for the remaining epochs, and save after each epoch.

        Collective over all replicas.
        """
        options = self.options
        checkpoints = log = None
        if options.checkpoint_dir is not None:
            sinks = [hs.metrics.TensorBoard()] if options.tensorboard else []
            log = hs.metrics.Log(
                options.checkpoint_dir, sinks=sinks, strategy=self.strategy
            )
            checkpoints = hs.CheckpointManager(
                options.checkpoint_dir,
                parameters={v.name: v for v in self.parameters},
                optimizer=self.optimizer,
                curves=self.curves,
                train_batches=self.train_batches,
                counts={"correct": self.correct, "seen": self.seen},
                sums=self.sums,
                log=log,
            )
            self.restore(checkpoints)
        steps_per_epoch = len(self.train_batches)
        done, start = self.train_batches.epoch, time.perf_counter()
        with hs.metrics.Progress(
            options.epochs * steps_per_epoch,
            "training",
            start=done * steps_per_epoch + self.sums.num_images // options.global_batch,
            show=options.progress,
        ) as progress:
            for epoch in range(done, options.epochs):
                values = dict(zip(CURVES, self.run_epoch(progress), strict=True))
                if checkpoints is not None and log is not None:
                    # Log before the save, because a restart does not repeat a saved
                    # epoch.
                    log.scalars(epoch + 1, values)
                    checkpoints.save()
                if not progress.has_bar and options.progress is None:
                    words = [f"{name} {value:.4f}" for name, value in values.items()]
                    hs.print_once(f"epoch {epoch + 1:3d}:", ", ".join(words))
        if log is not None:
            log.close()
        epochs = self.train_batches.epoch - done
        seconds = time.perf_counter() - start
        hs.print_once(rate(epochs, epochs * self.train_batches.num_rows, seconds))

    def finish(self) -> None:
        """Write the requested files, and print the accuracy.

        Collective over all replicas.
        """
        curves = self.curves.numpy()[: self.train_batches.epoch]
        variables = {variable.name: variable.numpy() for variable in self.parameters}
        if self.is_first:
            if self.options.dump is not None:
                with self.options.dump.open("wb") as file:
                    np.savez(file, **variables)
            if self.options.picture is not None:
                draw(curves, least_loss(), self.options.picture)
        hs.print_once(f"test accuracy {curves[-1, -1]:.4f}")


def find_problem(options: Options) -> str | None:
    """Return a problem with the data or an output file, before the training.

    Not collective.
    """
    if not options.data.is_file():
        return (
            f"expected the images in {options.data}, found no such file; make it with "
            f"python {Path(__file__).parent / 'data/make_digits.py'} {options.data}"
        )
    try:
        with h5py.File(options.data, "r") as file:
            missing = [name for name in ("train", "test") if name not in file]
    except OSError:
        missing = ["train", "test"]
    if missing:
        return (
            f"expected an HDF5 file with the groups train and test, found "
            f"{options.data} without {' and '.join(missing)}; make it anew"
        )
    if options.picture and options.picture.suffix not in (".pdf", ".png", ".svg"):
        return (
            "expected the name of a .pdf, .png or .svg file for --picture, found "
            f"{options.picture}; change it"
        )
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        return (
            "expected matplotlib for --picture, found it missing; "
            "pip install matplotlib, or leave --picture out"
        )
    folders = {
        "--checkpoint-dir": options.checkpoint_dir,
        "--picture": options.picture and options.picture.parent,
        "--dump": options.dump and options.dump.parent,
    }
    for name, folder in folders.items():
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as exc:
            reason = "a file" if folder.is_file() else exc.strerror
            return (
                f"expected a folder for {name} that can be written, found {folder}: "
                f"{reason}; name another"
            )
    folder = options.checkpoint_dir
    if folder and not options.resume and any(folder.glob("ckpt-*.h5")):
        return (
            f"expected no checkpoints in {folder}, found some; add --resume to go on "
            "from the newest, or name another --checkpoint-dir"
        )
    return None


def train(strategy: hs.MultiWorkerMirroredStrategy, options: Options) -> None:
    """Train as the command line says.

    Collective over all replicas. If it raises click.ClickException, it does so on all
    replicas.
    """
    is_first = strategy.replica_id == 0
    problem = strategy.broadcast_object(find_problem(options) if is_first else None)
    if problem is not None:
        raise click.ClickException(problem)
    hs.print_once(replicas_and_hosts(strategy))
    trainer = Trainer(strategy, options)
    try:
        trainer.fit()
    except hs.CheckpointError as exc:  # Such as a full disk, on all replicas.
        raise click.ClickException(str(exc)) from exc
    trainer.finish()


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path(__file__).parent / "data/digits.h5",
    show_default="digits.h5 beside this script",
    help="HDF5 file with the groups train and test.",
)
@click.option("--epochs", type=click.IntRange(1, MAX_EPOCHS), default=30)
@click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    default=64,
    help="Images of one step, over all replicas.",
)
@click.option(
    "--learning-rate", type=click.FloatRange(0, 10, min_open=True), default=0.1
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=10**9),
    default=0,
    help="For the first weights and the order of the images.",
)
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32")
@click.option(
    "--checkpoint-dir",
    type=click.Path(path_type=Path),
    help="Save ckpt-STEP.h5 there after each epoch, with metrics.jsonl.",
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option(
    "--tensorboard",
    is_flag=True,
    help="Write the log beside the checkpoints for TensorBoard, too.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw the curves of loss and accuracy.",
)
@click.option(
    "--dump",
    type=click.Path(path_type=Path),
    help="Write the final weights as an .npz file.",
)
@click.option(
    "--progress/--no-progress",
    default=None,
    show_default="a bar on a terminal, else a line per epoch",
    help="A progress bar in any case, or neither bar nor lines.",
)
@click.option(
    "--logical-replicas",
    type=click.IntRange(min=1),
    help="Give the same bits on any number of ranks up to this one.",
)
def main(**words: Any) -> None:
    """Train a network on handwritten digits, on as many replicas as there are ranks."""
    options = Options(**words)
    if options.resume and options.checkpoint_dir is None:
        raise click.UsageError("--resume needs --checkpoint-dir, to know where from")
    if options.tensorboard and options.checkpoint_dir is None:
        raise click.UsageError("--tensorboard needs --checkpoint-dir, to know where")
    count = options.logical_replicas
    with hs.MultiWorkerMirroredStrategy(logical_replicas=count) as strategy:
        train(strategy, options)


def run() -> None:
    """Run ``main``, and show a user's mistake once instead of on every rank.

    Collective over all ranks.
    """
    try:
        main(standalone_mode=False)
    except click.ClickException as exc:
        # All ranks get this error, because they read the same command line, and
        # problems of the first rank were sent to all. The other ranks exit without an
        # error, because mpirun ends the job at the first error, perhaps before the
        # message is shown.
        if launch_from_environment().rank == 0:
            exc.show()
            sys.exit(exc.exit_code)
    except click.Abort:
        sys.exit("interrupted")


if __name__ == "__main__":
    run()
