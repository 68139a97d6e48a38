"""Classify points of two spirals with a Keras network, on any number of ranks."""

import hpcstrat as hs
import hpcstrat.integrations.keras as hsk
import keras
import numpy as np

random = np.random.default_rng(0)
turn = random.uniform(0, 9, (1000, 1))
points = turn * np.hstack([np.cos(turn), np.sin(turn)]) / 9
labels = random.integers(0, 2, (1000, 1))
points *= 2 * labels - 1

strategy = hs.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
model = keras.Sequential([keras.layers.Input((2,)), *layers, keras.layers.Dense(1)])
model.compile(
    keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True)
)
model = hsk.distribute(model, strategy)

history = model.fit(points, labels, batch_size=100, epochs=30, verbose=0)
for epoch in range(4, 30, 5):
    hs.print_once(f"epoch {epoch + 1}: loss {history.history['loss'][epoch]:.4f}")
