"""The one exception a user is meant to see: it says what is wrong, where, and how to mend it."""


class UserError(ValueError):
    """Something the user can put right; the command line prints it as one line and exits with status 2."""

    def __str__(self) -> str:
        """One line, whatever the ids and names hold that it quotes."""
        return " ".join(super().__str__().splitlines())
