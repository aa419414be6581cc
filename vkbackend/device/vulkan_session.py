"""One open Vulkan device: instance, logical device, compute queue; lifetimes, submissions and error codes.

Calls go straight to the cffi library of the `vulkan` package (`ffi`, `lib`): its Python wrappers convert every
argument anew, which costs more than a small submission.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any

from vkbackend.device.base import DeviceInfo
from vkbackend.device.probe import PhysicalDevice, create_instance, load_vulkan, physical_devices
from vkbackend.errors import DeviceError

WAIT_SLICE_NS = 20_000_000  # Python sees Ctrl-C between two slices; the thread sleeps within one
WAIT_LIMIT_S = 120.0  # of a submission on a GPU: it should take less than one; CPU drivers may take what they need
_SUCCESS, _TIMEOUT, _DEVICE_LOST = 0, 2, -4
_QUEUE_COMPUTE = 0x2
_ALSO_ENABLED = ("VK_KHR_portability_subset", "VK_EXT_memory_budget")
_RESULTS = {
    -1: "out of host memory",
    -2: "out of device memory",
    -3: "initialisation failed",
    _DEVICE_LOST: "device lost",
    -5: "memory can not be mapped",
    -6: "a layer is missing",
    -7: "an extension is missing",
    -8: "a feature is missing",
    -9: "incompatible driver",
    -10: "too many objects",
    -12: "fragmented pool",
    -1000069000: "out of pool memory",
}


class Session:
    """Owns every Vulkan object of one device. Raises `DeviceError` when the device can not be opened.

    `lock` guards the queue and everything that is recorded or created; it may be taken again by its holder.
    """

    def __init__(self, index: int) -> None:
        self.vk = vk = load_vulkan()
        self.ffi, self.lib = vk.ffi, vk.lib
        self.lock = threading.RLock()
        self._problem = ""
        self._hangs = False
        self._in_flight: set[Job] = set()
        self._cleanups: dict[int, Callable[[], None]] = {}
        self._keys = itertools.count()
        self._instance = create_instance(vk)
        self.keep(lambda: vk.lib.vkDestroyInstance(self._instance, vk.ffi.NULL))
        try:
            self.physical, self.found = self._pick(index)
            self.info: DeviceInfo = self.found.info
            self.family, self.timestamp_bits = self._compute_family()
            self.device = self._open()
            queue = self.ffi.new("VkQueue*")
            self.lib.vkGetDeviceQueue(self.device, self.family, 0, queue)
            self.queue = queue[0]
        except BaseException:
            self.close()
            raise

    def _pick(self, index: int) -> tuple[Any, PhysicalDevice]:
        found = physical_devices(self.vk, self._instance)
        if not 0 <= index < len(found):
            raise DeviceError(
                f"vulkan:{index}: there is no such Vulkan device; found {len(found)}: "
                + (", ".join(f"{d.info.name} ({d.info.description})" for d in found) or "none, install a Vulkan driver")
            )
        chosen = found[index]
        if tuple(int(part) for part in chosen.info.api_version.split(".")[:2]) < (1, 1):
            raise DeviceError(
                f"{chosen.info.name} ({chosen.info.description}): its driver knows Vulkan {chosen.info.api_version}, "
                "1.1 is needed; update the driver"
            )
        return self.vk.vkEnumeratePhysicalDevices(self._instance)[index], chosen

    def _compute_family(self) -> tuple[int, int]:
        """The first queue family with compute (Kompute's choice too) and its number of timestamp bits."""
        for i, family in enumerate(self.vk.vkGetPhysicalDeviceQueueFamilyProperties(self.physical)):
            if family.queueFlags & _QUEUE_COMPUTE:
                return i, int(family.timestampValidBits)
        raise DeviceError(f"{self.info.name} ({self.info.description}) has no compute queue; choose another device")

    def _open(self) -> Any:
        ffi, vk = self.ffi, self.vk
        features, links = self.found.optional.chain(vk)
        wanted = [*self.found.optional.extensions, *(e for e in _ALSO_ENABLED if e in self.found.extensions)]
        names = [ffi.new("char[]", name.encode()) for name in wanted]
        pointers = ffi.new("char*[]", names)
        queues = ffi.new(
            "VkDeviceQueueCreateInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
                "queueFamilyIndex": self.family,
                "queueCount": 1,
                "pQueuePriorities": (priority := ffi.new("float*", 1.0)),
            },
        )
        info = ffi.new(
            "VkDeviceCreateInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
                "pNext": features,
                "queueCreateInfoCount": 1,
                "pQueueCreateInfos": queues,
                "enabledExtensionCount": len(names),
                "ppEnabledExtensionNames": ffi.cast("const char* const*", pointers),
            },
        )
        out = ffi.new("VkDevice*")
        self.check(self.lib.vkCreateDevice(self.physical, info, ffi.NULL, out), "opening the device")
        del links, priority  # they had to live until here: C structures hold bare pointers to them
        device = out[0]
        self.keep(lambda: self.lib.vkDestroyDevice(device, ffi.NULL))
        return device

    # ---- errors

    def check(self, code: int, doing: str) -> None:
        """Raises `DeviceError` for a VkResult other than success. A lost device stays unusable."""
        if code != _SUCCESS:
            raise self.error(code, doing)

    def error(self, code: int, doing: str) -> DeviceError:
        """The exception for a VkResult."""
        name = self._name()
        if code == _DEVICE_LOST:
            self._problem = "was lost earlier; close it and open it again"
            return DeviceError(
                f"{name}: the device was lost while {doing}; all its buffers are gone. Often a submission ran longer "
                "than the driver's watchdog allows: use a smaller n_ubatch; then close the device and open it again"
            )
        return DeviceError(f"{name}: {doing} failed: {_RESULTS.get(code, 'VkResult')} ({code})")

    def _name(self) -> str:
        return f"{self.info.name} ({self.info.description})" if hasattr(self, "info") else "vulkan"

    def require_usable(self) -> None:
        """Raises `DeviceError` when the device was closed or lost."""
        if self._problem:
            raise DeviceError(f"{self._name()}: this device {self._problem}")

    # ---- lifetimes

    def own(self, owner: object, destroy: Callable[[], None]) -> None:
        """Calls `destroy` once: when `owner` is no longer referenced, or when the device closes if that is first."""
        finalizer = weakref.finalize(owner, self.end, self.keep(destroy))
        finalizer.atexit = False  # at exit the device itself is closed, in order

    def keep(self, destroy: Callable[[], None]) -> int:
        """Calls `destroy` when the device closes, the latest first."""
        key = next(self._keys)
        self._cleanups[key] = destroy
        return key

    def end(self, key: int) -> None:
        """Calls what `keep` gave this key for, if that was not done yet."""
        # pop() decides who destroys when a garbage collection and close() meet.
        destroy = self._cleanups.pop(key, None)
        if destroy is not None:
            destroy()

    def close(self) -> None:
        """Waits for the device and destroys everything. May be called again."""
        with self.lock:
            if self._hangs:
                self._cleanups.clear()  # waiting would last for ever, and what the device may still use can not go
            if hasattr(self, "device") and self._cleanups:
                self.lib.vkDeviceWaitIdle(self.device)
            self._problem = "is closed; open it again"
            self._in_flight.clear()
            for key in sorted(self._cleanups, reverse=True):
                self.end(key)

    # ---- submissions

    def run(self, job: Job) -> None:
        """Submits a job and waits until it is done."""
        with self.lock:
            self.settle()
            self.submit(job)
            self.finish(job)

    def submit(self, job: Job) -> None:
        """Starts a job; `finish` must follow. Hold `lock` from here to there."""
        # Listed first: an interrupt may come at any point from here on, and `settle` copes with both cases.
        self._in_flight.add(job)
        self.lib.vkResetFences(self.device, 1, job.fences)
        code = self.lib.vkQueueSubmit(self.queue, 1, job.submit_info, job.fence)
        if code:
            self._in_flight.discard(job)
            raise self.error(code, "submitting work")

    def finish(self, job: Job) -> None:
        """Waits for a submitted job."""
        wait, device, fences = self.lib.vkWaitForFences, self.device, job.fences
        start = monotonic()
        code = wait(device, 1, fences, 1, WAIT_SLICE_NS)
        while code == _TIMEOUT:
            if self.info.kind == "gpu" and monotonic() - start > WAIT_LIMIT_S:
                self._hangs = True
                self._problem = "hung earlier; end this process before it is used again"
                raise DeviceError(
                    f"{self._name()}: a submission did not finish within {WAIT_LIMIT_S:g} s; the device hangs. Use a "
                    "smaller n_ubatch, and report it with the output of: vkbackend test-ops"
                )
            code = wait(device, 1, fences, 1, WAIT_SLICE_NS)
        if code:  # the job may still run: `settle` or `close` waits for it
            raise self.error(code, "waiting for submitted work")
        self._in_flight.discard(job)

    def settle(self) -> None:
        """Makes memory safe to touch from the host: an interrupted wait leaves its work running on the device.

        Raises `DeviceError` when the device was closed or lost.
        """
        if self._problem:
            self.require_usable()
        if self._in_flight:
            with self.lock:
                code = self.lib.vkQueueWaitIdle(self.queue)
                self._in_flight.clear()
                self.check(code, "waiting for interrupted work")


class Job:
    """A command buffer with a pool and a fence of its own: recorded once or often, submitted many times.

    What its commands use belongs into `references`, so that it outlives a wait that was interrupted.
    """

    def __init__(self, session: Session) -> None:
        self.references: list[object] = []
        ffi, lib, vk, device = session.ffi, session.lib, session.vk, session.device
        self._session = session
        pool = ffi.new("VkCommandPool*")
        pool_info = ffi.new(
            "VkCommandPoolCreateInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                "queueFamilyIndex": session.family,
            },
        )
        session.check(lib.vkCreateCommandPool(device, pool_info, ffi.NULL, pool), "making a command pool")
        session.own(self, lambda: lib.vkDestroyCommandPool(device, pool[0], ffi.NULL))
        self._pool = pool[0]
        self._commands = ffi.new("VkCommandBuffer*")
        buffer_info = ffi.new(
            "VkCommandBufferAllocateInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
                "commandPool": pool[0],
                "level": vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                "commandBufferCount": 1,
            },
        )
        session.check(lib.vkAllocateCommandBuffers(device, buffer_info, self._commands), "making a command buffer")
        self.commands = self._commands[0]
        self.fences = fences = ffi.new("VkFence*")
        fence_info = ffi.new("VkFenceCreateInfo*", {"sType": vk.VK_STRUCTURE_TYPE_FENCE_CREATE_INFO})
        session.check(lib.vkCreateFence(device, fence_info, ffi.NULL, fences), "making a fence")
        session.own(self, lambda: lib.vkDestroyFence(device, fences[0], ffi.NULL))
        self.fence = fences[0]
        self.submit_info = ffi.new(
            "VkSubmitInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_SUBMIT_INFO,
                "commandBufferCount": 1,
                "pCommandBuffers": self._commands,
            },
        )

    def begin(self) -> None:
        """Starts (or starts again) recording; the job must not be running."""
        session = self._session
        lib, kind = session.lib, session.vk.VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO
        session.check(lib.vkResetCommandPool(session.device, self._pool, 0), "emptying a recording")
        info = session.ffi.new("VkCommandBufferBeginInfo*", {"sType": kind})
        session.check(lib.vkBeginCommandBuffer(self.commands, info), "beginning a recording")

    def end(self) -> None:
        self._session.check(self._session.lib.vkEndCommandBuffer(self.commands), "ending a recording")
