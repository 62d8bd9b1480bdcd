"""Mistakes that the person at the keyboard can put right."""


class UserError(Exception):
    """One line that says what is wrong and what to do; the command line prints it and exits with 2."""
