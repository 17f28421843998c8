"""What the chapter's notebook needs on a machine that is not set up: Kaggle's, Colab's.

install(root)                       # what is missing, and the checkout's package for child processes
if asked(train): ...
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

# of the package's dependencies those that training and its pages need; triton comes with torch where there is a GPU
NEEDED = ("torch", "numpy", "pandas", "matplotlib", "tabulate", "typer", "tqdm", "tokenizers", "safetensors")


def missing(root: Path) -> list[str]:
    """The requirements among NEEDED, by `pyproject.toml` of a checkout, that are not met: not there, or too old."""
    from packaging.requirements import Requirement  # a notebook's kernel needs it too

    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lacking = []
    for needed in map(Requirement, declared):
        if needed.name in NEEDED:
            there = [d.version for d in importlib.metadata.distributions(name=needed.name)]
            if not there or not needed.specifier.contains(there[0], prereleases=True):
                lacking.append(f"{needed.name}{needed.specifier}")
    return lacking


def install(root: Path) -> None:
    """Installs by pip what is missing, and lets this process and its children import the checkout's package."""
    if lacking := missing(root):
        print(f"installing {', '.join(lacking)}")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *lacking], check=True)
    sys.path[:0] = [str(root)] * (str(root) not in sys.path)
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("CS336_RESULTS", str(root / "results"))


def asked(train: str) -> bool:
    """Whether a notebook is to train: "yes", "no", or "auto", which is no while the book is built. ValueError for other
    words."""
    # papermill makes booleans of some words
    answers = {"yes": True, "true": True, "no": False, "false": False}
    answers["auto"] = os.environ.get("CS336_BOOK_BUILD") != "1"
    if (word := str(train).lower()) not in answers:
        raise ValueError(f"train={train!r}; allowed: auto, yes, no")
    return answers[word]


def writable(out: str) -> Path:
    """A run's folder `out`: in the current folder, or, where that is read-only as a data set's is, in the first of
    Kaggle's working folder, the home and the temporary folder that is not."""
    places = [Path.cwd(), Path("/kaggle/working"), Path.home(), Path(tempfile.gettempdir())]
    return next((place for place in places if os.access(place, os.W_OK)), places[0]) / out
