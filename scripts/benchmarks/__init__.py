"""The benchmark: numpygpt beside PyTorch and JAX, on the same model, weights and batches.

sizes.py says what is timed: models, weights, batches. Each contender is a module with a function that makes its step:
ours.py, pytorch.py (eager and compiled), jaxed.py, and bound.py, the step's matrix products alone. child.py is a
process of its own, in which timing.py times one contender; runner.py starts those in rounds and holds their losses
together; report.py makes the table. growth.py plots how costs grow, profiling.py tells where our step's time goes,
decoding.py times the writing of text, and race.py a whole training run beside nanoGPT's.
"""
