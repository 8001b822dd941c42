"""The figures of the book, a module for each page, and their colours.

A figure is a function that returns a matplotlib Figure, computed with the package's own layers. Black becomes the
colour of the page's text, and these colours have a lighter twin on a dark page.
"""

FORWARD = "#1f6feb"  # values
BACKWARD = "#c4432b"  # gradients
THIRD = "#2f8f4e"
FOURTH = "#9a6bd0"
MUTED = "#8a8a8a"
