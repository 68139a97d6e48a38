"""User programs with annotations, which jobs/check.sh passes to type checkers."""
