"""Callers' bytes, arrays and tensors as flat memory.

Rules:
1. Nothing is copied, converted or brought here from elsewhere. What would take that is refused, with what to
   do instead.
2. torch is never imported: whoever has a tensor has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .direct_io import Buffer, require_contiguous, require_plain


def buffer_of(source: object, *, writable: bool) -> Buffer:
    """The memory of what has the buffer protocol, a numpy array of any dtype, a torch tensor on the CPU, or
    what speaks `__array_interface__` or DLPack.

    Args:
        writable: whether it will be written to.

    Raises:
        TypeError: it is none of these.
        ValueError: it lies on a GPU, is not contiguous, holds addresses, means more than its memory says
            (a mask, a scale), or must not be written to where it would be.
    """
    return Buffer(_memory(source, writable), writable=writable)


def _memory(source: object, writable: bool) -> memoryview:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.Tensor):
        return _of_tensor(source, writable, torch)
    if hasattr(source, "__cuda_array_interface__"):
        raise _elsewhere("a GPU")
    if isinstance(source, np.ndarray):
        return _of_array(source)
    try:
        return memoryview(source)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        if hasattr(source, "__array_interface__"):
            return _of_array(np.asarray(source))
        if hasattr(source, "__dlpack__"):
            return _of_dlpack(source)
        raise TypeError(
            f"a block is bytes-like, a numpy array or a tensor on the CPU, not {type(source).__name__} "
            f"({error})"
        ) from None


def _of_tensor(tensor: Any, writable: bool, torch: Any) -> memoryview:
    if tensor.device.type != "cpu":
        raise _elsewhere(tensor.device)
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise ValueError("it is sparse or nested: give plain numbers (tensor.to_dense(), or each part)")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("its memory lacks its sign: give plain numbers (resolve_conj(), resolve_neg())")
    if tensor.is_quantized:
        raise ValueError("its memory lacks its scale: give plain numbers (tensor.int_repr())")
    if writable and tensor.requires_grad:
        raise ValueError("it requires grad, and autograd would not see it change: give tensor.detach()")
    try:
        require_contiguous(tensor.is_contiguous())
        _require_data(tensor)
        # As bytes, since numpy lacks some of torch's types.
        return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    except (RuntimeError, TypeError) as error:  # inside torch's vmap, for instance
        raise ValueError(f"torch gives no plain memory for this tensor: {error}") from None


def _require_data(tensor: Any) -> None:
    # torch's resize_ of a storage may free what tensors still refer to, and numpy would take the address.
    end_bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if end_bytes > tensor.untyped_storage().nbytes():
        raise ValueError("its storage was made smaller than the tensor is: give one whose memory is there")


def _of_array(array: np.ndarray[Any, Any]) -> memoryview:
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError("its memory lacks its mask: give plain numbers (array.filled(), array.data)")
    require_contiguous(array.flags.c_contiguous)
    require_plain(not array.dtype.hasobject)
    # As bytes, since the buffer protocol lacks some of numpy's types.
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _of_dlpack(source: Any) -> memoryview:
    try:
        return _of_array(np.from_dlpack(source))
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"DLPack gives no memory of the CPU for it: {error}") from None


def _elsewhere(place: object) -> ValueError:
    return ValueError(
        f"its memory is on {place}, and blocks move between devices and the CPU's memory: "
        "go by a tensor on the CPU (tensor.cpu(), tensor.copy_())"
    )
