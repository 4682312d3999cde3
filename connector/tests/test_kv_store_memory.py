"""Memory of all sorts becomes flat bytes without a copy, or is refused in words that say what to do."""

import array
import ctypes
import mmap
import warnings
from typing import Any

import numpy as np
import pytest

from hypercache_connector import KVStore
from hypercache_connector.memory import buffer_of


@pytest.fixture(scope="module", autouse=True)
def torch() -> Any:
    """torch, of which the import takes seconds."""
    import torch

    return torch


def a_tensor(**options: Any) -> Any:
    import torch

    return torch.arange(24, **options).reshape(2, 3, 4)


def _sparse_by_rows() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that such tensors are in beta
        return a_tensor()[0].to_sparse_csr()


def _nested() -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that such tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _freed(left_bytes: int) -> Any:
    tensor = a_tensor()
    tensor.untyped_storage().resize_(left_bytes)
    return tensor


def _quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that such tensors are on their way out
        import torch

        return torch.quantize_per_tensor(a_tensor(dtype=torch.float32), 0.1, 0, torch.quint8)


def numbers() -> Any:
    return np.arange(24, dtype=np.float32).reshape(2, 3, 4)


class Elsewhere:
    """As cupy's arrays and other libraries' tensors on a GPU show themselves."""

    __cuda_array_interface__ = None


class OnlyInterface:
    """What has nothing but numpy's interface."""

    def __init__(self, shown: Any) -> None:
        self.__array_interface__ = shown.__array_interface__
        self._shown = shown


class OnlyDLPack:
    """What has nothing but DLPack."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __dlpack__(self, **options: Any) -> Any:
        return self._shown.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._shown.__dlpack_device__()


class _Plain(ctypes.Structure):
    """Its names are what addresses are called in formats."""

    _fields_ = (("O", ctypes.c_int), ("P", ctypes.c_float))


class _Pointing(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("place", ctypes.POINTER(ctypes.c_int)))


WRITABLE = {
    "bytearray": lambda: bytearray(8),
    "memoryview": lambda: memoryview(bytearray(8))[2:6],
    "mmap": lambda: mmap.mmap(-1, 8),
    "array": lambda: array.array("d", [1, 2]),
    "ctypes": ctypes.c_uint32 * 4,
    "numpy": numbers,
    "numpy without dimensions": lambda: np.zeros((), np.float64),
    "numpy of dates": lambda: np.zeros(3, "M8[s]"),
    "numpy of records": lambda: np.zeros(3, [("Objects", "f4"), ("n", "i8")]),
    "array interface": lambda: OnlyInterface(numbers()),
    "torch": lambda: a_tensor(dtype=_torch("float32")),
    "torch bfloat16": lambda: a_tensor().to(_torch("bfloat16")),
    "torch float8": lambda: a_tensor().to(_torch("float8_e4m3fn")),
    "torch bool": lambda: a_tensor().to(_torch("bool")),
    "torch slice": lambda: a_tensor()[1],
    "torch without dimensions": lambda: a_tensor()[0, 0, 0],
    "ctypes with fields": _Plain * 2,
    "torch with gradient": lambda: a_tensor(dtype=_torch("float32"), requires_grad=True).detach(),
}


def _torch(name: str) -> Any:
    import torch

    return getattr(torch, name)


@pytest.mark.parametrize("name", list(WRITABLE))
def test_what_is_written_to_the_buffer_is_in_the_memory_itself(name: str) -> None:
    source = WRITABLE[name]()
    buffer = buffer_of(source, writable=True)
    buffer.view[:] = bytes(range(1, buffer.size_bytes + 1))
    again = buffer_of(source, writable=False)
    assert (again.address, again.size_bytes) == (buffer.address, buffer.size_bytes)
    assert bytes(again.view) == bytes(range(1, buffer.size_bytes + 1))


@pytest.mark.parametrize(
    ("source", "size_bytes"),
    [(b"abc", 3), (b"", 0), (np.zeros((3, 0)), 0), (OnlyDLPack(np.zeros(3, np.int16)), 6)],
    ids=["bytes", "empty bytes", "empty array", "dlpack"],
)
def test_what_is_only_read_may_be_read_only(source: object, size_bytes: int) -> None:
    assert buffer_of(source, writable=False).size_bytes == size_bytes


def test_what_requires_grad_may_be_read() -> None:
    tensor = a_tensor(dtype=_torch("float32"), requires_grad=True)
    assert buffer_of(tensor, writable=False).size_bytes == 96


def test_an_empty_tensor_is_no_bytes() -> None:
    assert buffer_of(a_tensor()[:0], writable=True).size_bytes == 0


REFUSED = {
    "strided view": (lambda: memoryview(bytearray(8))[::2], ValueError, "not contiguous: give a contiguous"),
    "numpy's transposed": (lambda: numbers().T, ValueError, "not contiguous"),
    "a tensor's column": (lambda: a_tensor()[:, 0], ValueError, "not contiguous"),
    "an expanded tensor": (lambda: a_tensor()[:1].expand(2, 3, 4), ValueError, "not contiguous"),
    "bytes": (lambda: b"abc", ValueError, "read-only: give a bytearray"),
    "read-only array": (lambda: np.broadcast_to(np.zeros(1), (1,)), ValueError, "read-only"),
    "numpy's scalar": (lambda: np.float32(1), ValueError, "read-only"),
    "numpy's date": (lambda: np.datetime64("2026-01-01"), ValueError, "read-only"),
    "on a GPU": (Elsewhere, ValueError, "its memory is on a GPU, and blocks move"),
    "a tensor elsewhere": (
        lambda: a_tensor(device="meta"),
        ValueError,
        r"is on meta.*tensor\.cpu",
    ),
    "a sparse tensor": (lambda: a_tensor().to_sparse(), ValueError, r"sparse or nested: give .*to_dense"),
    "a sparse tensor by rows": (_sparse_by_rows, ValueError, "sparse or nested"),
    "a nested tensor": (_nested, ValueError, "sparse or nested"),
    "a tensor whose memory was freed": (lambda: _freed(0), ValueError, "its storage was made smaller"),
    "a tensor of which some was freed": (lambda: _freed(24 * 8 - 1), ValueError, "storage was made smaller"),
    "a lazy tensor": (
        lambda: a_tensor().to(_torch("complex64")).conj(),
        ValueError,
        r"lacks its sign: give .*resolve_conj",
    ),
    "objects": (lambda: np.zeros(2, object), ValueError, "holds Python objects"),
    "objects behind a view": (lambda: memoryview(np.zeros(2, object)), ValueError, "holds Python objects"),
    "objects in records": (
        lambda: memoryview(np.zeros(2, [("a", "f4"), ("b", "O")])),
        ValueError,
        "holds Python objects",
    ),
    "ctypes' objects": (ctypes.py_object * 2, ValueError, "Python objects or pointers, which are addresses"),
    "addresses": (ctypes.c_void_p * 2, ValueError, "which are addresses"),
    "addresses of bytes": (ctypes.c_char_p * 2, ValueError, "which are addresses"),
    "addresses of text": (ctypes.c_wchar_p * 2, ValueError, "which are addresses"),
    "addresses of functions": (ctypes.CFUNCTYPE(None) * 2, ValueError, "which are addresses"),
    "addresses in fields": (_Pointing * 2, ValueError, "which are addresses"),
    "numpy's text of any length": (
        lambda: np.array(["text"], np.dtypes.StringDType()),
        ValueError,
        "which are addresses",
    ),
    "a masked array": (lambda: np.ma.masked_array([1, 2], [0, 1]), ValueError, "lacks its mask: give"),
    "a quantized tensor": (_quantized, ValueError, "lacks its scale: give"),
    "a tensor with gradient": (
        lambda: a_tensor(dtype=_torch("float32"), requires_grad=True),
        ValueError,
        r"requires grad.*give tensor\.detach",
    ),
    "numpy backwards": (lambda: numbers()[::-1], ValueError, "not contiguous"),
    "a lazily negated tensor": (
        lambda: a_tensor()[0, 0, :1].to(_torch("complex64")).conj().imag,
        ValueError,
        r"lacks its sign: give .*resolve_neg",
    ),
    "a list": (lambda: [1, 2], TypeError, "a block is bytes-like, a numpy array or a .* CPU, not list"),
    "text": (lambda: "abc", TypeError, "not str"),
    "nothing": (lambda: None, TypeError, "not NoneType"),
    "broken DLPack": (
        lambda: OnlyDLPack(np.array(["text"])),
        ValueError,
        "DLPack gives no memory",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_would_take_a_copy_is_refused_in_one_sentence(name: str) -> None:
    make, kind, sentence = REFUSED[name]
    with pytest.raises(kind, match=sentence) as caught:
        buffer_of(make(), writable=True)
    assert "\n" not in str(caught.value)


def test_where_torch_gives_no_memory_that_is_said(torch: Any) -> None:
    def refused(row: Any) -> Any:
        with pytest.raises(ValueError, match="torch gives no plain memory for this tensor"):
            buffer_of(row, writable=False)
        return row

    torch.vmap(refused)(torch.ones(3, 2))


def test_arrays_and_tensors_go_in_and_are_filled(scripted, torch: Any) -> None:
    with KVStore(scripted.socket_path) as store:
        array = np.arange(1000, dtype=np.int16).reshape(10, 100)
        tensor = torch.arange(1000).reshape(4, 250).to(torch.bfloat16)
        assert store.put_many(["array", "tensor"], [array, tensor]) == [True, True]
        targets = [np.zeros_like(array), torch.zeros_like(tensor)]
        filled = store.get_many(["array", "tensor"], targets)
        assert filled[0] is targets[0]
        assert filled[1] is targets[1]
        assert np.array_equal(filled[0], array)
        assert torch.equal(filled[1], tensor)
        assert store.get("array") == array.tobytes()
