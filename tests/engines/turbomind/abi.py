"""`sage_hooks.h` for ctypes: what an engine needs to call a table."""

import ctypes as c
from typing import Any

i32, u32, u64, ptr = c.c_int32, c.c_uint32, c.c_uint64, c.c_void_p
i32s, u64s = c.POINTER(i32), c.POINTER(u64)

HOLD = 2**64 - 1
REPLACE_TRIE, TIME_COMM = 1, 2
FREE, CACHED, ACTIVE = range(3)
PROMPT, GENERATION = 1, 2


def structure(name: str, **fields: Any) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": list(fields.items())})


BlockInfo = structure(
    "BlockInfo", id=i32, use_count=i32, state=i32, reserved=i32, unique_id=u64, timestamp=u64,
)  # fmt: skip
Counts = structure(
    "Counts", struct_size=u32, reserved=u32, total=i32, free=i32, cached=i32, active=i32, max_blocks=i32, block_len=i32,
    block_bytes=u64,
)  # fmt: skip
BlockInfoFunction = c.CFUNCTYPE(i32, ptr, i32s, i32, c.POINTER(BlockInfo))
CountsFunction = c.CFUNCTYPE(None, ptr, c.POINTER(Counts))
KvApi = structure("KvApi", abi=u32, struct_size=u32, block_info=BlockInfoFunction, counts=CountsFunction, migrate=ptr)
Manager = structure(
    "Manager", struct_size=u32, reserved=u32, manager=ptr, api=c.POINTER(KvApi), engine=u64, group=i32, rank=i32,
    n_ranks=i32, block_len=i32, generation=u64, epoch=u64, stream=ptr,
)  # fmt: skip
Sequence = structure(
    "Sequence", seq_id=u64, priority=u64, status=i32, context_len=i32, cache_len=i32, n_blocks=i32, blocks=i32s,
    unique_ids=u64s, prompt=i32s, n_prompt=i32, reserved=i32,
)  # fmt: skip
Request = structure("Request", seq_id=u64, n_tokens=i32, max_new_tokens=i32)
Step = structure(
    "Step", struct_size=u32, group=i32, engine=u64, step=u64, max_batch=i32, default_budget=i32, max_budget=i32,
    free_blocks=i32, cached_blocks=i32, active_blocks=i32,
)  # fmt: skip
StepResult = structure(
    "StepResult", struct_size=u32, group=i32, engine=u64, step=u64, n_sequences=i32, n_tokens=i32, n_finished=i32,
    reserved=i32,
)  # fmt: skip
Comm = structure(
    "Comm", struct_size=u32, op=i32, group=i32, rank=i32, n_ranks=i32, reserved=i32, bytes=u64, stream=ptr,
)  # fmt: skip

M, S = c.POINTER(Manager), c.POINTER(Sequence)
Hooks = structure(
    "Hooks", abi=u32, struct_size=u32, flags=u32, reserved=u32, ctx=ptr,
    evict=c.CFUNCTYPE(i32, ptr, M, i32s, i32, i32, i32s),
    evicted=c.CFUNCTYPE(None, ptr, M, i32s, u64s, i32),
    released=c.CFUNCTYPE(None, ptr, M, u64, i32s, u64s, i32),
    reset=c.CFUNCTYPE(None, ptr, M),
    prefix_lookup=c.CFUNCTYPE(i32, ptr, M, S, i32, i32s, u64s),
    prefix_store=c.CFUNCTYPE(None, ptr, M, u64, i32, i32s, i32s, u64s, i32),
    schedule=c.CFUNCTYPE(i32, ptr, c.POINTER(Step), S, i32, u64s, i32s),
    admit=c.CFUNCTYPE(i32, ptr, u64, i32, c.POINTER(Request), i32, i32, i32s),
    step_end=c.CFUNCTYPE(None, ptr, c.POINTER(StepResult)),
    comm_begin=c.CFUNCTYPE(ptr, ptr, c.POINTER(Comm)),
    comm_end=c.CFUNCTYPE(None, ptr, c.POINTER(Comm), ptr, c.c_float),
)  # fmt: skip


def hooks_of(table: Any) -> Any:
    """The `Hooks` in the capsule of a `_core.HookTable`; ctypes gives up the GIL while it calls one."""
    from sagellm._core import HOOKS_ABI, HOOKS_CAPSULE

    get = c.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ptr, [c.py_object, c.c_char_p]
    hooks = Hooks.from_address(get(table.capsule(), HOOKS_CAPSULE.encode()))
    assert hooks.abi == HOOKS_ABI and hooks.struct_size == c.sizeof(Hooks)
    return hooks


def ints(values: Any) -> Any:
    return (i32 * max(len(values), 1))(*values)


def longs(values: Any) -> Any:
    return (u64 * max(len(values), 1))(*values)
