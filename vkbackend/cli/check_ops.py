"""`vkbackend test-ops`: every op's cases on a device against the float64 reference."""

from __future__ import annotations

import argparse
import platform
import secrets
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vkbackend.cli.common import Commands, add_command, add_device, add_json, print_json, table
from vkbackend.errors import VkBackendError

if TYPE_CHECKING:
    from vkbackend.device.base import Device, DeviceInfo
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

    @property
    def share(self) -> float:
        """How much of what is allowed was used: 1 is the limit."""
        return self.nmse / self.max_nmse


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
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--repro", type=Path, metavar="FILE", help="write the worst failing case there, with its inputs")
    files.add_argument("--replay", type=Path, metavar="FILE", help="run the case of a --repro file with its inputs")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from vkbackend.cli import UsageError

    if args.replay is not None:
        return _replay(args)
    if args.seed is not None and args.seed < 0:
        raise UsageError(f"--seed is {args.seed}; 0 or more is needed")
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    ops = _choose(args.op)
    results: list[Result] = []
    infos: list[DeviceInfo] = []
    for variant, device in _open(args.device, args.variant):
        infos.append(device.info)
        try:
            for op in ops:
                results += _run_op(op, device, variant, seed)
        finally:
            device.close()
    results.sort(key=lambda r: (r.ok, -r.share))
    failed = [r for r in results if not r.ok]
    info = infos[0]
    described = f"{info.name} ({info.description})"
    if args.repro is not None and failed:
        _write_repro(args, failed[0], seed)
    if args.json:
        print_json(
            {
                "device": described,
                "info": asdict(info),
                "seed": seed,
                "passed": len(results) - len(failed),
                "failed": len(failed),
                "results": [vars(r) for r in results],
            }
        )
        return 1 if failed else 0
    print(*_about(info), f"seed {seed}", sep="\n")
    print(_summary(results))
    print(_worst(results))
    for r in failed:
        why = r.problem or f"NMSE {r.nmse:.3g}, allowed {r.max_nmse:.3g}"
        print(f"FAILED {r.op} [{r.variant}] {r.case}: {why}")
    print(f"{len(results) - len(failed)} of {len(results)} cases passed")
    if failed:
        print(
            f"vkbackend test-ops: {len(failed)} of {len(results)} cases failed on {described}; "
            f"repeat with --seed {seed}" + (f", inputs are in {args.repro}" if args.repro else ""),
            file=sys.stderr,
        )
    elif args.repro is not None:
        print(f"nothing failed: {args.repro} was not written")
    return 1 if failed else 0


def _about(info: DeviceInfo) -> list[str]:
    """The device, its driver and its limits, as a bug report needs them."""
    from vkbackend import __version__

    limits = info.limits
    lines = [f"{info.name} ({info.description}), vkbackend {__version__}, Python {platform.python_version()}"]
    if info.api_version:
        lines.append(f"Vulkan {info.api_version}, driver {info.driver}, {platform.platform()}")
        lines.append(
            f"limits: push {limits.max_push_bytes} bytes, shared {limits.max_shared_bytes} bytes, "
            f"{limits.max_invocations} invocations, workgroups {'x'.join(map(str, limits.max_groups))}, "
            f"range {limits.max_storage_range} bytes, subgroup {limits.subgroup_size}"
        )
    return lines


def _write_repro(args: argparse.Namespace, failed: Result, seed: int) -> None:
    from vkbackend.repro import write_repro

    op = _choose([failed.op])[0]
    case = next(c for c in op.cases() if c.label == failed.case)
    for variant, device in _open(args.device, failed.variant if failed.variant in VARIANTS else "both"):
        try:
            write_repro(args.repro, op.name, case, device, variant, seed)
        except VkBackendError as error:  # the case can not even run: there are no results to write
            print(f"{args.repro} was not written: {error}", file=sys.stderr)
        finally:
            device.close()


def _replay(args: argparse.Namespace) -> int:
    from vkbackend.repro import read_repro, replay

    repro = read_repro(args.replay)
    bad = 0
    for variant, device in _open(args.device, args.variant):
        try:
            r = replay(repro, device)
        finally:
            device.close()
        bad += not r.ok
        print(*_about(device.info), sep="\n")
        verdict = "passed" if r.ok else f"FAILED {r.problem}".strip()
        print(f"{repro.op} [{variant}] {r.label}: {verdict}, NMSE {r.nmse:.3g}, allowed {r.max_nmse:.3g}")
    return 1 if bad else 0


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


def _worst(results: list[Result], n: int = 5) -> str:
    rows = [["WORST CASES", "VARIANT", "NMSE", "ALLOWED", "CASE"]]
    for r in results[:n]:
        rows.append([r.op, r.variant, f"{r.nmse:.2e}", f"{r.max_nmse:.0e}", r.case])
    return table(rows)


def _summary(results: list[Result]) -> str:
    rows = [["OP", "VARIANT", "CASES", "FAILED", "WORST NMSE"]]
    for op, variant in dict.fromkeys((r.op, r.variant) for r in results):
        mine = [r for r in results if (r.op, r.variant) == (op, variant)]
        worst = max((r.nmse for r in mine), default=0.0)
        rows.append([op, variant, str(len(mine)), str(sum(not r.ok for r in mine)), f"{worst:.2e}"])
    return table(rows)
