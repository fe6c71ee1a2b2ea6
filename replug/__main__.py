"""`python -m replug` is the command `replug`."""

from replug.commands.cli import main

main()
