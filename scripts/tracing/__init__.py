"""Watching a gradient flow: every array of one forward and one backward, on one page.

source.py reads what the lines of the layers say; record.py runs them and copies what each makes; layout.py finds the
gradient that belongs to each value and sets the two side by side; picture.py draws an array, and page.py writes it all
down.
"""
