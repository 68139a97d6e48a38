"""Refuses ``horovod.tensorflow``, which hpcstrat does not replace, with advice."""

raise ImportError(
    "expected horovod.torch, the only module of Horovod that hpcstrat replaces, found "
    "horovod.tensorflow; train with model.fit of Keras 3 on its TensorFlow backend, "
    "and hpcstrat.integrations.keras.distribute(model, strategy)"
)
