"""How long things take: candidates in `turns`, by the clock of single `calls`, of `steps`, or of several `ranks`."""
