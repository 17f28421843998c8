"""`python -m cs336_systems` is `cs336`."""

import os
import signal


def _end(number: int, frame: object) -> None:
    """While the command is being imported there is nothing to clean up, and an exception would be the imports'."""
    os.write(2, b"Interrupted\n")
    os._exit(128 + number)


def main() -> None:
    """The command line, which an interrupt ends in a line from the first import on."""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background jobs ignore it
    if own:
        signal.signal(signal.SIGINT, _end)
    from cs336_systems.cli.main import app

    try:
        app(prog_name="cs336")
    finally:
        if own:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
