"""Names of tf.distribute that hpcstrat offers to programs that were written for it."""
