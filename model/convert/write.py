"""`convert`: a Hugging Face checkpoint to a GGUF file, in pieces of bounded size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from vkbackend.errors import ModelError
from vkbackend.model.convert.checkpoint import StoredTensor, layer_count, open_checkpoint, read_rows
from vkbackend.model.convert.config import Config, read_config
from vkbackend.model.convert.plan import Planned, plan
from vkbackend.model.convert.tokenizer import Vocabulary, read_vocabulary

# Element type of matrices, and the file's general.file_type.
TYPES: dict[str, tuple[Any, int]] = {"f32": (Type.F32, 0), "f16": (Type.F16, 1), "bf16": (Type.BF16, 32),
                                     "q8_0": (Type.Q8_0, 7)}  # fmt: skip
CHUNK = 1 << 20  # elements worked on at once
MTP_ARCHS = ("qwen35", "qwen35moe")  # those whose MTP block may be left out or written alone
_STORED_AS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
Progress = Callable[[int, int], None]


def convert(
    folder: str | Path,
    out: str | Path | None = None,
    type: str | None = None,
    mtp: str = "with",
    progress: Progress | None = None,
    force: bool = False,
) -> Path:
    """Converts a Qwen3.5, Qwen3.5-MoE or Qwen3-Next checkpoint in safetensors files, and returns the file's path.

    out: a file when it ends in .gguf, else a folder, made if missing; default: the current folder. In a folder, a
    name is made of the checkpoint's and the type.
    type: "f32", "f16", "bf16" or "q8_0"; default: the type in which the checkpoint holds its embeddings. Vectors,
    convolutions and routers stay float32, rows that q8_0's blocks do not divide become f16.
    mtp: "with": the MTP block too, if the checkpoint has one; "without": a made name then has -no-mtp; "only": the
    block with embeddings and head, the file's name then begins with mtp-. progress: called with (bytes written, bytes
    to write). force: replace a file of that name.

    Memory does not grow with the checkpoint. The file appears under its name once it is complete. Raises `ModelError`
    for whatever is wrong with the checkpoint and, without `force`, when the file is there already; `OSError` when it
    can not be written.
    """
    folder = Path(folder)
    tensors = open_checkpoint(folder)
    config = read_config(folder)
    n_nextn = _n_nextn(folder, config, tensors, mtp)
    planned = plan(config, tensors, n_nextn, mtp == "only", str(folder))
    kind = type or _own_type(tensors[planned[0].pieces[0].source])
    if kind not in TYPES:
        raise ModelError(f"type {kind!r} can not be written; {', '.join(TYPES)} can")
    vocabulary = read_vocabulary(folder, config.n_vocab)
    path = _path(folder, out, kind, mtp)
    if any(path.resolve() == t.path.resolve() for t in tensors.values()):
        raise ModelError(f"{path}: is part of the checkpoint; give another name for the GGUF file")
    if path.is_dir():
        raise ModelError(f"{path}: is a folder, which no file replaces; give another name with -o")
    if path.exists() and not force:
        raise ModelError(f"{path}: is there already; give another name with -o, or replace it with --force")
    _make_folder(path.parent)
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, config.arch)
    try:
        for p in planned:
            shape = _byte_shape(p, kind)
            writer.add_tensor_info(p.name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=_type(p, kind))
        _add_metadata(writer, config, n_nextn, kind)
        _add_tokenizer(writer, vocabulary)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer.fout[0], writer.data_alignment, planned, tensors, kind, progress)
        writer.close()
        os.replace(part, path)
    except BaseException:
        writer.close()
        part.unlink(missing_ok=True)
        raise
    return path


def _n_nextn(folder: Path, config: Config, tensors: Mapping[str, StoredTensor], mtp: str) -> int:
    """MTP blocks that the file is to hold."""
    if mtp not in ("with", "without", "only"):
        raise ModelError(f"mtp={mtp!r}: 'with', 'without' or 'only' is needed")
    if mtp != "with" and config.arch not in MTP_ARCHS:
        raise ModelError(
            f"{folder}: files of {config.arch} can not be split into trunk and MTP block (--mtp, --no-mtp); those of "
            f"{', '.join(MTP_ARCHS)} can"
        )
    # Fine-tuned checkpoints often lack the block that their config.json still speaks of.
    n = layer_count(tensors, "mtp.layers")
    n = max(n, config.n_nextn or 0) if n else 0
    if n > 1:
        raise ModelError(f"{folder}: has {n} MTP blocks; at most 1 can be converted")
    if mtp == "only" and not n:
        raise ModelError(f"{folder}: has no MTP block: there are no tensors mtp.layers.*")
    return 0 if mtp == "without" else n


def _own_type(tensor: StoredTensor) -> str:
    return _STORED_AS.get(tensor.dtype, "f16")


def _path(folder: Path, out: str | Path | None, kind: str, mtp: str) -> Path:
    """The file to write: `out` itself where it names a GGUF file, else one in the folder `out`."""
    path = Path(out) if out is not None else Path()
    if path.suffix.lower() != ".gguf" or path.is_dir():
        part = "-no-mtp" if mtp == "without" else ""
        path = path / f"{folder.resolve().name}{part}-{kind.upper()}.gguf"
    if mtp == "only" and not path.name.startswith("mtp-"):
        path = path.with_name("mtp-" + path.name)
    return path


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ModelError(
            f"{folder}: is no folder, and none can be made there; -o takes a folder, or the name of a .gguf file"
        ) from error


def _type(p: Planned, kind: str) -> Any:
    """The element type in which a tensor is written."""
    if len(p.shape) == 1 or p.exact:
        return Type.F32
    if kind == "q8_0" and p.shape[-1] % 32:
        return Type.F16
    return TYPES[kind][0]


def _byte_shape(p: Planned, kind: str) -> tuple[int, ...]:
    shape: tuple[int, ...] = gguf.quant_shape_to_byte_shape(p.shape, _type(p, kind))
    return shape


def _write_tensors(
    out: BinaryIO,
    alignment: int,
    planned: list[Planned],
    tensors: Mapping[str, StoredTensor],
    kind: str,
    progress: Progress | None,
) -> None:
    """The data of all tensors, each at a multiple of the alignment."""
    total = sum(int(np.prod(_byte_shape(p, kind))) for p in planned)
    done = 0
    for p in planned:
        out.write(bytes(-out.tell() % alignment))
        for rows in _chunks(p, tensors):
            block = _encode(rows, _type(p, kind), p.name)
            out.write(block.data)
            done += block.nbytes
            if progress:
                progress(done, total)
    out.write(bytes(-out.tell() % alignment))


def _chunks(p: Planned, tensors: Mapping[str, StoredTensor]) -> Iterator[NDArray[np.float32]]:
    """A tensor's rows in order, at most CHUNK elements at a time: float32 [n, n_cols]."""
    held: list[NDArray[np.float32]] = []
    n_held = 0
    most = max(1, CHUNK // (p.shape[-1] if len(p.shape) > 1 else 1))
    for piece in p.pieces:
        for start, stop in piece.runs:
            while start < stop:
                n = min(stop - start, most - n_held)
                held.append(read_rows(tensors[piece.source], piece.source, start, start + n))
                start, n_held = start + n, n_held + n
                if n_held == most:
                    yield _transform(p, held)
                    held, n_held = [], 0
    if held:
        yield _transform(p, held)


def _transform(p: Planned, parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if p.columns is not None:
        rows = rows[:, p.columns]
    return p.values(rows) if p.values else rows


def _encode(rows: NDArray[np.float32], kind: Any, name: str) -> NDArray[Any]:
    """Rows as they lie in the file. Raises `ModelError` for values that the type can not hold."""
    largest = float(np.abs(rows).max())  # NaN when any value is
    limit = 65504.0 if kind == Type.F16 else float(np.finfo(np.float32).max)
    if not largest <= limit:
        raise ModelError(f"tensor '{name}' holds {largest:g}; {kind.name} holds up to {limit:g}" + (
            ": take bf16" if limit < largest < float("inf") else ""))  # fmt: skip
    # As one long row: gguf-py goes through sixteen rows at a time, however short they are.
    encoded: NDArray[Any] = np.ascontiguousarray(gguf.quantize(rows.reshape(1, -1), kind))
    return encoded


def _add_metadata(writer: Any, c: Config, n_nextn: int, kind: str) -> None:
    """The keys of spec/model.md; general.size_label counts parameters as gguf-py does."""
    writer.add_type("model")
    writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
    counts = {
        "block_count": c.n_main + n_nextn,
        "context_length": c.n_ctx_train,
        "embedding_length": c.n_embd,
        "feed_forward_length": c.n_ff,
        "attention.head_count": c.n_head,
        "attention.head_count_kv": c.n_head_kv,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": c.n_rot,
        "expert_count": c.n_expert,
        "expert_used_count": c.n_expert_used,
        "expert_feed_forward_length": c.n_ff_exp,
        "expert_shared_feed_forward_length": c.n_ff_shexp,
        "nextn_predict_layers": n_nextn,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.state_size": c.head_k_dim,
        "ssm.group_count": c.n_k_heads,
        "ssm.time_step_rank": c.n_v_heads,
        "ssm.inner_size": c.value_dim,
        "full_attention_interval": c.interval,
    }
    for key, value in counts.items():
        if value:  # 0: this model has no such thing
            writer.add_uint32(f"{c.arch}.{key}", value)
    if c.rope_sections:
        writer.add_array(f"{c.arch}.rope.dimension_sections", list(c.rope_sections))
    writer.add_float32(f"{c.arch}.rope.freq_base", c.rope_freq_base)
    writer.add_float32(f"{c.arch}.attention.layer_norm_rms_epsilon", c.rms_eps)
    writer.add_array(f"{c.arch}.attention.recurrent_layers", [*c.recurrent, *([False] * n_nextn)])
    writer.add_file_type(TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_tokenizer(writer: Any, v: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(v.pre)
    writer.add_token_list(v.tokens)
    writer.add_token_types(v.types)
    v.special.add_to_gguf(writer, quiet=True)
