"""The feed-forward of mixture-of-experts blocks: a router, its experts, and a shared expert with a gate of its own.

Three levels of dispatches: router and shared gate beside the shared expert's gate and up; routed experts' gate and up
beside the shared expert's down; routed experts' down with all sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkbackend.graph import Graph, Tensor
from vkbackend.model.gguf import GGUFFile
from vkbackend.model.hparams import HParams
from vkbackend.model.weights import Matrix, WeightLoader, check_shape
from vkbackend.ops.linear import linear
from vkbackend.ops.moe_experts import moe_experts
from vkbackend.ops.swiglu import swiglu


@dataclass(frozen=True)
class MoeFfnKeys:
    """Where a MoE feed-forward's weights are.

    `router` stacks the experts' rows [n_expert, n_embd] and the shared expert's gate row. `gate` holds, expert by
    expert, n_ff_exp gate rows and then n_ff_exp up rows; where their quantisations differ, `up` holds the latter.
    """

    router: Matrix
    gate: Matrix
    up: Matrix | None
    down: Matrix
    shared_gate_up: Matrix
    shared_down: Matrix


def request_moe(loader: WeightLoader, file: GGUFFile, hp: HParams, b: str) -> MoeFfnKeys:
    """Asks the loader for the feed-forward of the block with prefix b, such as "blk.0."."""
    n_embd, n_ff, n_shared = hp.n_embd, hp.n_ff_exp, hp.n_ff_shexp
    check_shape(file, b + "ffn_gate_inp.weight", (hp.n_expert, n_embd))
    check_shape(file, b + "ffn_gate_inp_shexp.weight", (n_embd,))
    fused, gate, up, down = (b + f"ffn_{n}_exps.weight" for n in ("gate_up", "gate", "up", "down"))
    check_shape(file, down, (hp.n_expert, n_embd, n_ff))
    shared_gate, shared_up, shared_down = (b + f"ffn_{n}_shexp.weight" for n in ("gate", "up", "down"))
    for name, shape in ((shared_gate, (n_shared, n_embd)), (shared_up, (n_shared, n_embd))):
        check_shape(file, name, shape)
    check_shape(file, shared_down, (n_embd, n_shared))
    separate_up = None
    if fused in file.tensors:
        check_shape(file, fused, (hp.n_expert, 2 * n_ff, n_embd))
        above = loader.matrix(file, (fused,), unit=2 * n_ff)
    else:
        for name in (gate, up):
            check_shape(file, name, (hp.n_expert, n_ff, n_embd))
        if len({file.tensors[name].type for name in (gate, up) if name in file.tensors}) <= 1:
            above = loader.matrix(file, (gate, up), interleave=True, unit=n_ff)
        else:
            above, separate_up = (loader.matrix(file, (name,), unit=n_ff) for name in (gate, up))
    return MoeFfnKeys(
        router=loader.matrix(file, (b + "ffn_gate_inp.weight", b + "ffn_gate_inp_shexp.weight")),
        gate=above,
        up=separate_up,
        down=loader.matrix(file, (down,), unit=n_embd),
        shared_gate_up=loader.matrix(file, (shared_gate, shared_up), interleave=True),
        shared_down=loader.matrix(file, (shared_down,)),
    )


def moe_feed_forward(g: Graph, hp: HParams, loader: WeightLoader, norm: str, keys: MoeFfnKeys, x: Tensor) -> Tensor:
    """x + experts and shared expert of rms(x). x [n_rows, n_embd]."""
    w_norm = loader.tensor(norm, hp.n_embd)
    router = linear(g, x, loader.parts(keys.router), norm=w_norm, eps=hp.rms_eps)  # [n_rows, n_expert + 1]
    gate_up = keys.shared_gate_up
    inner = linear(g, x, loader.parts(gate_up), norm=w_norm, eps=hp.rms_eps, swiglu=gate_up.interleave)
    if not gate_up.interleave:
        inner = swiglu(g, inner.narrow(1, 0, hp.n_ff_shexp), inner.narrow(1, hp.n_ff_shexp, hp.n_ff_shexp))
    return moe_experts(
        g, x, w_norm, router.narrow(1, 0, hp.n_expert),
        shared=linear(g, inner, loader.parts(keys.shared_down)),
        shared_gate=router.narrow(1, hp.n_expert, 1),
        gate=loader.parts(keys.gate),
        up=loader.parts(keys.up) if keys.up is not None else (),
        down=loader.parts(keys.down),
        n_used=hp.n_expert_used, n_ff=hp.n_ff_exp, eps=hp.rms_eps,
    )  # fmt: skip
