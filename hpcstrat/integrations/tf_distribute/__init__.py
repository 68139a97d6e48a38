"""Names of tf.distribute that are not hpcstrat's own, so that ports are mechanical."""
