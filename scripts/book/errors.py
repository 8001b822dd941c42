"""What is wrong with a page, a docstring or a figure, and where."""


class BookError(ValueError):
    """A mistake in what the book is made of; the message begins with file and line."""

    def __init__(self, place: str, message: object):
        super().__init__(f"{place}: {message}")
