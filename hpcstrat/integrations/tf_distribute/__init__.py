"""Names of tf.distribute that hpcstrat has for programs that are ported."""
