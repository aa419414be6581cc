"""What the generation loop asks of a speculator, whatever it drafts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vkbackend.model.batch import Batch
    from vkbackend.model.loader import Model


@dataclass(frozen=True)
class DraftRequest:
    """Asks for drafts that follow `id_last`, which will stand at position n_past of its sequence."""

    seq: int
    id_last: int
    n_past: int


class Speculator(Protocol):
    """Drafts tokens for the sequences of one trunk context.

    The loop calls `process` after every decode of the trunk, `draft` before a verification, and `accept` after it,
    also when nothing was accepted.
    """

    @property
    def need_hidden(self) -> bool:
        """Whether the trunk must return the hidden row of every token."""
        ...

    @property
    def submissions(self) -> int:
        """Programs run so far."""
        ...

    def process(self, batch: Batch, hidden: NDArray[np.float32] | None) -> None: ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]: ...

    def accept(self, seq: int, n_accepted: int) -> None: ...

    def clear(self) -> None: ...


class SpeculatorSettings(Protocol):
    """A speculator yet to be started on a model: what `generate(spec=...)` takes, such as `DraftMTP`."""

    @property
    def n_max(self) -> int:
        """Most drafts in one step: the trunk must be able to roll back that many tokens."""
        ...

    @property
    def hidden(self) -> str | None:
        """The kind of hidden rows that the trunk must return, None for none."""
        ...

    def start(self, model: Model, n_ctx: int, n_seq_max: int = 1) -> Speculator: ...
