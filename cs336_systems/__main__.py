"""`python -m cs336_systems` is `cs336`."""

from cs336_systems.cli import app

app(prog_name="cs336")
