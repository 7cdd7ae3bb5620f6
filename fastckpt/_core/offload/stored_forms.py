"""The forms in which saved storages are in the scratch file: their bytes, or an encoding that takes fewer."""

import contextlib
import threading

import torch

from fastckpt._core.offload.codecs import codec_rates, decode, encode, sample_ratio
from fastckpt._core.offload.forward_pass import Occurrence
from fastckpt._core.offload.saved_storage import SavedStorage
from fastckpt._core.offload.staging import as_bytes
from fastckpt._core.offload.transfers import Transfers

PARTS = 3
"""Parts of an encoded tensor, at most."""


class StoredForms:
    """Writes and loads saved storages, for any number of threads.

    Args:
        transfers: Transfers of the scratch file.
        half: True if floats of 32 bits are stored in 16.
    """

    def __init__(self, transfers: Transfers, *, half: bool) -> None:
        self._transfers = transfers
        self._half = half
        self._lock = threading.Lock()

    def room(self, saved: SavedStorage, *, compressed: bool) -> int:
        """Bytes of a region in which a storage has room, in whatever form."""
        return self._transfers.room(saved.size, PARTS if compressed or self._half else 1)

    def write(self, saved: SavedStorage, at: Occurrence, compressed: bool, sampled: bool) -> bool:
        """Write a storage to its region; returns whether that equals the memory. Raises OSError.

        Memory that became smaller meanwhile was not the graph's alone: then the written bytes are of no use.
        """
        assert saved.memory is not None and saved.region is not None
        with self._transfers.beside_training(saved.device, saved.ready):
            parts = [saved.memory]
            if (compressed or sampled or self._half) and saved.size % saved.as_dtype.itemsize == 0:
                values = saved.memory.view(saved.as_dtype)
                # Encoding takes memory of the device: where that is short, the bytes go as they are.
                with contextlib.suppress(torch.OutOfMemoryError):
                    if sampled:
                        self._sample(values, at)
                    if compressed or self._halves(values):
                        encoded = encode(values, half=self._half)
                        saved.form, parts = encoded.description, list(encoded.parts)
            saved.written = self._transfers.write(parts, saved.region)
        saved.ready = None
        if not saved.is_whole:
            return False
        with self._lock:
            at.forward.moved += saved.size
            at.forward.written += sum(part.size for part in saved.written)
        return True

    def load(self, saved: SavedStorage) -> torch.Tensor:
        """Read a storage into new memory, as bytes. Raises OSError."""
        with self._transfers.beside_training(saved.device):
            parts = self._transfers.fetch(saved.written, saved.device)
            if saved.form is None:
                return parts[0]
            typed = [part.view(dtype) for part, (dtype, _) in zip(parts, saved.form.parts, strict=True)]
            return as_bytes(decode(saved.form, typed))

    def _sample(self, values: torch.Tensor, at: Occurrence) -> None:
        ratio, forward = sample_ratio(values), at.forward
        forward.entries[at.index].ratio = ratio / (2 if self._halves(values) else 1)
        if ratio < 1:
            rates = codec_rates(values)
            with self._lock:
                encoding, decoding = (min(pair) for pair in zip(rates, forward.codec_rates, strict=True))
                forward.codec_rates = encoding, decoding

    def _halves(self, values: torch.Tensor) -> bool:
        return self._half and values.dtype == torch.float32
