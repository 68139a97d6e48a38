"""Fit a linear model with a training loop of your own, with names of tf.distribute."""

import hpcstrat as hs
import numpy as np

random = np.random.default_rng(1)
x = random.normal(size=(1000, 8))
y = x @ np.arange(8.0)

strategy = hs.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = hs.Variable(np.zeros(8), name="weights")
    optimizer = hs.optimizers.SGD(0.02)
dataset = hs.Dataset.from_tensor_slices((x, y)).batch(64)
batches = strategy.experimental_distribute_dataset(dataset)


def step(rows, targets):
    """Update the weights from the rows of this replica; return its part of the loss."""
    errors = rows @ weights.value() - targets
    loss = hs.compute_average_loss(errors**2, global_batch_size=64)
    optimizer.apply_gradients([(2 * rows.T @ errors / 64, weights)])
    return loss


for epoch in range(5):
    for batch in batches:
        losses = strategy.run(step, args=batch)
        loss = strategy.reduce(hs.ReduceOp.SUM, losses, axis=None)
    hs.print_once(f"epoch {epoch + 1}: loss {loss:.4f}")
