"""Wrong values that only a kernel can refuse: each one by papermill, in a process of its own. Minutes in all."""

import json
import os
import subprocess
import sys

import pytest
import wrong_values

pytestmark = pytest.mark.chaos


def refusal(arguments, place, root, **environment):
    """papermill's last line after a notebook of the checkout was refused, and the output of the cell that did it."""
    notebook, *more = (argument.replace("{place}", str(place)) for argument in arguments)
    variables = {name: value.replace("{place}", str(place)) for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, "-m", "papermill", str(root / "book" / f"{notebook}.ipynb"), "out.ipynb", *more],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(root), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0, "nothing was refused"
    cells = json.loads((place / "out.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return done.stderr.strip().splitlines()[-1], outputs


@pytest.mark.parametrize("case", wrong_values.NOTEBOOKS, ids=lambda case: case.id)
def test_the_first_cell_ends_in_one_line(case, tmp_path, project_root):
    wrong_values.furnish(tmp_path)
    environment = {"CS336_RESULTS": "{place}/results", **case.environment}
    line, [output] = refusal(case.arguments, tmp_path, project_root, **environment)
    assert all(part in line for part in case.says), line
    assert output["output_type"] == "error" and output["traceback"] == [line]


def test_outside_a_checkout(tmp_path, project_root):
    line, [output] = refusal(["hardware"], tmp_path, project_root, CS336_RESULTS="")
    assert "results/reference.json" in line and output["traceback"] == [line]
