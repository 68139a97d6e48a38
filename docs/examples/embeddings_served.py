"""Train an embedding table that lies on parameter servers: three ranks or more.

mpirun -n 4 python embeddings_served.py --servers 1
"""

import argparse

import hpcstrat as hs
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--servers", type=int, default=1)
parser.add_argument("--steps", type=int, default=60)
arguments = parser.parse_args()

# Rank 0 goes on here; all other ranks serve until it ends, and then end, too.
strategy = hs.ParameterServerStrategy(
    num_ps=arguments.servers,
    variable_partitioner=hs.partitioners.MinSizePartitioner(1 << 10, max_shards=8),
)
coordinator = hs.coordinator.ClusterCoordinator(strategy)

with strategy.scope():
    table = hs.Variable(np.zeros((1000, 4), np.float32), name="table")
    optimizer = hs.optimizers.SGD(1.0)
    losses = hs.Variable(np.float32(0), name="losses")


def batches():
    """Yield items, and the vectors that are to be learned for them."""
    worker = hs.coordinator.experimental_get_current_worker_index()
    random = np.random.default_rng(worker)
    while True:
        ids = random.integers(0, 20, size=32)
        yield ids, np.stack([ids, -ids, ids / 2, ids % 3], axis=1).astype(np.float32)


def step(iterator):
    ids, wanted = next(iterator)
    error = hs.embedding_lookup(table, ids) - wanted
    gradient = hs.IndexedSlices(error / len(ids), ids, table.shape)
    optimizer.apply_gradients([(gradient, table)])
    return float(np.mean(error**2))


iterator = iter(coordinator.create_per_worker_dataset(batches))
results = [coordinator.schedule(step, (iterator,)) for _ in range(arguments.steps)]
coordinator.join()
loss = coordinator.fetch(results)
for number in range(0, arguments.steps, 5):
    print(f"step {number}: loss {loss[number]:.4f}")
print(f"{table.num_shards} shards, loss {np.mean(loss[:5]):.1f} to {loss[-1]:.1f}")
assert loss[-1] < loss[0] / 2
