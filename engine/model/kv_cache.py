"""The KV cache: storage allocated once, a length for each sequence, drafts overwritten by verification."""

from __future__ import annotations

from typing import NoReturn

import torch
from transformers.cache_utils import Cache

from engine.errors import BudgetError, ModelError, one_line
from engine.kernels.attention import gather
from engine.model.deferred import Deferred


class CachedStates(Deferred):
    """Keys or values of one layer: `storage` (sequences, heads, max_length, dim), of which the pass uses `slots`.

    As a tensor it is (batch, heads, longest, dim), copied out of the storage.
    """

    def __init__(self, storage: torch.Tensor, slots: torch.Tensor, end: int) -> None:
        super().__init__(lambda: gather(storage, slots, end))
        self.storage, self.slots = storage, slots


class KVCache(Cache):
    """Keys and values of up to `sequences` sequences of up to `max_length` tokens.

    Draft and target share it. A forward pass writes its rows at `starts`, which need not be the committed
    lengths: the draft appends past them, and verification overwrites what the draft wrote. Only `commit`
    moves a length, so nothing ever has to be cropped. Sliding-window layers keep every token here and are
    masked to their window.
    """

    is_compileable = False

    def __init__(self, layers: int, sequences: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.max_length = max_length
        self.lengths = torch.zeros(sequences, dtype=torch.long)
        self._storage: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers
        self._slots = torch.zeros(0, dtype=torch.long)
        self._starts = torch.zeros(0, dtype=torch.long)
        self._alone: int | None = None
        self._longest = 0
        # The same for every layer of a pass: (sequences, 1) slots and (sequences, rows) positions to write to.
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, slots: torch.Tensor, starts: torch.Tensor) -> None:
        """The next forward pass serves these sequence slots (batch,), writing row 0 of each at `starts` (batch,)."""
        self._slots, self._starts = slots, starts
        # Read here, and not in `update`: a probe runs the model on shapes that have no values.
        self._alone = int(slots) if len(slots) == 1 else None
        self._longest = int(starts.max())
        self._places = None

    def commit(self, slot: int, length: int) -> None:
        """Sequence `slot` now has `length` valid tokens."""
        self.lengths[slot] = length

    @property
    def slots(self) -> torch.Tensor:
        """The sequence slots that the pass serves, (batch,)."""
        return self._slots

    @property
    def starts(self) -> torch.Tensor:
        """Where row 0 of each goes, (batch,)."""
        return self._starts

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._storage if pair for t in pair)

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[CachedStates, CachedStates]:
        """Write (batch, heads, rows, dim) at each sequence's start; returns all keys and values up to the longest."""
        keys, values = self._storage[layer_idx] or self._allocate(layer_idx, key_states, value_states)
        rows = key_states.shape[2]
        end = self._longest + rows
        if self._alone is not None:
            keys[self._alone, :, self._longest : end] = key_states[0]
            values[self._alone, :, self._longest : end] = value_states[0]
        else:
            # One call for all: slice by slice, a pass of 16 sequences spent a tenth of its time here.
            if self._places is None:
                places = self._starts[:, None] + torch.arange(rows)
                self._places = self._slots[:, None].to(keys.device), places.to(keys.device)
            slots, positions = self._places
            keys[slots, :, positions] = key_states.transpose(1, 2)
            values[slots, :, positions] = value_states.transpose(1, 2)
        return CachedStates(keys, self._slots, end), CachedStates(values, self._slots, end)

    def storage(self, layer_idx: int, like: torch.Tensor, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, each (sequences, heads, max_length, dim), for who writes them himself."""
        states = self._storage[layer_idx]
        if states is None:
            shape = like.new_empty(0, heads, 0, dim)
            states = self._allocate(layer_idx, shape, shape)
        return states

    def _allocate(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises BudgetError when the memory is not there."""
        sequences = len(self.lengths)
        try:
            keys, values = (t.new_zeros(sequences, t.shape[1], self.max_length, t.shape[3]) for t in (key, value))
        except (RuntimeError, MemoryError) as error:
            raise BudgetError(
                f"no memory for the keys and values of {sequences} × {self.max_length} tokens ({one_line(error)}): "
                "ask for fewer new tokens or fewer prompts at a time"
            ) from error
        self._storage[layer_idx] = (keys, values)
        return keys, values

    def update_indexer(self, *args, **kwargs) -> torch.Tensor:
        raise ModelError(
            "this model picks keys by an index of its own, which the KV cache does not keep: choose another"
        )

    def _refuse_state(self, *args, **kwargs) -> NoReturn:
        raise ModelError(
            "this model keeps a recurrent state, which cannot be taken back after a rejected draft: choose a model "
            "with attention in every layer"
        )

    get_conv_state = update_conv_state = _refuse_state
    get_recurrent_state = update_recurrent_state = has_previous_state = _refuse_state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:  # type: ignore[override]
        # One offset a sequence, (batch, 1): transformers hands it to our mask function as it is.
        return self._starts[:, None]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_length
