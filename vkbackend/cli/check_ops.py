"""`vkbackend test-ops`: every op's cases on a device against the float64 reference."""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vkbackend.cli.common import Commands, add_command, add_device, add_json, print_json, table
from vkbackend.errors import VkBackendError

if TYPE_CHECKING:
    from vkbackend.device.base import Device
    from vkbackend.ops.op import Op

VARIANTS = ("subgroup", "shared", "both")


@dataclass(frozen=True)
class Result:
    """One case on one variant of the kernels."""

    op: str
    case: str
    variant: str
    nmse: float
    max_nmse: float
    ok: bool
    problem: str


def add(commands: Commands) -> None:
    parser = add_command(commands, "test-ops", run, "Tests every operation on a device against the NumPy reference.")
    add_device(parser)
    parser.add_argument("--op", action="append", metavar="NAME", help="only this op; may be repeated")
    parser.add_argument(
        "--variant",
        choices=VARIANTS,
        default="both",
        help="kernels with subgroup operations, with shared memory only, or both",
    )
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="of the random inputs (default: a new one)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from vkbackend.cli import UsageError

    if args.seed is not None and args.seed < 0:
        raise UsageError(f"--seed is {args.seed}; 0 or more is needed")
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    ops = _choose(args.op)
    results: list[Result] = []
    described = ""
    for variant, device in _open(args.device, args.variant):
        described = f"{device.info.name} ({device.info.description})"
        try:
            for op in ops:
                results += _run_op(op, device, variant, seed)
        finally:
            device.close()
    failed = [r for r in results if not r.ok]
    if args.json:
        print_json(
            {
                "device": described,
                "seed": seed,
                "passed": len(results) - len(failed),
                "failed": len(failed),
                "results": [vars(r) for r in results],
            }
        )
        return 1 if failed else 0
    print(f"{described}, seed {seed}")
    print(_summary(results))
    for r in failed:
        why = r.problem or f"NMSE {r.nmse:.3g}, allowed {r.max_nmse:.3g}"
        print(f"FAILED {r.op} [{r.variant}] {r.case}: {why}")
    print(f"{len(results) - len(failed)} of {len(results)} cases passed")
    if failed:
        print(
            f"vkbackend test-ops: {len(failed)} of {len(results)} cases failed on {described}; "
            f"repeat with --seed {seed}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _choose(names: list[str] | None) -> list[Op]:
    from vkbackend.cli import UsageError
    from vkbackend.ops import all_ops

    ops = {op.name: op for op in all_ops()}
    unknown = [n for n in names or [] if n not in ops]
    if unknown:
        raise UsageError(f"--op {unknown[0]}: there is no such op; there are {', '.join(ops)}")
    return [ops[n] for n in dict.fromkeys(names or ops)]


def _open(name: str, variant: str) -> list[tuple[str, Device]]:
    """The device once for each kernel variant that it can run."""
    from vkbackend.device import open_device
    from vkbackend.device.probe import uses_subgroups

    first = open_device(name)
    kind, _, index = first.info.name.partition(":")
    if kind not in ("kompute", "vulkan"):
        return [("reference", first)]
    has_subgroups = uses_subgroups(first.info.limits)
    if variant == "subgroup" and not has_subgroups:
        first.close()
        raise VkBackendError(f"{first.info.name} reports no subgroup arithmetic; use --variant shared")
    opened: list[tuple[str, Device]] = []
    if has_subgroups and variant != "shared":
        opened.append(("subgroup", first))
    else:
        first.close()
    if variant != "subgroup":
        opened.append(("shared", _without_subgroups(kind, int(index or 0))))
    return opened


def _without_subgroups(kind: str, index: int) -> Device:
    """A device that is made to use the kernels for hardware without subgroup arithmetic."""
    if kind == "kompute":
        from vkbackend.device.kompute import KomputeDevice

        return KomputeDevice(index, subgroups=False)
    from vkbackend.device.vulkan import VulkanDevice

    return VulkanDevice(index, subgroups=False)


def _run_op(op: Op, device: Device, variant: str, seed: int) -> list[Result]:
    from vkbackend.ops.case import run_case

    results = []
    for case in op.cases():
        if sys.stderr.isatty():
            print(f"\r\033[K{op.name} [{variant}] {case.label}"[:160], end="", file=sys.stderr, flush=True)
        try:
            r = run_case(case, device, seed)
            results.append(Result(op.name, case.label, variant, r.nmse, r.max_nmse, r.ok, r.problem))
        except (VkBackendError, NotImplementedError) as error:  # one op's failure must not hide the others'
            results.append(Result(op.name, case.label, variant, float("inf"), case.max_nmse, False, str(error)))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return results


def _summary(results: list[Result]) -> str:
    rows = [["OP", "VARIANT", "CASES", "FAILED", "WORST NMSE"]]
    for op, variant in dict.fromkeys((r.op, r.variant) for r in results):
        mine = [r for r in results if (r.op, r.variant) == (op, variant)]
        worst = max((r.nmse for r in mine), default=0.0)
        rows.append([op, variant, str(len(mine)), str(sum(not r.ok for r in mine)), f"{worst:.2e}"])
    return table(rows)
