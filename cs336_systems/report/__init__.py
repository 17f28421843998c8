"""The room of the book: reads rows, turns them into tables and figures, and holds an author's sentences against them
(`prose`). It never imports torch.

A notebook's first cell is

    from cs336_systems import chapters
    chapter = chapters.opened("hardware", globals())
    chapter.measure()

and everything after it reads `chapter.rows()`.
"""

from cs336_systems.report import figures, tables
from cs336_systems.report.chapter import NOT_MEASURED, Chapter, given_parameters
from cs336_systems.report.tables import fmt, show

__all__ = ["NOT_MEASURED", "Chapter", "figures", "fmt", "given_parameters", "show", "tables"]
