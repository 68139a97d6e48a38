"""Fit a heat equation to measurements: several ranks solve it, in several replicas.

    python docs/examples/heat_fit.py
    RANKS_PER_REPLICA=2 mpirun -n 4 python docs/examples/heat_fit.py --picture heat.png

Each experiment heats a plate in another place, and measures the temperature at the end.
The ranks of a replica divide the rows of the plate, and solve the equation and its
adjoint together. The replicas divide the experiments of a batch. The unknowns are four
coefficients of the conductivity, and the temperature of each point at the start.
"""

import argparse
import json
import os

import hpcstrat as hs
import numpy as np

NX, NY = 32, 24  # points of the plate
STEPS, DT = 20, 0.1  # of the solver
EXPERIMENTS, BATCH = 8, 4
TRUE_COEFFICIENTS = np.array([-0.3, 0.5, -0.4, 0.3])


class HeatSolver:
    """The equation du/dt = k laplace(u) + source, on the rows of this rank.

    Temperatures have the shape (experiments, rows, NY).
    """

    def __init__(self, inside):
        self.inside = inside
        x, y = np.linspace(0, 1, NX)[inside.part(NX), None], np.linspace(0, 1, NY)
        self.x, self.y = x, y
        flat = np.ones((len(x), NY))
        basis = [flat, np.sin(np.pi * x) * flat, np.cos(np.pi * y) * flat, x * y]
        self.basis = np.stack(basis)

    def first_temperature(self):
        """Return the temperature at the start, which the fit has to find."""
        return np.exp(-20 * ((self.x - 0.4) ** 2 + (self.y - 0.6) ** 2))

    def sources(self, numbers):
        """Return the heat that is added in these experiments."""
        a, b = (1 + n[:, None, None] for n in (numbers % 3, numbers // 3))
        return 0.4 * np.sin(a * np.pi * self.x) * np.sin(b * np.pi * self.y)

    def conductivity(self, coefficients):
        return np.exp(np.tensordot(coefficients, self.basis, 1))

    def laplace(self, u):
        """Return the sum of differences to four neighbors; zero around the plate."""
        u = np.pad(self.inside.halo(u, axis=1, width=1), ((0, 0), (0, 0), (1, 1)))
        neighbors = u[:, :-2, 1:-1] + u[:, 2:, 1:-1] + u[:, 1:-1, :-2] + u[:, 1:-1, 2:]
        return neighbors - 4 * u[:, 1:-1, 1:-1]

    def laplace_adjoint(self, g):
        """Return the adjoint: each point adds its value to its neighbors."""
        sums = np.pad(-4 * g, ((0, 0), (1, 1), (1, 1)))
        sums[:, :-2, 1:-1] += g
        sums[:, 2:, 1:-1] += g
        sums[:, 1:-1, :-2] += g
        sums[:, 1:-1, 2:] += g
        return self.inside.halo_adjoint(sums[:, :, 1:-1], axis=1, width=1)

    def solve(self, coefficients, start, sources):
        """Return the temperatures at all times."""
        k, temperatures = self.conductivity(coefficients), [start + 0 * sources]
        for _ in range(STEPS):
            u = temperatures[-1]
            temperatures.append(u + DT * (k * self.laplace(u) + sources))
        return temperatures

    def gradients(self, coefficients, temperatures, slope):
        """Return the loss's gradients, from that of the last temperatures."""
        k, slope_of_k = self.conductivity(coefficients), 0.0
        for u in reversed(temperatures[:-1]):
            slope_of_k += DT * np.sum(slope * self.laplace(u), axis=0)
            slope = slope + DT * self.laplace_adjoint(k * slope)
        own = np.tensordot(self.basis, slope_of_k * k, 2)
        # Each rank has a part of the sum; of the first temperature it has its rows.
        return self.inside.sum(own), np.sum(slope, axis=0)


def measurements():
    """Return the numbers of the experiments, and the temperatures at their ends."""
    alone = HeatSolver(hs.get_strategy().inside)  # this rank alone, with whole fields
    numbers = np.arange(EXPERIMENTS)
    sources = alone.sources(numbers)
    solved = alone.solve(TRUE_COEFFICIENTS, alone.first_temperature(), sources)
    return numbers, solved[-1]


def fit(strategy, rule, iterations, report=None):
    """Fit the model; return the losses, and the two variables."""
    inside = strategy.inside
    solver = HeatSolver(inside)
    with strategy.scope():
        coefficients = hs.Variable(np.zeros(4), name="coefficients")
        # Each rank has its rows of this field.
        zeros = np.zeros((NX, NY))[inside.part(NX)]
        start = hs.Variable(zeros, name="start", split=0)
        optimizer = rule()
    data = hs.Dataset(measurements(), batch_size=BATCH, shuffle=True, seed=3)
    # Item 1 of an element is a field: each rank of a replica gets its rows.
    data = strategy.experimental_distribute_dataset(data.repeat().split({"1": 0}))

    def step(batch):
        numbers, measured = batch
        given = coefficients.value(), start.value()
        temperatures = solver.solve(*given, solver.sources(numbers))
        error = temperatures[-1] - measured
        slopes = solver.gradients(given[0], temperatures, error / BATCH)
        optimizer.apply_gradients(zip(slopes, (coefficients, start), strict=True))
        return inside.sum(0.5 * np.sum(error**2) / BATCH)  # the replica's loss

    losses = []
    for number, batch in zip(range(iterations), data, strict=False):
        loss = strategy.run(step, args=(batch,))
        losses.append(float(strategy.reduce("sum", loss, axis=None)))
        if report is not None:
            report(number, losses[-1])
    return losses, coefficients, start


def draw(path, coefficients, start):
    """Draw true and fitted fields: the first temperature, and the conductivity."""
    from matplotlib.figure import Figure

    alone = HeatSolver(hs.get_strategy().inside)
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    pictures = [
        ("first temperature", alone.first_temperature(), 0, 1),
        ("fitted", start, 0, 1),
        ("conductivity", alone.conductivity(TRUE_COEFFICIENTS), 0.4, 2),
        ("fitted", alone.conductivity(coefficients), 0.4, 2),
    ]
    for axes, (title, field, low, high) in zip(
        figure.subplots(1, 4), pictures, strict=True
    ):
        image = axes.imshow(
            field.T, cmap="cividis", vmin=low, vmax=high, origin="lower"
        )
        axes.set(xticks=(), yticks=(), title=title)
        figure.colorbar(image, ax=axes, shrink=0.7)
    figure.savefig(path, dpi=110)


def main():
    """Fit, and print the loss and the coefficients."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--picture", help="file")
    options = parser.parse_args()
    strategy = hs.MultiWorkerMirroredStrategy(
        ranks_per_replica=int(os.environ.get("RANKS_PER_REPLICA", "1"))
    )
    count, inside = strategy.num_replicas_in_sync, strategy.inside
    hs.print_once(f"replicas: {count}, ranks in each: {inside.size}")

    def report(number, loss):
        if number % 100 == 0 or number + 1 == options.iterations:
            hs.print_once(f"step {number}: loss {loss:.6f}")

    _, coefficients, start = fit(
        strategy, lambda: hs.optimizers.Adam(0.02), options.iterations, report
    )
    field = start.numpy()  # the whole field, from all ranks of the replica
    if options.picture and strategy.writes:
        draw(options.picture, coefficients.numpy(), field)
    found = {"coefficients": coefficients.numpy().round(4).tolist()}
    hs.print_once(json.dumps(found))


if __name__ == "__main__":
    main()
