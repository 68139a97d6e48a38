"""Monte Carlo of the Ising model, which goes on where an earlier job has stopped.

    python docs/examples/ising.py
    mpirun -n 4 python docs/examples/ising.py --sweeps 800 --checkpoints ising

Each rank has the lattices of some temperatures. The random numbers of a sweep depend on
the temperature and the sweep alone: any number of ranks computes the same, and so does
a job that goes on with the checkpoints of another one.
"""

import argparse
import json

import hpcstrat as hs
import numpy as np

TEMPERATURES = np.linspace(1.5, 3.5, 17)
WARM_UP = 100  # sweeps that are not counted
SEED = 7


def sweep(spins, lattice, number):
    """Try once to turn each spin of a lattice: first the black ones, then the white."""
    random = np.random.default_rng((SEED, lattice, number)).random(spins.shape)
    black = np.indices(spins.shape).sum(axis=0) % 2 == 0
    for color in (black, ~black):
        around = sum(
            np.roll(spins, shift, axis) for shift in (1, -1) for axis in (0, 1)
        )
        cost = 2.0 * spins * around
        turned = color & (random < np.exp(-cost / TEMPERATURES[lattice]))
        spins[turned] *= -1


def draw(path, spins, magnetization):
    """Draw three lattices, and the magnetization beside the exact one of Onsager."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    *fields, curve = figure.subplots(1, 4, width_ratios=(1, 1, 1, 1.6))
    for axes, lattice in zip(fields, (2, 6, 14), strict=True):
        axes.imshow(spins[lattice], cmap="cividis", interpolation="nearest")
        axes.set(xticks=(), yticks=(), title=f"T = {TEMPERATURES[lattice]:.3f}")
    below = np.linspace(1.5, 2 / np.log(1 + np.sqrt(2)), 500)
    exact = np.maximum(1 - np.sinh(2 / below) ** -4, 0) ** 0.125
    curve.plot([*below, 3.5], [*exact, 0], color="gray", label="infinite lattice")
    curve.plot(TEMPERATURES, magnetization, "o", color="tab:orange", label="computed")
    curve.set(xlabel="temperature", ylabel="|magnetization|")
    curve.legend()
    figure.savefig(path, dpi=110)


def main():
    """Sweep, and print the magnetization at each temperature."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweeps", type=int, default=400)
    parser.add_argument("--side", type=int, default=64, help="of a lattice")
    parser.add_argument("--every", type=int, default=50, help="sweeps, then save")
    parser.add_argument("--checkpoints", help="folder")
    parser.add_argument("--picture", help="file")
    options = parser.parse_args()
    strategy = hs.MultiWorkerMirroredStrategy()
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    starts = np.arange(size + 1) * len(TEMPERATURES) // size
    lattices = range(starts[rank], starts[rank + 1])

    # A checkpoint keeps all lattices, sums of magnetizations, and the sweeps done.
    shape = (len(TEMPERATURES), options.side, options.side)
    with strategy.scope():
        whole = hs.Variable(np.ones(shape, np.int8), name="spins")
        totals = hs.Variable(np.zeros(len(TEMPERATURES)), name="totals")
        done = hs.Variable(0, dtype="int64", name="sweeps")
    manager = None
    if options.checkpoints:
        manager = hs.CheckpointManager(
            options.checkpoints, spins=whole, totals=totals, sweeps=done
        )
        manager.restore_or_initialize()
    first = int(done.numpy())
    hs.print_once(f"{size} ranks, from sweep {first} to {options.sweeps}")

    own = whole.numpy()[lattices.start : lattices.stop].copy()
    sums = totals.numpy()[lattices.start : lattices.stop].copy()
    for number in range(first, options.sweeps):
        for spins, lattice in zip(own, lattices, strict=True):
            sweep(spins, lattice, number)
        if number >= WARM_UP:
            sums += np.abs(own.mean(axis=(1, 2)))
        if (number + 1) % options.every == 0 or number + 1 == options.sweeps:
            whole.assign(strategy.gather(own, axis=0))  # parts may differ in length
            totals.assign(strategy.gather(sums, axis=0))
            done.assign(number + 1)
            if manager is not None:
                manager.save(number + 1)

    magnetization = totals.numpy() / max(options.sweeps - WARM_UP, 1)
    if options.picture and rank == 0:
        draw(options.picture, whole.numpy(), magnetization)
    hs.print_once(json.dumps({"magnetization": magnetization.round(4).tolist()}))


if __name__ == "__main__":
    main()
