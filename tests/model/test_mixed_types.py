"""Files whose gate and up matrices have different quantisations: two products and `swiglu` in place of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.cli.common import demo_model
from vkbackend.device import open_device
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import ModelError
from vkbackend.model.gguf import open_gguf
from vkbackend.model.loader import load
from vkbackend.model.weights import WeightLoader

Floats = NDArray[np.float32]


def rewrite(source: Path, target: Path, change: Callable[[str, Floats], Floats | None]) -> None:
    """Copies a GGUF file; tensors for which `change` (given the name and values) returns an array become that, f32."""
    reader = gguf.GGUFReader(source)
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for key, field in fields.items():
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        changed = change(tensor.name, values)
        if changed is not None:
            writer.add_tensor(tensor.name, np.ascontiguousarray(changed, np.float32))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with the same values: up is f32 in even blocks, gate in odd ones."""

    def widen(name: str, values: Floats) -> Floats | None:
        parts = name.split(".")
        is_odd = parts[0] == "blk" and int(parts[1]) % 2
        return values if parts[2:3] == ["ffn_gate" if is_odd else "ffn_up"] else None

    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    rewrite(demo_model(), path, widen)
    return path


def test_the_key_tells_whether_rows_are_interleaved(mixed: Path) -> None:
    for path, interleaved in ((demo_model(), True), (mixed, False)):
        file, loader = open_gguf(path), WeightLoader(NumpyDevice())
        for i in (0, 1, 8):  # 8: the MTP block
            names = (f"blk.{i}.ffn_gate.weight", f"blk.{i}.ffn_up.weight")
            assert loader.matrix(file, names, interleave=True).interleave == interleaved


@pytest.mark.parametrize("device", ["numpy", "kompute:0"])
def test_same_values_same_logits(mixed: Path, device: str, rng: np.random.Generator) -> None:
    same = load(demo_model(), device=open_device(device))
    other = load(mixed, device=open_device(device))
    want_ctx, got_ctx = (m.context(n_ctx=64, hidden="post_norm") for m in (same, other))
    want_mtp, got_mtp = (m.mtp_context(n_ctx=64) for m in (same, other))
    for n in (1, 5, 20):
        tokens = rng.integers(0, same.hparams.n_vocab, n).tolist()
        want, got = (ctx.decode(tokens, logits="all") for ctx in (want_ctx, got_ctx))
        assert np.abs(got.logits - want.logits).max() <= 1e-4
        assert want.hidden is not None and got.hidden is not None
        want, got = (mtp.decode(tokens, want.hidden) for mtp in (want_mtp, got_mtp))
        assert np.abs(got.logits - want.logits).max() <= 1e-4
    same.close()
    other.close()


def test_gate_and_up_of_different_heights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_tensor("gate", np.zeros((6, 32), np.float32))
    writer.add_tensor("up", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"gate, up have shapes \(6, 32\) and \(4, 32\)"):
        WeightLoader(NumpyDevice()).matrix(open_gguf(path), ("gate", "up"), interleave=True)
