"""Base of all batches: records of tensors that are moved as a whole, and tensors over rows."""

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TensorRecord:
    """A dataclass with fields of tensors, alone or in lists, tuples and dicts, and other values."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # of subclasses

    def __repr__(self) -> str:
        """Shapes in place of tensors, as in PyG; empty fields are left out."""
        shown = self._mapped(lambda tensor: list(tensor.shape), lambda record: record)
        there = [f"{n}={v!r}" for n, v in shown.items() if v is not None and v != {}]
        return f"{type(self).__name__}({', '.join(there)})"

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The record with `function` applied to every tensor, in the fields' order."""
        return type(self)(**self._mapped(function, lambda record: record.map(function)))

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of `map`."""
        found: list[Tensor] = []
        self._mapped(found.append, lambda record: found.extend(record.tensors()))
        return found

    def numpy(self) -> dict[str, Any]:
        """The fields by name, tensors as NumPy arrays over the same memory, on the CPU.

        They support DLPack: `jax.dlpack.from_dlpack(batch.numpy()["x"])`.  bfloat16, which NumPy
        lacks, is copied to float32; pass such tensors by DLPack directly.
        """
        return self._mapped(_numpy, TensorRecord.numpy)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same record with its tensors on `device`.

        Tensors in pageable memory are copied to a GPU by way of page-locked memory.
        """
        device = torch.device(device)
        if device.type == "cuda":
            return self.map(lambda tensor: copy_to_gpu(tensor, device, non_blocking))
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same record in page-locked memory: `DataLoader(pin_memory=True)` calls this."""
        return self.map(Tensor.pin_memory)

    def _mapped(
        self, tensor: Callable[[Tensor], Any], record: Callable[[Any], Any]
    ) -> dict[str, Any]:
        return {f.name: _mapped(getattr(self, f.name), tensor, record) for f in fields(self)}


def to_tensor(array: NDArray[Any], dtype: str, is_label: bool = False) -> Tensor:
    """A tensor over an array of a store dtype; integer labels are converted to int64."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if is_label and array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64, copy=False))
    return torch.from_numpy(array)


def copy_to_gpu(tensor: Tensor, device: torch.device, non_blocking: bool = True) -> Tensor:
    """Copy a tensor to a GPU; memory that is not page-locked is first copied to memory that is.

    That memory belongs to torch, which keeps it until the copy is done.
    """
    if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_pinned():
        tensor, non_blocking = tensor.pin_memory(), True
    return tensor.to(device, non_blocking=non_blocking)


def _mapped(value: Any, tensor: Callable[[Tensor], Any], record: Callable[[Any], Any]) -> Any:
    """A field's value with the two functions applied to its tensors and records."""
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, TensorRecord):
        return record(value)
    if isinstance(value, dict):
        return {key: _mapped(item, tensor, record) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, tensor, record) for item in value)
    return value


def _numpy(tensor: Tensor) -> Any:
    host = tensor.detach().cpu()
    return (host.float() if host.dtype == torch.bfloat16 else host).numpy()
