"""The exceptions a user is meant to see, each one line on the command line."""

import importlib.util
import signal


class UserError(ValueError):
    """Something the user can put right; the command line prints it as one line and exits with status 2.

    >>> try:
    ...     Encoder("stand_in").encode("one text")
    ... except UserError as error:
    ...     print(error)
    expected a list of texts, found the text 'one text'; write [text]
    """

    def __str__(self) -> str:
        """Return one line, whatever text the message quotes."""
        return " ".join(super().__str__().splitlines())


class RunError(RuntimeError):
    """A run cannot go on, though nothing was wrong at its start; exit status 1. What it had saved stays.

    `LSRTrainer.train` raises it, such as where a server stays away; the same call resumes the run.

    >>> issubclass(RunError, RuntimeError)
    True
    """


class NotFiniteError(RunError):
    """A loss, gradient, weight or vector that is no finite number; nothing of its step is saved."""


class Interrupted(RunError):
    """SIGTERM, SIGUSR1, SIGHUP or Ctrl-C asked the run to stop; it saved its step, and the same command goes on.

    Exit status 75 (EX_TEMPFAIL of sysexits.h): a job script may put the job back into its queue. Of Ctrl-C it is 130.
    """

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signal = number


def require_extra(extra: str, *modules: str, what: str) -> None:
    """Raise UserError for the first module that is not installed; `what` needs it and pip installs it as `extra`."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{what} needs {module}: pip install 'replug[{extra}]'")
