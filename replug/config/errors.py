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
    """A run failed after a correct start; exit status 1. Saved work stays.

    `LSRTrainer.train` raises it, for example if a server stays unreachable; the same call resumes the run.

    >>> issubclass(RunError, RuntimeError)
    True
    """


class NotFiniteError(RunError):
    """A loss, gradient, weight or vector is not finite; its step is not saved."""


class Interrupted(RunError):
    """SIGTERM, SIGUSR1, SIGHUP or Ctrl-C stopped the run; it saved its step, and the same command resumes.

    Exit status 75 (EX_TEMPFAIL of sysexits.h): a job script may requeue the job. Ctrl-C exits with 130.
    """

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signal = number


def require_extra(extra: str, *modules: str, what: str) -> None:
    """Raise UserError for the first module that is not installed; `what` needs it and pip installs it as `extra`."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{what} needs {module}: pip install 'replug[{extra}]'")
