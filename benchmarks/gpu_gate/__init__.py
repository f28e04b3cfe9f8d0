"""Compiles every GPU program of the project ahead of time, without a GPU, and refuses what is bad: see README.md."""

from importlib import import_module

from benchmarks.gpu_gate.quiet import quiet_stderr

with quiet_stderr():  # the plugin is found now, and complains
    import_module("jax")
