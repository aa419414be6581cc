"""`vkbackend devices`: what models can run on here."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from vkbackend.cli.common import Commands, add_command, add_json, print_json, table


def add(commands: Commands) -> None:
    add_json(add_command(commands, "devices", run, "Lists the devices that models can run on."))


def run(args: argparse.Namespace) -> int:
    from vkbackend.device import devices

    found = devices()
    if not any(info.api_version for info in found):
        print(f"no Vulkan device: {_why_none()}", file=sys.stderr)
    if args.json:
        print_json({"devices": [asdict(info) for info in found]})
        return 0
    rows = [["NAME", "KIND", "MEMORY", "SUBGROUP", "VULKAN", "DESCRIPTION"]]
    for info in found:
        memory = f"{info.memory / 2**30:.1f} GiB" if info.memory else "-"
        subgroup = str(info.limits.subgroup_size) if info.api_version else "-"
        rows.append([info.name, info.kind, memory, subgroup, info.api_version or "-", info.description])
    print(table(rows))
    return 0


def _why_none() -> str:
    """Why the list holds no Vulkan device, and what to do: `devices()` leaves out what it can not ask."""
    from vkbackend.device.probe import vulkan_devices
    from vkbackend.errors import DeviceError

    try:
        vulkan_devices("vulkan")
    except DeviceError as error:
        return str(error)
    return "the Vulkan drivers here have none; install your GPU's driver, or a CPU one"
