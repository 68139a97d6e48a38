"""A training step whose speed is measured on several numbers of ranks.

    mpirun -n 2 hpcstrat bench scaling --step scaling_step:make_step -o scaling-{n}.json
    hpcstrat bench report scaling-1.json scaling-2.json -o report.html
    python docs/examples/scaling_step.py

The first line measures one point of the curve, the second makes the report of all
points; both in the folder of this program. The third only tries some steps.
"""

import json

import hpcstrat as hs
import numpy as np

WIDTH, CLASSES = 1024, 10


def make_step(strategy, global_batch_size):
    """Return a function that does one step of a network with one hidden layer."""
    random = np.random.default_rng(0)
    with strategy.scope():
        hidden, output = (
            hs.Variable(random.normal(0, 0.03, shape).astype(np.float32), name=name)
            for name, shape in (
                ("hidden", (WIDTH, WIDTH)),
                ("output", (WIDTH, CLASSES)),
            )
        )
        optimizer = hs.optimizers.SGD(0.01, momentum=0.9)
    rows = random.normal(size=(8 * global_batch_size, WIDTH)).astype(np.float32)
    labels = random.integers(0, CLASSES, len(rows))
    dataset = hs.Dataset((rows, labels), global_batch_size).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    def train(rows, labels):
        inner = np.tanh(rows @ hidden.value())
        logits = inner @ output.value()
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        losses = -np.log(chances[np.arange(len(labels)), labels])
        chances[np.arange(len(labels)), labels] -= 1
        error = chances / np.float32(global_batch_size)
        back = (error @ output.value().T) * (1 - inner**2)
        gradients = rows.T @ back, inner.T @ error
        optimizer.apply_gradients(zip(gradients, (hidden, output), strict=True))
        return losses.sum() / global_batch_size

    def step():
        loss = strategy.run(train, args=next(batches))
        return float(strategy.reduce("sum", loss, axis=None))

    return step


if __name__ == "__main__":
    step = make_step(hs.MultiWorkerMirroredStrategy(), 256)
    losses = [step() for _ in range(20)]
    hs.print_once(json.dumps({"loss": losses[-1]}))
