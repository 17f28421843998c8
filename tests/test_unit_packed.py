"""Training on packed documents: where they begin, and that none sees another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import distributed  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from cs336_systems.attention import availability, registry  # noqa: E402
from cs336_systems.launch.group import Rank  # noqa: E402
from cs336_systems.model import TransformerLM, choose_attention  # noqa: E402
from cs336_systems.training import config, forecast, modes, pipeline  # noqa: E402
from cs336_systems.training.batches import Batches  # noqa: E402
from cs336_systems.training.loop import Data, Trainer  # noqa: E402

END, VOCAB, CONTEXT = 3, 50, 24
ON_GPU = torch.cuda.is_available()
SERVING = [
    pytest.param(
        name, marks=pytest.mark.skipif(availability()[name] is not None, reason=str(availability()[name]))
    )
    for name in registry.serving("cu_seqlens", "enable_gqa")
]


def data(seed=0):
    """Documents of 0 to 40 tokens, one after another, each ended by END."""
    random = np.random.default_rng(seed)
    text = [np.append(random.integers(4, VOCAB, random.integers(0, 40)), END) for _ in range(150)]
    ids = np.concatenate(text).astype(np.uint16)
    return Data(ids[:2000], ids[2000:2500], VOCAB, 500, end_of_text=END)


def batches(begin=END, sequences=4, seed=0):
    return Batches(data(seed).train, CONTEXT, sequences, seed, begin=begin)


def made(out="unused", **changes):
    told = {
        "out": str(out), "text.documents": "packed", "tokenizer.vocab_size": 300, "schedule.steps": 4,
        "batch.sequences": 4, "model.size": "tiny", "model.d_model": 32, "model.d_ff": 32, "model.num_heads": 2,
        "model.context_length": CONTEXT, "run.device": "cpu", "optimizer.learning_rate": 0.01,
    }  # fmt: skip
    return config.load(None, told | {name.replace("__", "."): value for name, value in changes.items()})


def tensors(arrays, device="cpu"):
    return [torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in arrays]


def loss_alone(model, ids, targets):
    """The mean loss of a batch, by its documents on their own: cut before each END and where a sequence begins."""
    total = 0
    for row, of_row in zip(ids, targets, strict=True):
        cuts = sorted({0, *(row == END).nonzero().flatten().tolist(), len(row)})
        for begin, end in pairwise(cuts):
            logits = model(row[None, begin:end])
            total += F.cross_entropy(logits.flatten(0, 1), of_row[begin:end], reduction="sum")
    return total / targets.numel()


# ------------------------------------------------------------------------------------------------ where they begin
def test_documents_begin_with_windows_and_with_ends_of_text():
    text = np.array([5, 6, END, 7, 8, END, END, 9, 5, END, 6, 7, 8], np.uint16)
    found = Batches(text, 4, 3, 0, begin=END).windows_at(range(3))
    ids, targets, cu_seqlens = found
    assert ids.tolist() == [[5, 6, END, 7], [8, END, END, 9], [5, END, 6, 7]]
    assert targets[0].tolist() == [6, END, 7, 8]
    assert cu_seqlens.dtype == np.int32 and cu_seqlens.tolist() == [0, 2, 4, 5, 6, 8, 9, *6 * [12]]
    assert len(Batches(text, 4, 3, 0).windows_at(range(3))) == 2  # a stream


def test_all_steps_have_one_shape_and_parts_are_of_one_step():
    whole = batches(sequences=8)
    of_all = [whole.at(step) for step in range(20)]
    assert {x[2].shape for x in of_all} == {(8 * CONTEXT + 1,)}
    assert len({tuple(x[2]) for x in of_all}) == 20
    for ids, _, cu_seqlens in of_all:
        begins = cu_seqlens[cu_seqlens < ids.size]
        assert (np.diff(begins) > 0).all() and set(range(0, ids.size, CONTEXT)) <= set(begins)
        assert set(begins) - set(range(0, ids.size, CONTEXT)) <= set(np.flatnonzero(ids == END))
    ids, _, cu_seqlens = whole.at(3, 1, 2)
    assert np.array_equal(ids, of_all[3][0][4:])
    later = of_all[3][2][(of_all[3][2] >= 4 * CONTEXT)] - 4 * CONTEXT
    assert np.array_equal(np.unique(later), np.unique(cu_seqlens))


# ------------------------------------------------------------------------------------------------ none sees another
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_kv_heads", [None, 1])
@pytest.mark.parametrize("impl", SERVING)
def test_a_batch_has_the_loss_of_its_documents_on_their_own(impl, num_kv_heads, device):
    if impl == "flash_triton" and device == "cpu" and ON_GPU:
        pytest.skip("interpreted only where there is no GPU")
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 48, "num_kv_heads": num_kv_heads}
    model = TransformerLM(VOCAB, CONTEXT, attention=impl, **sizes).to(device)
    ids, targets, cu_seqlens = tensors(batches().at(1), device)
    loss = modes.WithLoss(model)(ids, targets, cu_seqlens)
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    choose_attention(model, "reference")
    expected = loss_alone(model, ids, targets)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for x, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(x, p.grad, rtol=1e-3, atol=1e-5)
    assert (model(ids) - model(ids, cu_seqlens)).abs().max() > 0.05  # in a stream they see more


def test_a_document_across_two_sequences_is_named():
    """Its positions would begin anew in the second one."""
    model = TransformerLM(VOCAB, CONTEXT, d_model=32, num_layers=1, num_heads=2, d_ff=48)
    with pytest.raises(ValueError, match="cu_seqlens has no 8, where a sequence begins"):
        model(torch.zeros(3, 8, dtype=torch.long), torch.tensor([0, 5, 16, 24], dtype=torch.int32))


def test_one_graph_serves_all_batches():
    torch._dynamo.reset()
    model = TransformerLM(VOCAB, CONTEXT, d_model=32, num_layers=2, num_heads=2, d_ff=48, attention="sdpa")
    graphs = []
    step = torch.compile(
        modes.WithLoss(model), fullgraph=True, dynamic=False,
        backend=lambda graph, _: graphs.append(graph) or graph.forward,
    )  # fmt: skip
    for number in range(4):
        ids, targets, cu_seqlens = tensors(batches().at(number))
        torch.testing.assert_close(step(ids, targets, cu_seqlens), loss_alone(model, ids, targets))
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["off", "attention", "blocks", "whole", "graphs"])
def test_steps_on_a_gpu_learn_the_same(how):
    """What a graph replays reads where this step's documents begin."""
    losses = []
    for compiled, attention in ((how, "auto"), ("off", "reference")):
        settings = {"run__compile": compiled, "run__device": "cuda", "model__attention": attention}
        trainer = Trainer(made(run__dtype="fp32", **settings), data())
        losses.append(torch.stack([(trainer.train_step(), trainer.loss)[1] for _ in range(6)]))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)


# ------------------------------------------------------------------------------------------------ runs
def test_a_run_trains_and_is_held_against_documents(tmp_path):
    trainer = Trainer(made(tmp_path, schedule__steps=30, evaluation__every=0), data())
    ids, targets, _ = tensors(trainer.batches.at(0))
    first = loss_alone(trainer.model, ids, targets).item()
    trainer.train_step()
    assert trainer.loss.item() == pytest.approx(first, rel=1e-5)
    found = trainer.evaluate(everything=True)
    ids, targets, _ = tensors(trainer.held_out.windows_at(range(trainer.held_out.windows)))
    assert found == pytest.approx(loss_alone(trainer.model, ids, targets).item(), rel=1e-5)
    assert trainer.run()["valid_loss"] < found


MODES = {
    "accumulated": {"batch__accumulate": 2}, "blocks": {"run__recompute": "blocks"},
    "selective": {"run__recompute": "selective"}, "reference": {"model__attention": "reference"},
    **{name: {"parallel__wrapper": name} for name in ("naive", "in_place", "torch", "fsdp")},
    "fsdp+blocks": {"parallel__wrapper": "fsdp", "run__recompute": "blocks"},
}  # fmt: skip


def on_a_rank(folder):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    of_rank = Rank(rank, rank, world, world, "cpu", "gloo")
    run = lambda mode: Trainer(made(f"{folder}/{mode}", **MODES[mode]), data(), of_rank).run()
    return {mode: run(mode)["valid_loss"] for mode in MODES}


def test_every_mode_has_the_losses_of_one_device(tmp_path):
    expected = Trainer(made(tmp_path / "one"), data()).run()["valid_loss"]
    for of_rank in distributed.run(on_a_rank, 2, str(tmp_path)):
        for mode, loss in of_rank.items():
            assert loss == pytest.approx(expected, rel=1e-5), mode


def test_the_whole_pipeline_packs_its_stories(tmp_path):
    told = {"text__train_mb": 0.02, "text__valid_mb": 0.01, "generation__tokens": 5, "schedule__steps": 3}
    result = pipeline.train(made(tmp_path, **told), lambda line: None)
    assert result["floor"] and result["valid_loss"] > result["floor"] and len(result["samples"]) == 2


def forecast_bytes(documents, impl, batch):
    told = made(text__documents=documents, model__attention=impl, batch__sequences=batch)
    return forecast.memory_bytes(told, "fp32", "cpu", 1)


def test_plain_attention_is_known_to_keep_scores_of_a_whole_batch():
    more = forecast_bytes("packed", "reference", 8) - forecast_bytes("stream", "reference", 8)
    assert more >= 2 * 4 * 2 * (8 - 1) * 8 * CONTEXT**2  # layers, bytes, heads of pairs of other sequences
    assert forecast_bytes("packed", "reference", 1) == forecast_bytes("stream", "reference", 1)


@pytest.mark.parametrize("impl", ["auto", "sdpa"])
def test_masks_that_torch_s_attention_keeps_are_known(impl):
    trainer, kept = Trainer(made(model__attention=impl, batch__sequences=8), data()), {}

    def keep(x):
        if x.shape[-2:] == (8 * CONTEXT, 8 * CONTEXT):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held, so that no other lies there
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = trainer.wrapped(*tensors(trainer.batches.at(0)))
    masks = sum(x.nbytes() for x in kept.values())
    found = forecast_bytes("packed", impl, 8) - forecast_bytes("stream", impl, 8)
    assert loss.isfinite() and masks > 0 and found == masks + (8 * CONTEXT) ** 2  # and the one of bools


# ------------------------------------------------------------------------------------------------ errors
def test_attention_that_cannot_is_refused_naming_what_can():
    able = ", ".join(registry.serving("cu_seqlens"))
    with pytest.raises(
        ValueError,
        match=rf"model\.attention='flash_torch' with text\.documents='packed'; allowed: auto, {able}$",
    ):
        made(model__attention="flash_torch")
    with pytest.raises(ValueError, match=r"text.documents='loose'; allowed: stream, packed"):
        made(text__documents="loose")


def test_tokens_without_documents_are_refused(tmp_path):
    with pytest.raises(ValueError, match="random tokens have none"):
        pipeline.train(made(tmp_path, text__source="random", text__train_mb=0.01, text__valid_mb=0.01), str)
    assert not (tmp_path / "config.json").exists()
    for source in ("random", "ready.npy"):  # of which no stage has said so yet
        with pytest.raises(
            ValueError, match=r"text\.documents='packed', and which token ends a document is not"
        ):
            made(tmp_path, text__source=source)
