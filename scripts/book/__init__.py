"""The book: a static site of the package's derivations, each beside the code that computes it.

source.py reads the package: docstrings, numbered equations, lines of code and the numbers they carry. pages.py reads
docs/book. formula.py turns LaTeX into MathML, listing.py code into lines, drawing.py a figure into SVG, writing.py
Markdown (markdown.py) into HTML. site.py puts all pages together, indexes.py leads into them, and links.py looks
whether each link of what was built leads somewhere. The figures themselves are in figures/, a file for each page.
"""
