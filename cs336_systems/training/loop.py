"""The training loop: on one device, or on a rank among several with any of the data-parallel wrappers.

    Trainer(config, data, rank=None).run()

A step does not depend on the number of ranks: `batch.sequences` windows of the text, their mean loss, its gradients
averaged, clipped, and one update. A checkpoint holds all that the next step depends on.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from cs336_systems.accounting import mfu, peaks
from cs336_systems.launch.group import Rank
from cs336_systems.model import build
from cs336_systems.parallel.agreement import agreement
from cs336_systems.parallel.fsdp import FullyShardedDataParallel, ShardedGradScaler
from cs336_systems.store import files
from cs336_systems.training import checkpoints, modes, optimizer, resuming
from cs336_systems.training.batches import Batches, Data
from cs336_systems.training.clock import Clock
from cs336_systems.training.config import TrainingConfig, for_ranks
from cs336_systems.training.log import RunLog, recording

if TYPE_CHECKING:
    from cs336_systems.parallel.sharded_state import ShardedState

_INSIDE = "model."  # where a wrapper's module, `modes.WithLoss`, has the model
STOP = "stop"  # a file of this name in the run's folder asks for an end at the next line of the log


class TrainingError(RuntimeError):
    """A run that cannot go on; says at which step, why, and what was saved."""


class Trainer:
    """One rank of a run, from its weights to its last checkpoint.

    rank: as the launcher gives it, inside its process group; None: this process alone. resumed: `resume` follows, so
    `checkpoints.init_from` is not read. Errors: ValueError for what does not fit (batch and ranks, texts shorter than a
    window), StoreError, TrainingError.
    """

    def __init__(
        self, config: TrainingConfig, data: Data, rank: Rank | None = None, resumed: bool = False
    ) -> None:
        self.config, self.data = config, data
        self.tokenizer = data.tokenizer.read_bytes() if data.tokenizer else b""  # each checkpoint has it
        self.number, self.world = (rank.rank, rank.world_size) if rank else (0, 1)
        self.device = rank.device if rank else modes.device_of(config.run.device)
        self.dtype = modes.dtype_of(config.run.dtype, self.device)
        self.sequences = for_ranks(config, self.world)
        self.out, self.folder = Path(config.out), Path(config.out) / "checkpoints"
        modes.settle(self.dtype, config.run.deterministic)
        sizes = self.sizes = config.model.sizes(data.vocab_size)
        torch.manual_seed(config.run.seed)
        impl, on_cpu = config.model.attention, self.device == "cpu"  # there fused code is by far the fastest
        self.model = build(sizes, "sdpa" if on_cpu and impl == "auto" else impl, device=self.device)
        self._whose = f"model.size={config.model.size!r}"  # what errors about weights name
        if (begun := config.checkpoints.init_from) and not resumed:
            checkpoints.into(self.model, checkpoints.weights_of(Path(begun).expanduser()), self._whose)
        begin = data.end_of_text if config.text.documents == "packed" else None
        n = sizes.context_length
        self.batches = Batches(data.train, n, config.batch.sequences, config.batch.seed, begin=begin)
        self.held_out = Batches(data.valid, n, 1, 0, "valid", begin)
        # before weights are sharded, which groups them by their shapes
        self.optimizer = optimizer.make(self.model, config.optimizer)
        with_loss = modes.WithLoss(self.model)
        self.wrapped, self.finish = modes.wrap(with_loss, config.run, config.parallel, self.world, self.dtype)
        # a sharded model never keeps whole gradients; ranks whose scaled shards overflow skip a step together
        self.sharded = self.wrapped if isinstance(self.wrapped, FullyShardedDataParallel) else None
        scaler = ShardedGradScaler if self.sharded else torch.amp.GradScaler
        self.scaler = scaler(self.device.split(":")[0], enabled=self.dtype == "fp16", init_scale=2.0**16)
        self.step, self.best = 0, math.inf
        self.step_tokens = config.batch.sequences * n
        kind, length = config.schedule.length
        epochs = length * self.batches.steps_per_epoch
        steps = {"steps": length, "tokens": length / self.step_tokens, "epochs": epochs}.get(kind)
        self.total = None if steps is None else max(1, math.ceil(steps))  # None: minutes decide
        self.clock = Clock(60 * length if kind == "minutes" else math.inf, self.device, self.world)
        self.loss = torch.zeros((), device=self.device)  # of the last step, on this rank
        self._sum = torch.zeros((), device=self.device)  # of the losses since the last line of the log
        self._count = 0
        self._norm = self.loss  # of the last step's gradient
        self._asked_to_stop = False
        self._saved, self._saved_s = -1, time.monotonic()  # the step, and when it was saved last, or began

    # ------------------------------------------------------------------------------------------------------- a step
    def progress(self, ahead: int = 0) -> float:
        """The share of the run that is done, or will be so many steps later."""
        return self.clock.progress(ahead) if self.total is None else (self.step + ahead) / self.total

    def _tensors(self, arrays: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
        tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]
        if self.device == "cpu":
            return tensors
        return [x.pin_memory().to(self.device, non_blocking=True) for x in tensors]

    def train_step(self) -> torch.Tensor | None:
        """One optimizer step; the norm of its gradients before clipping."""
        config = self.config
        done = self.progress(ahead=1)
        for group in self.optimizer.param_groups:
            group["lr"] = optimizer.learning_rate(config.schedule, config.optimizer.learning_rate, done)
        accumulate = config.batch.accumulate
        self.loss = torch.zeros((), device=self.device)
        for micro in range(accumulate):
            part = micro * self.world + self.number
            batch = self._tensors(self.batches.at(self.step, part, accumulate * self.world))
            reduced = self.sharded or micro == accumulate - 1
            with nullcontext() if reduced else getattr(self.wrapped, "no_sync", nullcontext)():
                with modes.autocast(self.dtype, self.device):
                    loss = self.wrapped(*batch)
                self.scaler.scale(loss / accumulate).backward()
            self.loss += loss.detach() / accumulate
            if reduced:
                self.finish()
        self._sum += self.loss
        self._count += 1
        self.scaler.unscale_(self.optimizer)
        largest, weights = config.optimizer.clip or math.inf, self.model.parameters()
        norm = self.sharded.clip_grad_norm_(largest) if self.sharded else clip_grad_norm_(weights, largest)
        self._norm = norm
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return norm

    # ---------------------------------------------------------------------------------------------------- evaluation
    @torch.no_grad()
    def evaluate(self, everything: bool = False) -> float:
        """Mean loss on the held-out text, nats a token: of its first `evaluation.tokens`, or of all."""
        windows = self.held_out.windows
        limit = self.config.evaluation.tokens
        if limit and not everything:
            windows = min(windows, max(1, limit // self.sizes.context_length))
        mine = range(self.number, windows, self.world)
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        # as often as the first rank, which has the most: a sharded model is called by all
        for start in range(0, math.ceil(windows / self.world), self.sequences):
            some = mine[start : start + self.sequences]
            ids, targets, *documents = self._tensors(self.held_out.windows_at(some or range(1)))
            with modes.autocast(self.dtype, self.device):
                logits = self.model(ids, *documents)
            if some:
                nats += F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        if self.world > 1:
            dist.all_reduce(nats)
        return nats.item() / (windows * self.sizes.context_length)

    def bits_per_byte(self, loss: float | None) -> float | None:
        """A loss in nats a token as bits a byte of the held-out text; None where its tokens are not all of it."""
        size = self.data.valid_bytes
        return loss / math.log(2) * (len(self.data.valid) / size) if size and loss is not None else None

    # --------------------------------------------------------------------------------------------------- checkpoints
    @property
    def place(self) -> Path:
        """Where the checkpoint of this step is, once it is saved."""
        return self.folder / f"step-{self.step:08d}"

    def _sharded_state(self) -> ShardedState:
        from cs336_systems.parallel.sharded_state import ShardedState  # most of a second: torch's checkpoints

        return ShardedState(self.sharded, self.optimizer)

    def save(self) -> None:
        """Writes a checkpoint, once a step; all ranks call it. StoreError where rank 0 cannot, ValueError on others."""
        if self._saved == self.step:
            return
        if self.sharded:
            named, moments = self._sharded_state().full_state_dict()
            weights = {name.removeprefix(_INSIDE): tensor for name, tensor in named.items()}
        else:
            weights, moments = self.model.state_dict(), self.optimizer.state_dict()
        own = {"cpu": torch.get_rng_state(), "sum": self._sum.cpu()}
        if self.device != "cpu":
            own["cuda"] = torch.cuda.get_rng_state(self.device)
        ranks: list[Any] = [own]
        if self.world > 1:
            ranks = [None] * self.world
            dist.all_gather_object(ranks, own)
        with agreement(dist.group.WORLD if self.world > 1 else None):
            if self.number == 0:
                sums = torch.stack([rank.pop("sum") for rank in ranks])
                state = {"scaler": self.scaler.state_dict(), "random": ranks, "sum": sums}
                about = {
                    "count": self._count, "seconds": self.clock.seconds, "data": dict(self.data.files),
                    "best": self.best if math.isfinite(self.best) else None, "dtype": self.dtype,
                    "vocab_size": self.data.vocab_size, "config": self.config.to_dict(),
                }  # fmt: skip
                checkpoints.save(self.folder, self.step, weights, moments, state, about, self.tokenizer)
                checkpoints.keep(self.folder, self.config.checkpoints.keep, self.step)
        self._saved, self._saved_s = self.step, time.monotonic()

    def resume(self, path: Path) -> None:
        """Takes up a run where a checkpoint left it; StoreError for one that is not sound, ValueError for one of
        another run (`resuming.check`)."""
        about, weights, moments, state = checkpoints.load(path)
        resuming.check(path, about, self.config, self.dtype)
        for saved, own in zip(moments["param_groups"], self.optimizer.param_groups, strict=True):
            saved |= own | {"params": saved["params"]}  # settings may be others by now
        if self.sharded:
            named = {_INSIDE + name: tensor for name, tensor in weights.items()}
            self._sharded_state().load_full_state_dict(named, moments)
        else:
            checkpoints.into(self.model, weights, self._whose)
            self.optimizer.load_state_dict(moments)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        sums = state["sum"].reshape(-1)  # of each rank; older checkpoints have the first one's alone
        self._sum.copy_(sums[self.number] if len(sums) == self.world else sums.mean())
        if len(state["random"]) == self.world:
            random = state["random"][self.number]
            torch.set_rng_state(random["cpu"])
            if self.device != "cpu" and "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"], self.device)
        with files.reading(path / "checkpoint.json"):
            self.step, self._count = about["step"], about["count"]
            self.clock.resume(about["seconds"], self.step)
            before = checkpoints.config_of(path, about).evaluation.tokens  # of the held-out text
            comparable = about["best"] is not None and before == self.config.evaluation.tokens
            self.best = about["best"] if comparable else math.inf

    # -------------------------------------------------------------------------------------------------------- the run
    def run(self) -> dict[str, Any]:
        """Trains to the end, or until it is asked to stop; what came of it, as JSON has it."""
        leads = self.number == 0
        told = closing(RunLog(self.config, self.step, self.total)) if leads else nullcontext()
        count = self.config.run.profile if leads else 0
        traces = recording(self.out, count) if count else nullcontext(lambda: None)
        with told as log, on_sigterm(self._ask_to_stop), traces as traced:
            valid = self._steps(log, traced)
        if leads:
            (self.out / STOP).unlink(missing_ok=True)  # it was for this run
        return {
            "step": self.step, "tokens": self.step * self.step_tokens, "valid_loss": valid,
            "seconds": self.clock.seconds, "bits_per_byte": self.bits_per_byte(valid), "floor": self.data.floor,
            "stopped": valid is None, "checkpoint": str(self.place),
        }  # fmt: skip

    def _steps(self, log: RunLog | None, traced: Callable[[], None]) -> float | None:
        """The loss of all the held-out text in the end; None of a run that was stopped before."""
        config, clock, valid = self.config, self.clock, None
        seconds, timed = clock.seconds, clock.timed  # at the last line of the log
        clock.start()
        while not self._asked_to_stop and self.progress() < 1:
            norm = self.train_step()
            clock.stepped()
            traced()
            ends, row = self.progress() >= 1, {}
            line, evaluation, saving = (
                every > 0 and self.step % every == 0
                for every in (config.logging.every, config.evaluation.every, config.checkpoints.every)
            )
            if not (ends or line or evaluation or saving):
                continue
            clock.ask()
            if ends or line:
                row, late = self._line(norm, clock.seconds - seconds, clock.timed - timed)
                saving |= late
                seconds, timed = clock.seconds, clock.timed
            if ends or evaluation:
                loss = self.evaluate(everything=ends)
                self._sum += 0 * loss  # for `_check_losses`
                row |= {"valid_loss": loss, "bits_per_byte": self.bits_per_byte(loss)}
                valid = loss if ends else None
            if log and row:
                log.row({"step": self.step, "tokens": self.step * self.step_tokens} | row)
            if ends and config.evaluation.tokens:  # the best by the same part of the text
                loss = self.evaluate()
            if (ends or evaluation) and loss < self.best:
                self.best = loss
                if config.checkpoints.best:
                    self.save()
                    if log:  # `checkpoints.best_of` reads it
                        files.replace({self.folder / "best": self.place.name})
                elif log:  # the one that was kept is the best no longer
                    (self.folder / "best").unlink(missing_ok=True)
            if saving and not ends:
                self._check_losses()
                self.save()
            clock.start()  # these are no steps
        clock.ask()
        self._check_losses()
        if valid is None and self.progress() >= 1:  # it goes on from its end, or was stopped there
            valid = self.evaluate(everything=True)
        self.save()
        return valid

    def _line(self, norm: torch.Tensor | None, seconds: float, steps: int) -> tuple[dict[str, Any], bool]:
        """What came since the last line, timed as so many steps. Has all ranks agree on whether to stop, and on what it
        returns beside: whether by rank 0's clock a checkpoint is due."""
        asked = self._asked_to_stop or (self.number == 0 and (self.out / STOP).is_file())
        often = self.config.checkpoints
        late = time.monotonic() - self._saved_s >= 60 * (often.minutes if often.every >= 0 else 0) > 0
        mine = [self._check_losses(), asked, late and self.number == 0]
        told = torch.tensor(mine, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(told)
        if told[1].item() > 0:  # not its value: SIGTERM may have come meanwhile
            self._asked_to_stop = True
        self._sum.zero_()
        self._count = 0
        on_gpu = self.device != "cpu"
        row = {
            "epoch": self.step / self.batches.steps_per_epoch, "seconds": self.clock.seconds,
            "loss": told[0].item() / self.world, "learning_rate": self.optimizer.param_groups[0]["lr"],
            "grad_norm": None if norm is None else float(norm),
            "tokens_per_s": steps * self.step_tokens / seconds if seconds else None,
            "mfu": self._mfu(1e3 * seconds / steps) if seconds and on_gpu else None,
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30 if on_gpu else None,
            "skipped_steps": self.skipped_steps() if self.scaler.is_enabled() else None,
        }  # fmt: skip
        return row, told[2].item() > 0

    def skipped_steps(self) -> int:
        """Steps that the gradient scaler has skipped: those that the optimizer did not make."""
        made = max((int(s["step"]) for s in self.optimizer.state.values() if "step" in s), default=0)
        return self.step - made

    def _check_losses(self) -> float:
        """The mean loss since the last line; TrainingError where one was not finite, on held-out text neither, or the
        last step's gradient, which has spoiled the weights before a loss shows it (fp16 skips such a step)."""
        shows_later = 0 if self.scaler.is_enabled() else 0 * self._norm
        mean = ((self._sum + shows_later) / max(self._count, 1)).item()
        if not math.isfinite(mean):
            first = self.step - self._count + 1
            where = f"step {self.step}" if first >= self.step else f"steps {first} to {self.step}"
            path = checkpoints.newest_sound(self.folder)
            last = f"the last good checkpoint is {path}" if path else "no checkpoint was saved before"
            raise TrainingError(f"the loss, or its gradient, is not finite in {where}; {last}")
        return mean

    def _mfu(self, ms: float) -> float | None:
        """Of packed windows too by the pairs of a stream, though those of different documents need no FLOPs."""
        known = peaks(torch.cuda.get_device_name(self.device))
        if not (tflops := known.tflops.get(self.dtype) if known else None):
            return None
        sequences, length = self.config.batch.sequences, self.sizes.context_length
        return mfu(self.sizes, sequences, length, "train_step", ms, tflops * self.world)

    def _ask_to_stop(self) -> None:
        """For an end after the step (of several ranks: at the next line of the log)."""
        self._asked_to_stop = self.world == 1
        if self.world > 1:
            (self.out / STOP).touch()


@contextmanager
def on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """Within its block SIGTERM calls `act`, in the main thread, which alone hears signals."""
    hears = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: act()) if hears else None
    try:
        yield
    finally:
        if hears:
            signal.signal(signal.SIGTERM, before)
