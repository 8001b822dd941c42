"""Mutation testing: make a small mistake in the code, and see whether a test fails.

The package with one mistake in it is a mutant. If a test of its module fails on it, the mutant is killed. If all pass,
it survived: they would pass on that mistake too, should anyone make it. A change that makes no difference, such as
clipping at 11 instead of 10 what rounds to the same from 8 on, is no mistake, and no test can kill it: that mutant is
equivalent.

scope.py says which functions are changed, kinds.py which mistakes are made, mutants.py makes them, equivalent.py reads
the list of those that are none, and runner.py runs the tests.

Why no tool that exists: mutmut 3.8 has a fixed list of operators, none of which drops a term or reads an einsum. Cosmic
Ray 8.7 takes one's own, but chooses by file and line, not by function, and starts Python anew for every mutant: 2 to
3 s of imports, where a fork of a process that has collected the tests needs a fraction of one. (Both read, not timed.)
"""
