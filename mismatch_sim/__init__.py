"""mismatch_sim: how much training-inference mismatch does on-policy distillation tolerate?

Start with ``mismatch-sim run --help`` or the README. Importing this package imports no framework;
modules are imported by name (``from mismatch_sim.perturb import noise``).
"""
