"""Wrong values for every command, and what the refusal must name: the value, and what is allowed.

`{place}` in an argument or a variable is the folder that `furnish` makes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from cs336_systems import chapters
from cs336_systems.store import rows

MANY = "9" * 20
MODEL = "bench model --size tiny --context-length 16 --mode forward --steps 1 --warmup 5"
FLASH = "bench flash --preset smoke"
ROOFS = "bench hardware --preset smoke --kind launch --size 1"


@dataclass(frozen=True)
class Wrong:
    """A call that is to be refused. `says`: what the refusal names."""

    arguments: tuple[str, ...]
    says: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, *(a if len(a) < 60 else f"{a[:9]}..." for a in self.arguments)])


def wrong(command: str, *more: str, says: str | tuple[str, ...], **environment: str) -> Wrong:
    """`command` is split at blanks, `more` arguments are taken as they are; `environment` without the CS336_."""
    variables = {f"CS336_{name}": value for name, value in environment.items()}
    return Wrong((*command.split(), *more), (says,) if isinstance(says, str) else says, variables)


def furnish(place) -> None:
    """What the calls of the table find: results of a machine, files and folders, broken tables."""
    hardware = chapters.load("hardware")
    table = place / "results" / "h100-x1" / "hardware.csv"
    table.parent.mkdir(parents=True)
    table.write_text(",".join(rows.columns(hardware)) + "\n")
    (place / "results" / "reference.json").write_text(json.dumps({}))
    (place / "file").write_text("a file\n")
    (place / "folder").mkdir()
    for name, table, content in (
        ("strange", "nosuch", "a,b\n1,2\n"),
        ("ragged", "hardware", "kind,dtype\nlaunch,fp32,1,2,3\n"),
    ):
        (place / name / "h100-x1").mkdir(parents=True)
        (place / name / "h100-x1" / f"{table}.csv").write_text(content)


PRESETS = ("allowed: auto, full, smoke",)
REFRESH = ("allowed: missing, stale, all",)
HOPPER = "allowed: 0, 1"
NO_MACHINE = ("unknown machine 'nosuch'", "h100-x1")
FIELDS = ("dtype=fp7", "allowed: all, bf16")

# Refused by `cs336` with exit code 2, before anything is run or measured.
COMMANDS = [
    # ---- the surface
    wrong("docter", says="docter"),
    # ---- the environment
    wrong("doctor", says=("CS336_HOPPER='yes'", HOPPER), HOPPER="yes"),
    wrong("run hardware", says=("no results folder", "/file/below"), RESULTS="{place}/file/below"),
    wrong("book", says=("no results folder", "/file"), RESULTS="{place}/file"),
    wrong("book", says="nowhere", RESULTS="{place}/nowhere"),
    wrong("book", says=NO_MACHINE, MACHINE="nosuch"),
    wrong("run hardware -p measure=no", says=NO_MACHINE, MACHINE="nosuch"),
    # ---- folders of benchmarks
    wrong("bench matrix --attention nosuch", says=("unknown attention 'nosuch'", "flash_torch, ")),
    wrong("bench matrix --wrapper fsdp", says=("unknown wrapper 'fsdp'", "none, naive, flat")),
    wrong("bench matrix --sharded maybe", says=("unknown sharded 'maybe'", "allowed: all, yes, no")),
    wrong("bench matrix --wrapper none --sharded yes", says=("--sharded yes", "no ranks")),
    wrong("bench matrix --steps 1", says=("steps=1", "from 2")),
    wrong("bench matrix --ranks -1", says="ranks=-1"),
    wrong("bench matrix --out {place}/file", says="/file: it is not a folder"),
    wrong("bench sweep --tiers 128:64,0:1", says=("tier '0:1'", "allowed: queries:keys")),
    wrong("bench sweep --head-dim 8", says=("head_dim=8", "from 16 to 256")),
    wrong("bench sweep --cap-gib -1", says=("cap_gib=-1", "from 0")),
    wrong("bench run --minutes 0", says=("minutes=0", "above 0")),
    wrong("bench run --refresh no", says=("'no'", *REFRESH)),  # and not its own defaults
    wrong("speedrun --minutes 0", says=("minutes=0", "above 0")),
    wrong("speedrun --gib 1 --ranks 1 --dtype fp16 --size xl", says=("size='xl'", "allowed: mini, tiny")),
    wrong("speedrun --minutes 5 --full --dry-run", says="--full and --minutes 5 contradict each other"),
    wrong("export {place}/folder --hf {place}/new", says="neither a checkpoint nor the folder of a run"),
    # ---- run: chapters and options
    wrong("run hardwar", says=("unknown chapter 'hardwar'", "hardware")),
    wrong("run parallelism", says=("unknown chapter 'parallelism'", "hardware")),
    wrong("run hardware --preset tiny", says=("'tiny'", *PRESETS)),
    wrong("run hardware --preset smoke -p preset=full", says="preset is given twice"),
    wrong("run hardware --refresh never", says=("'never'", *REFRESH)),
    wrong("run hardware -p measure=perhaps", says=("'perhaps'", "allowed: auto, yes, no")),
    wrong("run hardware --machine h100-x1,nosuch", says=NO_MACHINE),
    wrong("run hardware --machine h100-x1 -p measure=yes", says=("measure=yes", "machine=this")),
    # ---- run: parameters
    wrong("run hardware -p dtype", says="expected name=value"),
    wrong("run hardware -p =3", says="expected name=value"),
    wrong("run hardware -p dtype=bf16 -p dtype=fp32", says="dtype is given twice"),
    wrong("run hardware -p colour=red", says=("colour", "measure", "kind, dtype")),
    wrong("run -p head_dim=64", says=("head_dim", "measure", "backend")),
    wrong("run hardware -p size=512", says=("size", "measure", "kind, dtype")),  # of the cases, but no parameter
    wrong("run hardware -p dtype=", says=("dtype=", "allowed: all, bf16")),
    wrong("run hardware -p dtype=bf16,fp7", says=FIELDS),
    wrong("run hardware -p kind=copy -p dtype=bf16", says="no case with kind=copy, dtype=bf16"),
    wrong("run flash_bench -p seq_len=128.0", says=("seq_len=128.0", "allowed: all, 128")),
    wrong(f"run flash_bench -p seq_len={MANY}", says=("seq_len=9", "allowed: all, 128")),
    wrong("run benchmarking -p warmup=-1", says=("warmup=-1", "allowed: all, ")),
    # ---- bench hardware
    wrong("bench hardware --kind lunch", says=("kind=lunch", "allowed: all, matmul")),
    wrong("bench hardware --kind all copy", says=("kind=all", "allowed: all, matmul")),
    wrong("bench hardware --preset smoke --size 77", says=("size=77", "allowed: all, 256")),
    wrong(f"{ROOFS} --json {{place}}/no/rows.json", says=("--json", "no/rows.json")),
    wrong(f"{ROOFS} --json", "", says="--json"),
    # ---- numbers, wherever they stand
    wrong("speedrun --dry-run --minutes 1_0", says=("minutes='1_0'", "0 to 9")),
    wrong("speedrun --dry-run --ranks ２", says=("ranks='２'", "0 to 9")),
    wrong("generate x --temperature 1e-400", says=("temperature='1e-400'", "too small")),
    # ---- bench flash
    wrong(f"{FLASH} --seq-len 0", says=("seq_len=0", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len １２８", says=("seq_len=１２８", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len 0 --dtype fp32 --seq-len=256", says=("seq_len=0", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len {MANY}", says=(f"seq_len={MANY}", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len 128,,256", says=("seq_len=", "1 to 16777216")),
    wrong(f"{FLASH} --head-dim 257", says=("head_dim=257", "16 to 256")),
    wrong(f"{FLASH} --heads two", says=("heads=two", "1 to 65536")),
    wrong(f"{FLASH} --dtype fp7", says=("unknown dtype 'fp7'", "allowed: bf16")),
    wrong(f"{FLASH} --impl warp", says=("unknown impl 'warp'", "allowed: flash_triton")),
    wrong("bench flash --tune", says="one --dtype"),
    wrong("bench flash --tune --json -", says=("--json -", "--tune")),
    wrong("bench flash --tune --dtype bf16", says="one --head-dim"),
    # ---- bench model
    wrong(MODEL.replace("tiny", "tiny huge"), says=("unknown size 'huge'", "allowed: tiny, small")),
    wrong(f"{MODEL} --context-length 0", says=("context_length=0", "1 to 1048576")),
    wrong(f"{MODEL} --mode backward", says=("unknown mode 'backward'", "forward_backward")),
    wrong(f"{MODEL} --dtype fp7", says=("unknown dtype 'fp7'", "allowed: fp32")),
    wrong(f"{MODEL} --attention warp", says=("unknown attention 'warp'", "flash_triton")),
    wrong(f"{MODEL} --batch 2.5", says=("batch=2.5", "1 to 65536")),
    wrong(f"{MODEL} --warmup=-1", says=("warmup=-1", "0 to 10000")),
    wrong(f"{MODEL} --steps 0", says=("steps=0", "1 to 10000")),
    wrong(f"{MODEL} --compile-mode maybe", says=("unknown compile 'maybe'", "allowed: off")),
    wrong(f"{MODEL} --compile --compile-mode off", says=("--compile-mode off", "contradict")),
    wrong(f"{MODEL} --model nosuch:Class", says="there is no module 'nosuch'"),
    wrong(f"{MODEL} --model cs336_systems.model", says="module:Class"),
    wrong(f"{MODEL} --model cs336_systems.model:Nothing", says=("'Nothing'", "TransformerLM")),
    wrong(f"{MODEL} --model json:JSONDecoder", says="'JSONDecoder' is no torch.nn.Module"),
    wrong(f"{MODEL} --model torch.nn:Linear", says="the constructor does not take"),
    wrong(f"{MODEL} --memory-snapshot {{place}}/m.pickle", says=("--memory-snapshot", "CUDA")),
    # ---- results, book
    wrong("results merge", says="older"),
    wrong("results merge {place}/nowhere", says="nowhere"),
    wrong("results merge {place}/folder", says="holds no <machine>/<table>.csv"),
    wrong("results merge {place}/strange", says=("nosuch.csv", "hardware")),
    wrong("results merge {place}/ragged", says="hardware.csv"),
]  # fmt: skip

# Refused by the first cell of a notebook that papermill runs: its output is one line, the last of papermill's.
# The first argument is the notebook; the others are papermill's.
NOTEBOOKS = [
    wrong("hardware -p dtype fp7", says=FIELDS),
    wrong("hardware -p measure yes -p machine h100-x1", says=("measure=yes", "machine=this")),
    wrong("hardware -p machine nosuch", says=NO_MACHINE),
    wrong("hardware -p datatype bf16", says=("datatype", "measure", "kind, dtype")),
    wrong("hardware -y", "kind: null", says=("kind=None", "allowed: all, matmul")),
    wrong("hardware -y", "machine: [h100-x1]", says=("unknown machine", "h100-x1")),
    wrong("hardware -y", "measure: []", says=("[]", "allowed: auto, yes, no")),
    wrong("hardware -p measure no", says=("CS336_HOPPER='yes'", HOPPER), HOPPER="yes"),
    wrong("hardware -p measure no", says=NO_MACHINE, MACHINE="nosuch"),
    wrong("hardware", says=("no results folder", "/file"), RESULTS="{place}/file"),
    wrong("flash_bench -p seq_len 128.5", says=("seq_len=128.5", "allowed: all, 128")),
    wrong("parallelism -y", "capacity_gb: .nan", says=("capacity_gb=nan", "positive")),
    wrong(f"parallelism -p tokens_per_device {MANY * 20}", says=("tokens_per_device=9", "from 0")),
    wrong("parallelism -p device 3", says=("device", "capacity_gb")),
    wrong("index -p measure yes", says=("'yes'", "no")),
    wrong("index -p mesure no", says=("mesure", "measure")),
]  # fmt: skip
