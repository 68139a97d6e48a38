"""Optimizers that sum gradients over replicas in one fused all-reduce."""

from hpcstrat.optimizers.adagrad import Adagrad
from hpcstrat.optimizers.adam import Adam, AdamW
from hpcstrat.optimizers.lamb import LAMB
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.rules import Step
from hpcstrat.optimizers.sgd import SGD

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "Step"]
