"""gated_delta_net: the rule from its definition, slots, exact splits, what a delta rule is for, drift, errors."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.device.base import Device, Limits
from vkbackend.device.dispatching import NAN_WORD
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph
from vkbackend.ops import gated_delta_net as eager_gated_delta_net
from vkbackend.ops.case import nmse
from vkbackend.ops.gated_delta_net import OP, gated_delta_net
from vkbackend.ops.op import At, Dispatch

Floats = NDArray[np.float32]
Reals = NDArray[np.float64]


@pytest.fixture(params=["numpy_device", "kompute", "kompute_shared"])
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["kompute", "kompute_shared"])
def shader(request: pytest.FixtureRequest) -> KomputeDevice:
    found: KomputeDevice = request.getfixturevalue(request.param)
    return found


@dataclass(frozen=True)
class Numbers:
    """The inputs, in the builder's order and shapes."""

    q: Floats
    k: Floats
    v: Floats
    g: Floats
    beta: Floats
    state: Floats

    def tokens(self, start: int, stop: int, state: Floats) -> Numbers:
        """Some of the tokens, after another state [n_seqs, K, n_heads, S, S]."""
        return Numbers(*(x[:, start:stop] for x in (self.q, self.k, self.v, self.g, self.beta)), state)

    def sequences(self, start: int, stop: int) -> Numbers:
        return Numbers(*(getattr(self, f.name)[start:stop] for f in fields(self)))


def _numbers(
    rng: np.random.Generator,
    n_tokens: int,
    size: int = 32,
    heads: tuple[int, int] = (2, 4),
    n_seqs: int = 1,
    slots: int = 1,
    kda: bool = False,
) -> Numbers:
    """Realistic ones: q and k of length 1, decays from next to nothing to everything, beta in [0, 1)."""

    def unit() -> Reals:
        x = rng.standard_normal((n_seqs, n_tokens, heads[0], size))
        return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))

    lead = (n_seqs, n_tokens, heads[1])
    state = rng.standard_normal((n_seqs, slots, heads[1], size, size))
    state[:, 1:] = np.nan  # only slot 0 may be read
    arrays = (
        unit(), unit(), rng.standard_normal((*lead, size)), -np.exp(rng.uniform(-9, 3, (*lead, size if kda else 1))),
        rng.uniform(0, 1, (*lead, 1)), state,
    )  # fmt: skip
    return Numbers(*(x.astype(np.float32) for x in arrays))


def _run(device: Device, n: Numbers) -> tuple[Floats, Floats]:
    attention, snapshots = eager_gated_delta_net(n.q, n.k, n.v, n.g, n.beta, n.state, device=device)
    return attention, snapshots


def _definition(n: Numbers) -> tuple[Reals, list[Reals]]:
    """Attention [n_seqs, n_tokens, n_heads, S] and the state [n_seqs, n_heads, S, S] after every token, in float64,
    one head at a time."""
    q, k, v, g, beta, state = (np.asarray(getattr(n, f.name), np.float64) for f in fields(n))
    n_seqs, n_tokens, n_heads, size = v.shape
    out, after = np.empty_like(v), [np.empty((n_seqs, n_heads, size, size)) for _ in range(n_tokens)]
    for s in range(n_seqs):
        s_qk = s // (n_seqs // len(q))
        for h in range(n_heads):
            h_qk = h % q.shape[2]
            matrix = state[s, 0, h].copy()
            for t in range(n_tokens):
                matrix = matrix * np.exp(g[s, t, h])  # one decay, or one per k channel
                key = k[s_qk, t, h_qk]
                matrix = matrix + np.outer(beta[s, t, h, 0] * (v[s, t, h] - matrix @ key), key)
                out[s, t, h] = matrix @ q[s_qk, t, h_qk] / np.sqrt(size)
                after[t][s, h] = matrix
    return out, after


def _same(got: Floats, want: Floats) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint32), np.ascontiguousarray(want).view(np.uint32))


# ---- values and slots


@pytest.mark.parametrize("kda", [False, True], ids=["plain", "kda"])
@pytest.mark.parametrize(
    ("size", "heads", "n_seqs", "n_tokens", "slots"),
    [(16, (2, 4), 1, 5, 3), (32, (1, 3), 2, 4, 4), (64, (2, 2), 1, 3, 5), (128, (1, 2), 1, 9, 1)],
)
def test_against_the_definition(
    size: int, heads: tuple[int, int], n_seqs: int, n_tokens: int, slots: int, kda: bool,
    device: Device, rng: np.random.Generator,
) -> None:  # fmt: skip
    n = _numbers(rng, n_tokens, size, heads, n_seqs, slots, kda)
    attention, snapshots = _run(device, n)
    want, after = _definition(n)
    assert nmse(attention, want) < 1e-11
    for slot in range(slots):
        t = slot + n_tokens - slots
        if t >= 0:
            assert nmse(snapshots[slot], after[t]) < 1e-11, f"slot {slot}, token {t}"
        else:
            assert np.isnan(snapshots[slot]).all(), f"slot {slot} is the caller's"


def test_slots_before_the_first_token_keep_their_words(shader: KomputeDevice, rng: np.random.Generator) -> None:
    _, snapshots = _run(shader, _numbers(rng, n_tokens=2, slots=6))
    assert (np.ascontiguousarray(snapshots[:4]).view(np.uint32) == NAN_WORD).all()
    assert not np.isnan(snapshots[4:]).any()


def test_sequences_may_share_q_and_k(device: Device, rng: np.random.Generator) -> None:
    n = _numbers(rng, 3, n_seqs=6)
    shared = replace(n, q=n.q[:2], k=n.k[:2])
    spread = replace(n, q=np.repeat(n.q[:2], 3, axis=0), k=np.repeat(n.k[:2], 3, axis=0))
    for got, want in zip(_run(device, shared), _run(device, spread), strict=True):
        _same(got, want)


# ---- exact


def test_any_split_gives_the_same_bits(shader: KomputeDevice, rng: np.random.Generator) -> None:
    n_tokens = 16
    n = _numbers(rng, n_tokens, n_seqs=2, slots=n_tokens)
    whole, states = _run(shader, n)
    for cuts in (range(1, n_tokens), (1, 15), (7,), sorted(rng.choice(np.arange(1, 16), 4, replace=False).tolist())):
        state = n.state
        ends = [0, *cuts, n_tokens]
        for start, stop in zip(ends, ends[1:], strict=False):
            attention, snapshots = _run(shader, n.tokens(start, stop, state))
            _same(attention, whole[:, start:stop])
            _same(snapshots[n_tokens - (stop - start) :], states[start:stop])
            state = np.repeat(snapshots[-1][:, None], n_tokens, axis=1)


def test_the_number_of_slots_changes_no_bit(shader: KomputeDevice, rng: np.random.Generator) -> None:
    n = _numbers(rng, 6, slots=8, kda=True)
    attention, snapshots = _run(shader, n)
    for slots in (1, 2, 6):
        other, fewer = _run(shader, replace(n, state=n.state[:, :slots]))
        _same(other, attention)
        _same(fewer, snapshots[8 - slots :])


def test_sequences_do_not_meet(shader: KomputeDevice, rng: np.random.Generator) -> None:
    n = _numbers(rng, 4, n_seqs=3, slots=2)
    together, states = _run(shader, n)
    for s in range(3):
        alone, own = _run(shader, n.sequences(s, s + 1))
        _same(alone, together[s : s + 1])
        _same(own, states[:, s : s + 1])


def test_both_variants_give_the_same_bits(
    kompute: KomputeDevice, kompute_shared: KomputeDevice, rng: np.random.Generator
) -> None:
    n = _numbers(rng, 7, 128, (1, 2), slots=2)
    for one, two in zip(_run(kompute, n), _run(kompute_shared, n), strict=True):
        _same(one, two)


# ---- what the rule is for


def test_recalls_pairs_and_replaces_them(device: Device, rng: np.random.Generator) -> None:
    """Without decay and with beta = 1 the state is a dictionary: orthonormal keys give back the last value stored."""
    size = 16
    keys = np.linalg.qr(rng.standard_normal((size, size)))[0]
    values = rng.standard_normal((2 * size, size))
    order = np.concatenate([rng.permutation(size), rng.permutation(size)])
    k = keys[order].astype(np.float32)[None, :, None]  # [1, 32, 1, 16]
    n = Numbers(
        q=k, k=k, v=values.astype(np.float32)[None, :, None], g=np.zeros((1, 32, 1, 1), np.float32),
        beta=np.ones((1, 32, 1, 1), np.float32), state=np.zeros((1, 1, 1, size, size), np.float32),
    )  # fmt: skip
    attention, snapshots = _run(device, n)
    np.testing.assert_allclose(attention[0, :, 0] * np.sqrt(size), values, atol=1e-5)
    latest = values[size:][np.argsort(order[size:])]
    np.testing.assert_allclose(snapshots[0, 0, 0] @ keys.T, latest.T, atol=1e-5)


def test_forgets_everything_or_nothing(device: Device, rng: np.random.Generator) -> None:
    n = _numbers(rng, 1)
    gone = replace(n, g=np.full_like(n.g, -1000))  # exp underflows to 0
    fresh = replace(gone, state=np.zeros_like(n.state))
    np.testing.assert_array_equal(_run(device, gone)[1], _run(device, fresh)[1])
    still = replace(n, g=np.zeros_like(n.g), beta=np.zeros_like(n.beta))
    np.testing.assert_array_equal(_run(device, still)[1][0], n.state[:, 0])


@pytest.mark.parametrize("kda", [False, True], ids=["plain", "kda"])
def test_drift_over_512_steps(kda: bool, device: Device, rng: np.random.Generator) -> None:
    """Token by token, the state carried in float32: the error must not grow with the number of steps."""
    n_steps = 512
    n = _numbers(rng, n_steps, heads=(1, 2), kda=kda)
    n = replace(n, g=-np.exp(rng.uniform(-9, -3, n.g.shape)).astype(np.float32))  # remembers for 20 to 8,000 tokens
    want, after = _definition(n)
    g = Graph()
    first = n.tokens(0, 1, n.state)
    inputs = [g.input(f.name, getattr(first, f.name).shape) for f in fields(n)]
    for name, tensor in zip(("attention", "snapshots"), gated_delta_net(g, *inputs), strict=True):
        g.output(name, tensor)
    program = device.compile(g, poison=True)
    state = n.state
    for t in range(n_steps):
        out = program.run(vars(n.tokens(t, t + 1, state)))
        state = out["snapshots"][0][:, None]
        assert nmse(out["attention"], want[:, t : t + 1]) < 1e-9, f"output of token {t}"
        assert nmse(state[:, 0], after[t]) < 1e-10, f"state after token {t}"


# ---- the call


def test_eager_names(rng: np.random.Generator) -> None:
    n = _numbers(rng, 2, slots=2)
    by_name = eager_gated_delta_net(q=n.q, k=n.k, v=n.v, g=n.g, beta=n.beta, state=n.state)
    for got, want in zip(by_name, eager_gated_delta_net(n.q, n.k, n.v, n.g, n.beta, n.state), strict=True):
        np.testing.assert_array_equal(got, want)
    assert by_name[0].shape == (1, 2, 4, 32) and by_name[1].shape == (2, 1, 4, 32, 32)


def test_results_are_one_flat_buffer() -> None:
    """[attention | snapshots], as the layout is documented."""
    shapes = [(2, 3, 2, 16), (2, 3, 2, 16), (2, 3, 4, 16), (2, 3, 4, 1), (2, 3, 4, 1), (2, 5, 4, 16, 16)]
    g = Graph()
    attention, snapshots = gated_delta_net(g, *(g.input(str(i), shape) for i, shape in enumerate(shapes)))
    assert attention.storage is snapshots.storage
    assert attention.offset == 0 and snapshots.offset == attention.size == 2 * 3 * 4 * 16
    assert attention.is_contiguous and snapshots.is_contiguous
    assert attention.storage.n_words == attention.size + snapshots.size and snapshots.shape == (5, 2, 4, 16, 16)


def test_slots_are_a_push_constant() -> None:
    """One pipeline serves every K: lowerings for two values differ in push constants only."""

    def lowered(slots: int) -> Dispatch:
        shapes = [(1, 3, 2, 16), (1, 3, 2, 16), (1, 3, 4, 16), (1, 3, 4, 1), (1, 3, 4, 1), (1, slots, 4, 16, 16)]
        g = Graph()
        gated_delta_net(g, *(g.input(str(i), shape) for i, shape in enumerate(shapes)))
        [[dispatch]] = OP.lower(g.nodes[0], Limits())
        return dispatch

    two, five = lowered(2), lowered(5)
    assert (two.kernel, two.spec, two.groups) == (five.kernel, five.spec, five.groups)
    values = [[x for x in d.push if not isinstance(x, At)] for d in (two, five)]
    assert values[0] != values[1] and 2 in values[0] and 5 in values[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v": (2, 3, 4, 48)}, r"head size 48 is not supported; supported are \(16, 32, 64, 128\)"),
        ({"k": (2, 3, 1, 32)}, r"q \(2, 3, 2, 32\), k \(2, 3, 1, 32\)"),
        ({"q": (2, 3, 3, 32), "k": (2, 3, 3, 32)}, "4 v heads are not a multiple of 3 q/k heads"),
        ({"q": (3, 3, 2, 32), "k": (3, 3, 2, 32)}, "2 sequences are not a multiple of 3 q/k sequences"),
        ({"g": (2, 3, 4, 2)}, r"g \(2, 3, 4, 2\) must be \(2, 3, 4\) \+ \(1 or 32,\)"),
        ({"beta": (2, 3, 4, 32)}, r"beta \(2, 3, 4, 32\) must be \(2, 3, 4, 1\)"),
        ({"state": (2, 1, 4, 32, 16)}, r"must be contiguous \(2, 1, 4, 32, 32\)"),
        ({"state": (2, 4, 32, 32)}, "state 5"),
    ],
)
def test_errors(changed: dict[str, tuple[int, ...]], message: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "q": (2, 3, 2, 32), "k": (2, 3, 2, 32), "v": (2, 3, 4, 32), "g": (2, 3, 4, 1), "beta": (2, 3, 4, 1),
        "state": (2, 1, 4, 32, 32),
    }  # fmt: skip
    shapes |= changed
    g = Graph()
    with pytest.raises(VkBackendError, match=f"gated_delta_net: .*{message}"):
        gated_delta_net(g, *(g.input(name, shape) for name, shape in shapes.items()))


@pytest.mark.parametrize("which", ["q", "k", "v", "g"])
def test_last_axis_must_be_contiguous(which: str) -> None:
    shapes = {"q": (1, 3, 2, 32), "k": (1, 3, 2, 32), "v": (1, 3, 2, 32), "g": (1, 3, 2, 32)}
    g = Graph()
    tensors = {name: g.input(name, shape) for name, shape in shapes.items()}
    tensors[which] = g.input("turned", (1, 3, 32, 2)).permute(0, 1, 3, 2)
    with pytest.raises(VkBackendError, match=f"the last axis of {which} must be contiguous"):
        gated_delta_net(g, *tensors.values(), g.input("beta", (1, 3, 2, 1)), g.input("state", (1, 1, 2, 32, 32)))
