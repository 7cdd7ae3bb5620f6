"""A check of every test that offloads: never more in memory than the budget and the largest tensor, until it fails."""

from collections.abc import Iterator

import pytest

from fastckpt._core.offload.activation_store import ActivationStore
from fastckpt._core.offload.resident_memory import ResidentMemory


@pytest.fixture(autouse=True)
def budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look after each storage that is counted; what a failed disk leaves in memory is of no budget."""
    count, end = ResidentMemory.count, ActivationStore._end
    largest: dict[int, int] = {}
    memories: list[ResidentMemory] = []  # held, so that no id is used twice
    failed: list[ResidentMemory] = []
    exceeded: list[str] = []

    def counted(memory: ResidentMemory, saved) -> None:
        count(memory, saved)
        if id(memory) not in largest:
            memories.append(memory)
        most = largest[id(memory)] = max(largest.get(id(memory), 0), saved.size)
        if memory not in failed and memory.resident > memory.budget + most:
            exceeded.append(f"{memory.resident} bytes of a budget of {memory.budget}; the largest tensor has {most}")

    def ended(store: ActivationStore, *arguments: object) -> None:
        failed.append(store.memory)
        end(store, *arguments)

    monkeypatch.setattr(ResidentMemory, "count", counted)
    monkeypatch.setattr(ActivationStore, "_end", ended)
    yield
    assert not exceeded
