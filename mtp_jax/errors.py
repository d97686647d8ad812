"""What a user can do wrong, told apart from what we can do wrong."""


class UserError(ValueError):
    """A mistake in what was given (a file, a key, a flag): one clear line, which command lines print as it is."""
