"""Names of tf.distribute, for programs that were written for tf.distribute."""
