"""Refuses ``horovod.tensorflow``, which hpcstrat does not replace."""

from hpcstrat.integrations.horovod import _refuse

_refuse("horovod.tensorflow")
