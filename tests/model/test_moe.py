"""The MoE feed-forward against float64 sums written out here. Golden values of whole models: test_goldens.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic import write_model

from vkbackend.device import open_device
from vkbackend.device.base import Device
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import ModelError
from vkbackend.graph import Graph
from vkbackend.model.gguf import open_gguf
from vkbackend.model.hparams import HParams
from vkbackend.model.loader import load
from vkbackend.model.moe import MoeFfnKeys, moe_feed_forward, request_moe
from vkbackend.model.weights import WeightLoader
from vkbackend.ops.case import nmse
from vkbackend.schedule import plan

Floats = NDArray[np.float32]
Values = NDArray[np.float64]
BLOCK, NORM = "blk.1.", "blk.1.post_attention_norm.weight"
N_USED, N_EXPERT = 3, 8


def write_layer(
    path: Path, rng: np.random.Generator, fused: bool = False, types: tuple[str, ...] = ("F32",) * 3
) -> None:
    """A file whose block 1 is a MoE feed-forward; types: of gate (with up where fused), up and down."""
    n_embd, n_ff, n_shared = 64, 32, 48
    w = gguf.GGUFWriter(path, "qwen35moe")

    def add(name: str, *shape: int, kind: str = "F32") -> None:
        values = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        w.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])

    w.add_tensor(NORM, rng.uniform(0.5, 1.5, n_embd).astype(np.float32))
    add(BLOCK + "ffn_gate_inp.weight", N_EXPERT, n_embd)
    add(BLOCK + "ffn_gate_inp_shexp.weight", n_embd)
    if fused:
        add(BLOCK + "ffn_gate_up_exps.weight", N_EXPERT, 2 * n_ff, n_embd, kind=types[0])
    else:
        add(BLOCK + "ffn_gate_exps.weight", N_EXPERT, n_ff, n_embd, kind=types[0])
        add(BLOCK + "ffn_up_exps.weight", N_EXPERT, n_ff, n_embd, kind=types[1])
    add(BLOCK + "ffn_down_exps.weight", N_EXPERT, n_embd, n_ff, kind=types[2])
    add(BLOCK + "ffn_gate_shexp.weight", n_shared, n_embd)
    add(BLOCK + "ffn_up_shexp.weight", n_shared, n_embd, kind="F32" if types[0] == types[1] else "F16")
    add(BLOCK + "ffn_down_shexp.weight", n_embd, n_shared)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def by_hand(path: Path, x: Floats) -> Values:
    """One row at a time, as the model's description says: softmax over all experts, the largest, made to sum to 1."""
    tensors: dict[str, Any] = {
        t.name.removeprefix(BLOCK).removesuffix(".weight"): gguf.quants.dequantize(t.data, t.tensor_type).astype(float)
        for t in gguf.GGUFReader(path).tensors
    }

    def swiglu(u: Values, gate: Values, up: Values, down: Values) -> Values:
        a = gate @ u
        return np.asarray(down @ (a / (1 + np.exp(-a)) * (up @ u)))

    out = []
    for row in x.astype(np.float64):
        u = row / np.sqrt(np.mean(row**2) + 1e-6) * tensors["post_attention_norm"]
        logits = tensors["ffn_gate_inp"] @ u
        share = np.exp(logits) / np.exp(logits).sum()
        chosen = sorted(range(N_EXPERT), key=lambda e: -share[e])[:N_USED]
        total = sum(share[e] for e in chosen)
        y = row.copy()
        for e in chosen:
            if "ffn_gate_up_exps" in tensors:
                gate, up = np.split(tensors["ffn_gate_up_exps"][e], 2)
            else:
                gate, up = tensors["ffn_gate_exps"][e], tensors["ffn_up_exps"][e]
            y += share[e] / total * swiglu(u, gate, up, tensors["ffn_down_exps"][e])
        weight = 1 / (1 + np.exp(-tensors["ffn_gate_inp_shexp"].reshape(-1) @ u))
        y += weight * swiglu(u, *(tensors[f"ffn_{n}_shexp"] for n in ("gate", "up", "down")))
        out.append(y)
    return np.array(out)


def sizes() -> HParams:
    """The hyper-parameters that the feed-forward looks at."""
    names = HParams.__dataclass_fields__
    values = dict.fromkeys(names, 0) | {"n_embd": 64, "n_expert": N_EXPERT, "n_expert_used": N_USED, "rms_eps": 1e-6}
    return HParams(**(values | {"n_ff_exp": 32, "n_ff_shexp": 48}))  # type: ignore[arg-type]


def feed_forward_graph(path: Path, device: Device, n_rows: int) -> tuple[Graph, MoeFfnKeys, WeightLoader]:
    file, loader = open_gguf(path), WeightLoader(device)
    keys, norm = request_moe(loader, file, sizes(), BLOCK), loader.vector(file, NORM)
    loader.load()
    g = Graph()
    g.output("y", moe_feed_forward(g, sizes(), loader, norm, keys, g.input("x", (n_rows, 64))))
    return g, keys, loader


VARIANTS: dict[str, dict[str, Any]] = {
    "separate": {},
    "fused": {"fused": True, "types": ("Q8_0", "", "F16")},
    "quantised": {"types": ("Q4_0", "Q4_0", "Q5_1")},
    "gate and up differ": {"types": ("Q4_0", "Q8_0", "F16")},
}


@pytest.mark.parametrize("device_name", ["numpy_device", "kompute"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_feed_forward(
    variant: str, device_name: str, tmp_path: Path, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    path, device = tmp_path / "layer.gguf", request.getfixturevalue(device_name)
    write_layer(path, rng, **VARIANTS[variant])
    for n_rows in (5, 20):
        x = rng.standard_normal((n_rows, 64)).astype(np.float32)
        g, keys, _ = feed_forward_graph(path, device, n_rows)
        assert (keys.up is not None) == (variant == "gate and up differ")
        got = device.compile(g, poison=True).run({"x": x})["y"]
        assert nmse(got, by_hand(path, x)) < 1e-11


@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_in_several_parts(
    variant: str, kompute: KomputeDevice, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a device binds 45 kB at most, experts are spread over parts, whole ones in each."""
    path = tmp_path / "layer.gguf"
    write_layer(path, rng, **VARIANTS[variant])
    limits = replace(kompute.info.limits, max_storage_range=45_000)
    monkeypatch.setattr(kompute, "info", replace(kompute.info, limits=limits))
    for n_rows in (3, 20):
        x = rng.standard_normal((n_rows, 64)).astype(np.float32)
        g, keys, loader = feed_forward_graph(path, kompute, n_rows)
        if variant == "separate":
            assert [p.shape[0] for p in loader.parts(keys.gate)] == [128, 128, 128, 128]
            assert [p.shape[0] for p in loader.parts(keys.down)] == [320, 192]
        monkeypatch.undo()
        got = kompute.compile(g, poison=True).run({"x": x})["y"]
        monkeypatch.setattr(kompute, "info", replace(kompute.info, limits=limits))
        assert nmse(got, by_hand(path, x)) < 1e-11


def test_three_levels(kompute: KomputeDevice, tmp_path: Path, rng: np.random.Generator) -> None:
    """Router beside the shared expert's gate and up; experts' gate and up beside its down; experts' down and sums."""
    write_layer(tmp_path / "layer.gguf", rng)
    g, _, _ = feed_forward_graph(tmp_path / "layer.gguf", kompute, 4)
    levels = [sorted(launch.kernel.name for launch in level) for level in plan(g, kompute.info.limits).levels]
    assert levels == [["linear_rows", "linear_rows"], ["linear_rows", "moe_up_rows"], ["moe_down_rows"]]


# ---- refusals


def renamed(path: Path, change: Callable[[str, NDArray[Any]], tuple[str, NDArray[Any]] | None]) -> Path:
    """A copy of a float32 file whose tensors have gone through `change`."""
    out = path.with_name("changed.gguf")
    w = gguf.GGUFWriter(out, "qwen35moe")
    for t in gguf.GGUFReader(path).tensors:
        changed = change(t.name, np.array(t.data))
        if changed is not None:
            w.add_tensor(changed[0], np.ascontiguousarray(changed[1]))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


@pytest.mark.parametrize(
    ("part", "cut", "message"),
    [
        ("ffn_gate_inp.weight", slice(7), r"ffn_gate_inp.weight' has shape \(7, 64\); .* \(8, 64\)"),
        ("ffn_up_exps.weight", slice(7), r"ffn_up_exps.weight' has shape \(7, 32, 64\); .* \(8, 32, 64\)"),
        ("ffn_down_exps.weight", slice(4), r"ffn_down_exps.weight' has shape \(4, 64, 32\)"),
        ("ffn_gate_shexp.weight", slice(40), r"ffn_gate_shexp.weight' has shape \(40, 64\)"),
        ("ffn_gate_inp_shexp.weight", slice(32), r"ffn_gate_inp_shexp.weight' has shape \(32,\)"),
        ("ffn_gate_exps.weight", None, r"'blk.1.ffn_gate_exps.weight' is missing"),
        ("ffn_gate_inp_shexp.weight", None, r"ffn_gate_inp_shexp.weight' is missing"),
    ],
)
def test_wrong_shapes_are_refused(part: str, cut: slice | None, message: str, tmp_path: Path) -> None:
    write_layer(tmp_path / "layer.gguf", np.random.default_rng(0))

    def change(name: str, values: NDArray[Any]) -> tuple[str, NDArray[Any]] | None:
        if name != BLOCK + part:
            return name, values
        return None if cut is None else (name, values[cut])

    path = renamed(tmp_path / "layer.gguf", change)
    device = open_device("numpy")
    with pytest.raises(ModelError, match=message):
        request_moe(WeightLoader(device), open_gguf(path), sizes(), BLOCK)


# ---- whole models


def test_batches_are_bitwise_invariant(kompute: KomputeDevice, tmp_path: Path, rng: np.random.Generator) -> None:
    model = load(write_model(tmp_path / "tiny.gguf", seed=6, experts=(3, 8)), device=kompute)
    tokens = rng.integers(0, 64, 24).tolist()
    one, many = model.context(n_ctx=64), model.context(n_ctx=64, n_rs_seq=2)
    want = np.concatenate([one.decode([t]).logits for t in tokens])
    for n in (7, 16):
        many.clear()
        got = np.concatenate([many.decode(tokens[i : i + n], logits="all").logits for i in range(0, 24, n)])
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
