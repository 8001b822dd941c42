"""The check of a device: numpygpt there beside numpygpt on the CPU, and beside PyTorch.

cases.py lists what is compared: layers, models, and ids that must be refused. compare.py runs each on both sides and
says how far apart they are; training.py trains on both, and beside PyTorch; machine.py finds the GPU and names it.
"""
