"""The room of the book: reads rows, and turns them into tables, figures and sentences. It never imports
torch.

A notebook's first cell is

    from cs336_systems import report
    chapter = report.Chapter.from_parameters("hardware", globals())
    chapter.measure()

and everything after it reads `chapter.rows()`.
"""

from cs336_systems.report import figures, tables
from cs336_systems.report.chapter import NOT_MEASURED, Chapter, say
from cs336_systems.report.tables import fmt, show

__all__ = ["NOT_MEASURED", "Chapter", "figures", "fmt", "say", "show", "tables"]
