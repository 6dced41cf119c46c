"""A connector of vLLM that writes hidden states as safetensors files, on GPUs and CPUs.

vLLM's workers import it (`kv_connector_module_path`) in their own environment: it needs nothing of
eyas. vLLM's own connector copies by CUDA streams; on a CPU the copy is made at once.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class CopyDone:
    """In place of a CUDA event: the copy is already made."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class StatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes each request's `hidden_states` [T, layers, H] and `token_ids` [T]."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        cache: Any = self._kv_cache
        if cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)  # taken before the request began
        done = CopyDone()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda one: self._on_write_done(pending.req_id, one))
