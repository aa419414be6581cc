"""Chains (chains.py) rest on workgroups that run side by side. Before its first use each kernel is tried: all its
workgroups wait for each other once. And every run of a program is checked afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vkbackend.chains import RIGHT, trial
from vkbackend.device.base import Words
from vkbackend.errors import DeviceError
from vkbackend.launch import Launch

Tried = set[tuple[object, ...]]  # kernels with their constants that ran side by side


def all_run(chains: Sequence[Launch], tried: Tried, run: Callable[[Launch], int]) -> bool:
    """Whether every kernel's workgroups run side by side. `run` runs a launch with all counters at zero and returns the
    word where it left its status."""
    for launch in chains:
        key = (launch.kernel, launch.spec, launch.groups)
        if key not in tried:
            if run(trial(launch)) != RIGHT:
                return False
            tried.add(key)
    return True


def check_ended(status: Words, device: str) -> None:
    """Raises `DeviceError` when a chain of the last run did not come to its end."""
    wrong = int((status != RIGHT).sum())
    if wrong:
        raise DeviceError(
            f"{device}: {wrong} of {status.size} chains of products did not end, as their workgroups did not run side "
            f"by side; what this run has computed is lost: open the device as {device}:unchained"
        )
