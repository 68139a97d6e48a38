"""Replay of the captured tf.distribute programs on hpcstrat.

``python -m tests.conformance CASES.json`` reads declarative programs together with
TensorFlow's results, replays them under ``mpirun`` and compares the results. The
modules know the vocabulary of the programs, but no single case:

observe, expressions, pipeline
    Values of the programs, and the JSON form of values.
session, steps, replica, inputs, checkpoints
    The execution of a program on one rank.
worker, launch
    All programs of one number of ranks in one job, with a time limit for each.
compare, model, divergences, judge, report
    Join the ranks' observations, compare them, explain declared differences, print.
"""
