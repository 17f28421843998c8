"""Wrong values for every command, and what the refusal must name: the value, and what is allowed.

`{place}` in an argument or a variable is the folder that `furnish` makes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from cs336_systems import chapters
from cs336_systems.store import rows

LONG = "x" * 300
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
    for table in (place / "results" / "h100-x1", place / "none-x1"):
        table.mkdir(parents=True)
        (table / "hardware.csv").write_text(",".join(rows.columns(hardware)) + "\n")
    (place / "results" / "reference.json").write_text(json.dumps({}))
    (place / "file").write_text("a file\n")
    (place / "folder").mkdir()
    for name, content in {
        "strange": ("h100-x1/nosuch.csv", b"a,b\n1,2\n"),
        "binary": ("h100-x1/hardware.csv", bytes(range(256))),
        "empty": ("h100-x1/hardware.csv", b""),
        "lacking": ("h100-x1/hardware.csv", b"kind,dtype\nlaunch,fp32\n"),
        "ragged": ("h100-x1/hardware.csv", b"kind,dtype\nlaunch,fp32,1,2,3\n"),
    }.items():
        file = place / name / content[0]
        file.parent.mkdir(parents=True)
        file.write_bytes(content[1])
    (place / "nested" / "h100-x1" / "hardware.csv").mkdir(parents=True)


PRESETS = ("allowed: auto, full, smoke",)
REFRESH = ("allowed: missing, stale, all",)
HOPPER = "allowed: 0, 1"
NO_MACHINE = ("unknown machine 'nosuch'", "h100-x1")
FIELDS = ("dtype=fp7", "allowed: all, bf16")

# Refused by `cs336` with exit code 2, before anything is run or measured.
COMMANDS = [
    # ---- the surface
    wrong("docter", says="docter"),
    wrong("--verson", says="--verson"),
    wrong("", "", says="No such command"),
    wrong("doctor now", says="now"),
    # ---- the environment
    wrong("doctor", says=("CS336_HOPPER='yes'", HOPPER), HOPPER="yes"),
    wrong("run hardware -p measure=no", says=("CS336_HOPPER='true'", HOPPER), HOPPER="true"),
    wrong("doctor", says=("CS336_NODES='x'", "from 1"), NODES="x"),
    wrong("doctor", says=("CS336_NODES='0'", "from 1"), NODES="0"),
    wrong("doctor", says=("CS336_RESULTS", "file is not a folder"), RESULTS="{place}/file"),
    wrong("run hardware -p measure=no", says=("CS336_RESULTS", "not a folder"), RESULTS="{place}/file"),
    wrong("run hardware", says=("CS336_RESULTS", "not a folder"), RESULTS="{place}/file/below"),
    wrong(ROOFS, says=("CS336_RESULTS", "not a folder"), RESULTS="/dev/null"),
    wrong(ROOFS, says=("CS336_RESULTS", LONG, "too long"), RESULTS=LONG),
    wrong("results merge {place}/none-x1", says=("CS336_RESULTS", "not a folder"), RESULTS="{place}/file"),
    wrong("book", says=("CS336_RESULTS", "not a folder"), RESULTS="{place}/file"),
    wrong("book", says="nowhere", RESULTS="{place}/nowhere"),
    wrong("book --claims", says="nowhere", RESULTS="{place}/nowhere"),
    wrong("book", says=NO_MACHINE, MACHINE="nosuch"),
    wrong("book --claims", says=NO_MACHINE, MACHINE="nosuch"),
    wrong("run hardware -p measure=no", says=NO_MACHINE, MACHINE="nosuch"),
    # ---- folders of benchmarks
    wrong("bench matrix --attention nosuch", says=("unknown attention 'nosuch'", "flash_torch, ")),
    wrong("bench matrix --wrapper fsdp", says=("unknown wrapper 'fsdp'", "none, naive, flat")),
    wrong("bench matrix --sharded maybe", says=("unknown sharded 'maybe'", "allowed: all, yes, no")),
    wrong("bench matrix --wrapper none --sharded yes", says=("--sharded yes", "no ranks")),
    wrong("bench matrix --size huge", says=("unknown size 'huge'", "mini, tiny, small")),
    wrong("bench matrix --compile yes", says=("unknown compile 'yes'", "off, attention, blocks")),
    wrong("bench matrix --steps 1", says=("steps=1", "from 2")),
    wrong("bench matrix --ranks -1", says="ranks=-1"),
    wrong("bench matrix --out {place}/file", says=("--out", "not a folder")),
    wrong("bench matrix --refresh never --out {place}/folder", says=("'never'", "allowed: missing, stale, all")),
    wrong("bench sweep --tiers 128:64,0:1", says=("tier '0:1'", "allowed: queries:keys")),
    wrong("bench sweep --attention flash", says=("unknown attention 'flash'", "reference_compiled")),
    wrong("bench sweep --head-dim 8", says=("head_dim=8", "from 16 to 256")),
    wrong("bench sweep --cap-gib -1", says=("cap_gib=-1", "from 0")),
    wrong("bench sweep --out /dev/null/x", says="--out /dev/null/x"),
    wrong("bench run --minutes 0", says=("minutes=0", "above 0")),
    wrong("bench run --refresh no", says=("'no'", *REFRESH)),  # and not its own defaults
    wrong("bench run --cap-gib x", says=("cap_gib=x", "from 0")),
    wrong("speedrun --minutes 0", says=("minutes=0", "above 0")),
    wrong("speedrun --dry-run --out /dev/null", says=("--out /dev/null", "not a folder")),
    wrong("speedrun --size huge", says=("size='huge'", "auto, mini")),
    wrong("speedrun --gib 1 --ranks 1 --dtype fp16 --size xl", says=("size='xl'", "allowed: mini, tiny")),
    # ---- run: chapters and options
    wrong("run hardwar", says=("unknown chapter 'hardwar'", "hardware")),
    wrong("run", "", says=("unknown chapter ''", "hardware")),
    wrong("run höhe", says=("unknown chapter 'höhe'", "hardware")),
    wrong("run parallelism", says=("unknown chapter 'parallelism'", "hardware")),
    wrong("run hardware nosuch", says=("unknown chapter 'nosuch'", "hardware")),
    wrong("run hardware --preset tiny", says=("'tiny'", *PRESETS)),
    wrong("run hardware --preset smoke -p preset=full", says="preset is given twice"),
    wrong("run hardware --refresh never", says=("'never'", *REFRESH)),
    wrong("run hardware -p measure=perhaps", says=("'perhaps'", "allowed: auto, yes, no")),
    wrong("run hardware --machine nosuch", says=NO_MACHINE),
    wrong("run hardware --machine h100-x1,nosuch", says=NO_MACHINE),
    wrong("run hardware --machine h100-x1 -p measure=yes", says=("measure=yes", "machine=this")),
    wrong("run hardware --colour red", says="--colour"),
    # ---- run: parameters
    wrong("run hardware -p", says="-p"),
    wrong("run hardware -p dtype", says="expected name=value"),
    wrong("run hardware -p =3", says="expected name=value"),
    wrong("run hardware -p dtype=bf16 -p dtype=fp32", says="dtype is given twice"),
    wrong("run hardware -p colour=red", says=("colour", "measure", "kind, dtype")),
    wrong("run hardware -p größe=1", says=("größe", "measure", "kind, dtype")),
    wrong("run -p head_dim=64", says=("head_dim", "measure", "backend")),
    wrong("run hardware -p size=512", says=("size", "measure", "kind, dtype")),  # of the cases, but no parameter
    wrong("run hardware -p dtype=fp7", says=FIELDS),
    wrong("run hardware -p dtype=", says=("dtype=", "allowed: all, bf16")),
    wrong("run hardware -p dtype=bf16,fp7", says=FIELDS),
    wrong("run hardware -p dtype=bf16,", says=("dtype=", "allowed: all, bf16")),
    wrong("run hardware -p dtype=all,bf16", says=("dtype=all", "allowed: all, bf16")),
    wrong("run hardware -p kind=None", says=("kind=None", "allowed: all, matmul")),
    wrong("run hardware -p kind=copy -p dtype=bf16", says="no case with kind=copy, dtype=bf16"),
    wrong("run flash_bench -p seq_len=128.0", says=("seq_len=128.0", "allowed: all, 128")),
    wrong(f"run flash_bench -p seq_len={MANY}", says=("seq_len=9", "allowed: all, 128")),
    wrong("run flash_bench -p heads=2.5", says=("heads=2.5", "allowed: all, 1")),
    wrong("run flash_bench -p impl=flash", says=("impl=flash ", "flash_triton")),
    wrong("run ddp -p world_size=3", says=("world_size=3", "allowed: all, ")),
    wrong("run ddp -p wrapper=bucket", says=("wrapper=bucket ", "bucketed")),
    wrong("run allreduce -p backend=mpi", says=("backend=mpi", "gloo")),
    wrong("run zero -p moment=never", says=("moment=never", "initialized")),
    wrong("run leaderboard -p part=sideways", says=("part=sideways", "forward")),
    wrong("run memory -p optimizer=sgd", says=("optimizer=sgd", "fused")),
    wrong("run profiling -p tool=perf", says=("tool=perf", "auto")),
    wrong("run torch_compile -p compile=maybe", says=("compile=maybe", "off")),
    wrong("run mixed_precision -p kind=stop", says=("kind=stop", "step")),
    wrong("run attention -p cap_gib=-1", says=("cap_gib=-1", "24")),
    wrong("run benchmarking -p warmup=-1", says=("warmup=-1", "allowed: all, ")),
    wrong("run hardware benchmarking -p dtype=bytes", says=("dtype=bytes", "fp32")),
    # ---- bench hardware
    wrong("bench hardware now", says="now"),
    wrong("bench hardware --colour red", says="--colour"),
    wrong("bench hardware --kind", says="--kind"),
    wrong("bench hardware --kind lunch", says=("kind=lunch", "allowed: all, matmul")),
    wrong("bench hardware --kind all copy", says=("kind=all", "allowed: all, matmul")),
    wrong("bench hardware --preset smoke --dtype fp7", says=("dtype=fp7", "allowed: all, bf16")),
    wrong("bench hardware --preset smoke --size 77", says=("size=77", "allowed: all, 256")),
    wrong("bench hardware --preset smoke --kind copy --dtype fp32", says="no case with kind=copy"),
    wrong("bench hardware --preset tiny", says=("'tiny'", *PRESETS)),
    wrong("bench hardware --refresh never", says=("'never'", *REFRESH)),
    wrong(f"{ROOFS} --json {{place}}/no/rows.json", says=("--json", "no/rows.json")),
    wrong(f"{ROOFS} --json {{place}}/folder", says=("--json", "folder")),
    wrong(f"{ROOFS} --json", "", says="--json"),
    # ---- numbers, wherever they stand
    wrong("speedrun --dry-run --minutes 1_0", says=("minutes='1_0'", "0 to 9")),
    wrong("speedrun --dry-run --ranks ２", says=("ranks='２'", "0 to 9")),
    wrong("generate x --temperature 1e-400", says=("temperature='1e-400'", "too small")),
    wrong("train --dry-run --learning-rate 1e-400", says=("learning_rate='1e-400'", "too small")),
    wrong("bench matrix --ranks １", says=("ranks='１'", "0 to 9")),
    wrong("bench run --minutes 1_0", says=("minutes=1_0", "above 0")),
    # ---- bench flash
    wrong(f"{FLASH} --seq-len 0", says=("seq_len=0", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len 1_28", says=("seq_len=1_28", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len １２８", says=("seq_len=１２８", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len 0 --dtype fp32 --seq-len=256", says=("seq_len=0", "1 to 16777216")),
    wrong(f"{FLASH} --json a.json b.json", says="unexpected extra argument"),
    wrong(f"{FLASH} --seq-len 1.5", says=("seq_len=1.5", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len {MANY}", says=(f"seq_len={MANY}", "1 to 16777216")),
    wrong(f"{FLASH} --seq-len 128,,256", says=("seq_len=", "1 to 16777216")),
    wrong(f"{FLASH} --head-dim 7 --seq-len 128 --dtype fp32", says=("head_dim=7", "16 to 256")),
    wrong(f"{FLASH} --head-dim 257", says=("head_dim=257", "16 to 256")),
    wrong(f"{FLASH} --heads two", says=("heads=two", "1 to 65536")),
    wrong(f"{FLASH} --dtype fp7", says=("unknown dtype 'fp7'", "allowed: bf16")),
    wrong(f"{FLASH} --impl warp", says=("unknown impl 'warp'", "allowed: flash_triton")),
    wrong(f"{FLASH} --json {{place}}/no/rows.json", says=("--json", "no/rows.json")),
    wrong("bench flash --tune", says="one --dtype"),
    wrong("bench flash --tune --json -", says=("--json -", "--tune")),
    wrong("bench flash --tune --dtype bf16", says="one --head-dim"),
    wrong("bench flash --tune --dtype bf16,fp32 --head-dim 64", says="one --dtype"),
    wrong("bench flash --tune --dtype bf16 --head-dim 64,128", says="one --head-dim"),
    wrong("bench flash --tune --dtype bf16 --head-dim 64 --seq-len 0", says=("seq_len=0", "1 to 16777216")),
    wrong("bench flash --tune --dtype bf16 --head-dim 64 --heads 1.5", says=("heads=1.5", "1 to 65536")),
    # ---- bench model
    wrong(MODEL.replace("tiny", "huge"), says=("unknown size 'huge'", "allowed: tiny, small")),
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
    wrong(f"{MODEL} --model :Class", says="module:Class"),
    wrong(f"{MODEL} --model .model:TransformerLM", says=("'.model:TransformerLM'", "module:Class")),
    wrong(f"{MODEL} --model json:JSONDecoder", says="'JSONDecoder' is no torch.nn.Module"),
    wrong(f"{MODEL} --model torch.nn:Linear", says="the constructor does not take"),
    wrong(f"{MODEL} --memory-snapshot {{place}}/m.pickle", says=("--memory-snapshot", "CUDA")),
    wrong(f"{MODEL} --json {{place}}/no/rows.json", says=("--json", "no/rows.json")),
    wrong(f"{MODEL} --refresh never", says=("'never'", *REFRESH)),
    wrong(f"{MODEL} --preset smoke", says="--preset"),
    # ---- results, book
    wrong("results merge", says="older"),
    wrong("results merge {place}/nowhere", says="nowhere"),
    wrong("results merge {place}/file", says="file"),
    wrong("results merge", LONG, says=LONG),
    wrong("results merge {place}/folder", says="holds no <machine>/<table>.csv"),
    wrong("results merge {place}/strange", says=("nosuch.csv", "hardware")),
    wrong("results merge {place}/binary", says="hardware.csv"),
    wrong("results merge {place}/empty", says=()),
    wrong("results merge {place}/lacking", says=("hardware.csv", "lacks")),
    wrong("results merge {place}/ragged", says="hardware.csv"),
    wrong("results merge {place}/nested", says="hardware.csv"),
    wrong("book now", says="now"),
]  # fmt: skip

# Refused by the first cell of a notebook that papermill runs: its output is one line, the last of papermill's.
# The first argument is the notebook; the others are papermill's.
NOTEBOOKS = [
    wrong("hardware -p dtype fp7", says=FIELDS),
    wrong("hardware -p dtype", "", says=("dtype=", "allowed: all, bf16")),
    wrong("hardware -p kind 5", says=("kind=5", "allowed: all, matmul")),
    wrong("hardware -r kind 5", says=("kind=5", "allowed: all, matmul")),
    wrong("hardware -p kind true", says=("kind=true", "allowed: all, matmul")),
    wrong("hardware -p preset tiny", says=("'tiny'", *PRESETS)),
    wrong("hardware -p preset 1.5", says=("1.5", *PRESETS)),
    wrong("hardware -p measure perhaps", says=("'perhaps'", "allowed: auto, yes, no")),
    wrong("hardware -p measure yes -p machine h100-x1", says=("measure=yes", "machine=this")),
    wrong("hardware -p machine nosuch", says=NO_MACHINE),
    wrong("hardware -p machine", "", says=("unknown machine ''", "h100-x1")),
    wrong("hardware -p refresh never", says=("'never'", *REFRESH)),
    wrong("hardware -p datatype bf16", says=("datatype", "measure", "kind, dtype")),
    wrong("hardware -p kind copy -p dtype bf16", says="no case with kind=copy, dtype=bf16"),
    wrong("hardware -y", "kind: [copy, lunch]", says=("kind=lunch", "allowed: all, matmul")),
    wrong("hardware -y", "kind: {lunch: 1}", says=("kind=lunch", "allowed: all, matmul")),
    wrong("hardware -y", "kind: null", says=("kind=None", "allowed: all, matmul")),
    wrong("hardware -y", "kind: []", says="no case with kind=[]"),
    wrong("hardware -y", "kind: [[copy]]", says=("kind=['copy']", "allowed: all, matmul")),
    wrong("hardware -y", "machine: [h100-x1]", says=("unknown machine", "h100-x1")),
    wrong("hardware -y", "preset: [full]", says=("['full']", *PRESETS)),
    wrong("hardware -y", "measure: []", says=("[]", "allowed: auto, yes, no")),
    wrong("hardware -p measure no", says=("CS336_HOPPER='yes'", HOPPER), HOPPER="yes"),
    wrong("hardware -p measure no", says=NO_MACHINE, MACHINE="nosuch"),
    wrong("hardware", says=("CS336_RESULTS", "not a folder"), RESULTS="{place}/file"),
    wrong("hardware -p measure no", says="nowhere", RESULTS="{place}/nowhere"),
    wrong("flash_bench -p seq_len 0", says=("seq_len=0", "allowed: all, 128")),
    wrong("flash_bench -p seq_len 128.5", says=("seq_len=128.5", "allowed: all, 128")),
    wrong(f"flash_bench -p seq_len {MANY}", says=("seq_len=9", "allowed: all, 128")),
    wrong("flash_bench -p head_dim 7", says=("head_dim=7", "allowed: all, ")),
    wrong("flash_bench -p impl warp", says=("impl=warp", "flash_triton")),
    wrong("leaderboard -p part sideways", says=("part=sideways", "forward")),
    wrong("parallelism -p devices 0", says=("devices=0", "from 2")),
    wrong("parallelism -p devices many", says=("devices='many'", "from 2")),
    wrong("parallelism -p devices 64.5", says=("devices=64.5", "from 2")),
    wrong("parallelism -p devices 100000000000 -p tensor 7", says=("devices=100000000000", "from 2")),
    wrong("parallelism -p tensor 64", says=("tensor=64", "allowed: 1, 2, 4")),
    wrong("parallelism -p tensor 0", says=("tensor=0", "from 1")),
    wrong("parallelism -p capacity_gb -1", says=("capacity_gb=-1", "positive")),
    wrong("parallelism -y", "capacity_gb: .nan", says=("capacity_gb=nan", "positive")),
    wrong("parallelism -y", "capacity_gb: [1]", says=("capacity_gb=[1]", "positive")),
    wrong("parallelism -y", "capacity_gb: null", says=("capacity_gb=None", "positive")),
    wrong("parallelism -p nonlinearity tanh", says=("'tanh'", "relu")),
    wrong("parallelism -y", "nonlinearity: [relu]", says=("['relu']", "relu")),
    wrong("parallelism -p tokens_per_device -1", says=("tokens_per_device=-1", "from 0")),
    wrong(f"parallelism -p tokens_per_device {MANY * 20}", says=("tokens_per_device=9", "from 0")),
    wrong("parallelism -p device 3", says=("device", "capacity_gb")),
    wrong("parallelism -p measure yes", says=("'yes'", "no")),
    wrong("index -p measure yes", says=("'yes'", "no")),
    wrong("index -p mesure no", says=("mesure", "measure")),
]  # fmt: skip
