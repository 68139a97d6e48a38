"""Solve Burgers' equation by a network of JAX that knows nothing but the equation.

    python docs/examples/pinn_jax.py
    mpirun -n 4 python docs/examples/pinn_jax.py --steps 4000 --picture burgers.png

The network u(t, x) is trained until u_t + u u_x = NU u_xx holds at points all over the
domain, with u(0, x) = -sin(pi x) and u = 0 at both ends. The points of a batch are
divided over the ranks; on any number of them it learns what one process learns.
"""

import argparse
import json

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj
import jax
import jax.numpy as jnp
import numpy as np

NU = 0.05
BATCH, POINTS = 512, 8192  # of all replicas
RATE = 3e-3


def network(widths=(2, 32, 32, 32, 1)):
    """Return weights and biases, which are the same in every process."""
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    return [
        {"w": jax.random.normal(key, (n, m)) / n**0.5, "b": jnp.zeros(m)}
        for key, n, m in zip(keys, widths, widths[1:], strict=False)
    ]


def u(network, t, x):
    """Return the answer at a point, which is right at the start and at the ends."""
    value = jnp.stack([2 * t - 1, x])
    for layer in network[:-1]:
        value = jnp.tanh(value @ layer["w"] + layer["b"])
    value = (value @ network[-1]["w"] + network[-1]["b"])[0]
    return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * value


def residual(network, t, x):
    """Return by how much the answer misses the equation at a point."""
    u_t, u_x = (jax.grad(u, by)(network, t, x) for by in (1, 2))
    u_xx = jax.grad(jax.grad(u, 2), 2)(network, t, x)
    return u_t + u(network, t, x) * u_x - NU * u_xx


def adam(state, gradient, number, rate):
    """Return weights and moments after a step."""
    network, mean, square = state
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, square, gradient)
    rate *= jnp.sqrt(1 - 0.99**number) / (1 - 0.9**number)

    def moved(p, m, s):
        return p - rate * m / (jnp.sqrt(s) + 1e-8)

    return jax.tree.map(moved, network, mean, square), mean, square


def exact(t, x):
    """Return the answer of Cole and Hopf: integrals, by Gauss and Hermite's rule."""
    nodes, weights = np.polynomial.hermite.hermgauss(60)
    there = x[:, None] - np.sqrt(4 * NU * t) * nodes
    heat = weights * np.exp(-np.cos(np.pi * there) / (2 * np.pi * NU))
    return -(heat * np.sin(np.pi * there)).sum(axis=1) / heat.sum(axis=1)


def draw(path, field, x):
    """Draw the answer over time and place, and beside the exact one at three times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    plane, curves = figure.subplots(1, 2, width_ratios=(1.2, 1))
    image = plane.imshow(
        field.T, extent=(0, 1, -1, 1), aspect="auto", origin="lower", cmap="RdBu"
    )
    plane.set(xlabel="t", ylabel="x", title="u(t, x) of the network")
    figure.colorbar(image, ax=plane)
    for t in (0.2, 0.5, 1.0):
        (line,) = curves.plot(x, field[round(t * (len(field) - 1))], label=f"t = {t}")
        curves.plot(x[::5], exact(t, x)[::5], "o", ms=3.5, color=line.get_color())
    curves.set(xlabel="x", title="lines: network, dots: exact")
    curves.legend()
    figure.savefig(path, dpi=110)


def main():
    """Train, and print how far the answer is from the exact one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--picture", help="file")
    options = parser.parse_args()
    strategy = hs.MultiWorkerMirroredStrategy()
    random = np.random.default_rng(0)
    points = random.uniform((0, -1), (1, 1), (POINTS, 2)).astype(np.float32)
    batches = strategy.experimental_distribute_dataset(
        hs.Dataset(points, BATCH, shuffle=True)
    )

    @jax.jit
    def step(state, number, points):
        def loss_sum(network):
            missed = jax.vmap(residual, (None, 0, 0))(network, *points.T)
            return (missed**2).sum()

        sums = jax.value_and_grad(loss_sum)(state[0])
        loss, gradient = hsj.global_mean(sums, len(points), strategy)
        rate = RATE * (1 - number / options.steps)
        return adam(state, gradient, number + 1, rate), loss

    start = network()
    zeros = jax.tree.map(jnp.zeros_like, start)
    state, number, loss = (start, zeros, zeros), 0, jnp.nan
    while number < options.steps:
        for batch in batches:
            state, loss = step(state, number, strategy.local_value(batch))
            if number % (options.steps // 8) == 0:
                hs.print_once(f"step {number}: loss {loss:.5f}")
            number += 1
            if number == options.steps:
                break

    t, x = np.linspace(0, 1, 101), np.linspace(-1, 1, 101)
    field = jax.vmap(jax.vmap(u, (None, None, 0)), (None, 0, None))(state[0], t, x)
    error = max(np.abs(field[i] - exact(t[i], x)).max() for i in (20, 50, 100))
    if options.picture and strategy.replica_id == 0:
        draw(options.picture, np.asarray(field), x)
    hs.print_once(json.dumps({"loss": float(loss), "largest error": float(error)}))


if __name__ == "__main__":
    main()
