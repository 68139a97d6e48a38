"""How fast a file system writes checkpoints: ways of writing are tried there."""
