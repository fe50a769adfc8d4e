"""Where the pool of a cache lives, and whether there is room. Nothing is allocated here."""
import math
import numbers
from typing import NamedTuple

import torch

from torchsparsekv import host
from torchsparsekv.method import DEVICE_SHARE, Method
from torchsparsekv.patches._plan import Plan
from torchsparsekv.state import HOT_BUDGETS


def free_device_bytes(device: torch.device) -> int:
    """The memory that the driver has free, and the memory that torch's allocator holds without use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def weight_bytes(model) -> int:
    return sum(p.nbytes for p in model.parameters())


def pool_on_host(plan: Plan, offload: str, batch: int, length: int) -> bool:
    if offload != "auto" or plan.device.type != "cuda":
        return offload == "host"
    needed = plan.bytes(batch, length, pool_on_host=False)[1]
    return needed > DEVICE_SHARE * free_device_bytes(plan.device)


class Placement(NamedTuple):
    """Where the pool of a cache lives, and the size of its hot buffers.

    hot_budgets: the size of a hot buffer, in budgets, in layers with hot_budgets="auto".
    """

    pool_on_host: bool
    hot_budgets: int = HOT_BUDGETS


def check_hot_gib(given, method: Method, device: torch.device) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"hot_gib must be a number of GiB, got {given!r}")
    gib = float(given)
    if not 0 < gib < math.inf:
        raise ValueError(f"hot_gib must be finite, > 0, got {given!r}")
    if method.hot_budgets != "auto":
        raise ValueError(f"give hot_budgets or hot_gib, not both: got {method.hot_budgets!r} and {given!r}")
    if device.type == "cuda" and gib * 2**30 > (free := free_device_bytes(device)):
        raise MemoryError(f"hot_gib {given} is above the {free / 2**30:.2f} GiB of free device memory")
    return gib


def placed(plan: Plan, offload: str, batch: int, length: int, hot_gib: float | None = None) -> Placement:
    """The placement of a new cache, by the memory that is free."""
    on_host = pool_on_host(plan, offload, batch, length)
    if hot_gib is not None and (most := plan.most_budgets(length)):
        hot = lambda budgets: plan.hot_bytes(batch, length, pool_on_host=on_host, hot_budgets=budgets)  # noqa: E731
        if (least := hot(1)) > hot_gib * 2**30:
            raise ValueError(
                f"hot_gib {hot_gib} is below the {least / 2**30:.3g} GiB that one budget takes in a cache of {length} "
                f"tokens x batch {batch}"
            )
        return Placement(on_host, _largest(most, lambda budgets: hot(budgets) <= hot_gib * 2**30))
    if not on_host or plan.device.type != "cuda" or not (most := _most_budgets(plan, batch, length)):
        return Placement(on_host)
    free = free_device_bytes(plan.device)
    size = lambda budgets: plan.bytes(batch, length, pool_on_host=True, hot_budgets=budgets)[1]  # noqa: E731
    usual = min(HOT_BUDGETS, most)
    least = usual if size(usual) <= free else 1
    room, beside = DEVICE_SHARE * free, free - prompt_bytes(plan, batch, length)
    if size(least) <= beside:  # keep room for a prompt that fills the cache; otherwise it must come in chunks
        room = min(room, beside)
    return Placement(True, max(least, _largest(most, lambda budgets: size(budgets) <= room)))


def largest_batch(plan: Plan, length: int, *, on_host: bool, device_bytes: float, host_bytes: float) -> int:
    """How many sequences of `length` tokens fit, with the usual hot buffers; `on_host`: the pool is in host memory."""
    need_host, need_device = plan.bytes(1, length, pool_on_host=on_host)
    fits = int(device_bytes // need_device)
    return min(fits, int(host_bytes // need_host)) if need_host else fits


def hot_room(plan: Plan, batch: int, length: int, device_bytes: float) -> int:
    """Bytes that are left for hot buffers with the pool in host memory, at most enough for all blocks.

    0 if the size of the hot buffers is not a number of budgets.
    """
    if not (most := _most_budgets(plan, batch, length)):
        return 0
    size = lambda budgets: plan.hot_bytes(batch, length, pool_on_host=True, hot_budgets=budgets)  # noqa: E731
    others = plan.bytes(batch, length, pool_on_host=True, hot_budgets=1)[1] - size(1)
    return min(int(device_bytes) - others, size(most))


def prompt_bytes(plan: Plan, batch: int, length: int) -> int:
    """An estimate of the device memory that a forward needs for one prompt that fills the cache."""
    hidden = plan.config.hidden_size
    inner = getattr(plan.config, "intermediate_size", None) or 4 * hidden
    return batch * length * (4 * hidden + 3 * inner) * plan.dtype.itemsize


def _most_budgets(plan: Plan, batch: int, length: int) -> int:
    """The budgets in a sequence; 0 if the size of the hot buffers does not depend on a number of budgets."""
    most = plan.most_budgets(length)
    one, all_of_them = (plan.hot_bytes(batch, length, pool_on_host=True, hot_budgets=n) for n in (1, max(most, 2)))
    return most if one < all_of_them else 0


def _largest(most: int, fits) -> int:
    """The largest number from 1 to `most` that fits; 1 if none does."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def hot_note(plan: Plan, place: Placement, batch: int, length: int, hot_gib: float | None) -> tuple[str, ...]:
    """A line on the size of the hot buffers, if free memory or `hot_gib` decided the size."""
    most = _most_budgets(plan, batch, length)
    if not most or (hot_gib is None and plan.device.type != "cuda"):
        return ()
    if not place.pool_on_host and hot_gib is None:
        return ("the pool is on the device: nothing crosses the link",)
    nbytes = plan.hot_bytes(batch, length, pool_on_host=place.pool_on_host, hot_budgets=place.hot_budgets)
    room = "every block" if place.hot_budgets >= most else f"{place.hot_budgets} of the {most} budgets of a sequence"
    why = f"hot_gib {hot_gib}" if hot_gib is not None else f'hot_budgets "auto" ({DEVICE_SHARE:.0%} of free memory)'
    return (f"{why}: the hot buffers have room for {room} and take {nbytes / 2**30:.2f} GiB",)


def check_memory(plan: Plan, batch: int, length: int, place: Placement) -> None:
    """Refuse a cache for which memory is short, before anything is allocated."""
    need_host, need_device = plan.bytes(batch, length, **place._asdict())
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
            f"{host.memlock_said(limit)} and this driver obeys it: raise the limit, or pass offload='device'"
        )
