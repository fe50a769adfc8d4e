"""Where a cache's pool goes, and whether there is room for it. Nothing is allocated here."""
import torch

from torchsparsekv import host
from torchsparsekv.patches._plan import Plan

DEVICE_SHARE = 0.5  # offload="auto" keeps the pool on the device if the cache takes at most this share of free memory


def free_device_bytes(device: torch.device) -> int:
    """What the driver has, and what torch's allocator holds but does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def pool_on_host(plan: Plan, offload: str, batch: int, length: int) -> bool:
    if offload != "auto" or plan.device.type != "cuda":
        return offload == "host"
    needed = plan.bytes(batch, length, pool_on_host=False)[1]
    return needed > DEVICE_SHARE * free_device_bytes(plan.device)


def check_memory(plan: Plan, batch: int, length: int, *, pool_on_host: bool) -> None:
    """Refuse, with numbers, before anything is allocated."""
    need_host, need_device = plan.bytes(batch, length, pool_on_host=pool_on_host)
    if plan.device.type == "cuda":
        have_device = free_device_bytes(plan.device)
    else:
        need_host, need_device, have_device = need_host + need_device, 0, 0
    for what, need, have in (("host", need_host, host.available()), ("device", need_device, have_device)):
        if need > have:
            raise MemoryError(
                f"a cache of {length} tokens x batch {batch} needs {need_host / 2**30:.2f} GiB host and "
                f"{need_device / 2**30:.2f} GiB device memory, but only {have / 2**30:.2f} GiB {what} memory is free"
            )
    if plan.device.type == "cuda" and (limit := host.pinnable(need_host, plan.device)) < need_host:
        raise MemoryError(
            f"a cache of {length} tokens x batch {batch} needs {need_host / 2**30:.2f} GiB of pinned host memory, but "
            f"{host.memlock_said(limit)} and this driver heeds it; raise it, or keep the pool with offload='device'"
        )
