"""Safetensors, the weight loader, distributed checkpoints and the pipelined loader."""

from __future__ import annotations

from typing import Any

import torch
from hypercache import (
    HyperCacheDCPStorageReader,
    HyperCacheDCPStorageWriter,
    HyperCacheFileSystem,
    HyperCachePipelinedLoader,
    HyperCachevLLMWeightLoader,
    load_safetensors_state_dict,
    pipeline_load,
    preload,
    save_safetensors_state_dict,
)

from ..payloads import MIB, payload, require_same

State = dict[str, Any]


def state(seed: int, rows: int = 1500) -> State:
    """Tensors of every sort that the package writes, several MiB in all, an empty one among them."""
    made = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(rows, 1024, generator=made),
        "layer.0.weight": torch.randn(513, 77, generator=made).to(torch.bfloat16),
        "layer.0.bias": torch.randn(3, generator=made).to(torch.float16),
        "ids": torch.arange(1001, dtype=torch.int64),
        "mask": torch.arange(7) % 2 == 0,
        "small": torch.arange(11, dtype=torch.int8),
        "empty": torch.empty(0, 4),
    }


def _require_equal(got: State, want: State) -> None:
    assert got.keys() == want.keys(), f"{sorted(got)} came back, {sorted(want)} were saved"
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), f"{name} came back changed"


def safetensors(socket_path: str, uri: str, tier: str | None) -> None:
    """Save, load whole, load a selection, and read the same file with the safetensors library itself."""
    import safetensors.torch

    want = state(1)
    saved = save_safetensors_state_dict(
        want, uri, metadata={"format": "pt"}, socket_path=socket_path, tier=tier
    )
    _require_equal(load_safetensors_state_dict(uri, socket_path=socket_path), want)
    names = ["layer.0.weight", "empty", "ids"]
    selected = load_safetensors_state_dict(uri, socket_path=socket_path, tensor_names=names)
    _require_equal(selected, {name: want[name] for name in names})
    raw = bytes(memoryview(HyperCacheFileSystem(socket_path=socket_path).cat_file(uri)))
    assert len(raw) == saved
    _require_equal(safetensors.torch.load(raw), want)


def weight_loader(socket_path: str, prefix: str) -> None:
    """Iterate over two shards, whole and filtered; the loader pins what it reads."""
    shards = {f"{prefix}/shard-{number}": state(number, rows=300) for number in (1, 2)}
    for uri, tensors in shards.items():
        save_safetensors_state_dict(tensors, uri, socket_path=socket_path)
    loader = HyperCachevLLMWeightLoader(socket_path=socket_path)
    for uri, tensors in shards.items():
        _require_equal(dict(loader.iter_shard_tensors([uri])), tensors)
    every = list(loader.iter_shard_tensors(list(shards), tensor_filter=["ids", "embed.weight"]))
    assert [name for name, _ in every] == ["embed.weight", "ids"] * 2


def checkpoint(socket_path: str, base_uri: str, tier: str | None) -> str:
    """Two ranks save their shards and load their own and each other's; gives the manifest's last shard."""
    for rank in range(2):
        writer = HyperCacheDCPStorageWriter(base_uri, rank, 2, tier=tier, socket_path=socket_path)
        uri = writer.save_rank_shard(state(rank), extra_metadata={"step": 7})
        assert uri == writer.shard_uri()
    reader = HyperCacheDCPStorageReader(base_uri, 1, 2, socket_path=socket_path)
    _require_equal(reader.load_rank_shard(), state(1))
    _require_equal(reader.load_rank_shard(rank=0), state(0))
    manifest = reader.read_metadata()
    assert manifest["extra_metadata"] == {"step": 7}
    return str(manifest["shards"][1])


def pipelined(socket_path: str, uri: str, size_bytes: int) -> None:
    """Load layer by layer, by size and by number, in order and out of it; nothing is missing or twice."""
    data = payload(uri, size_bytes)
    HyperCacheFileSystem(socket_path=socket_path).pipe_file(uri, data)
    assert preload(uri, socket_path=socket_path, pinned=True).is_hit
    with HyperCachePipelinedLoader(
        uri, socket_path, layer_size_bytes=3 * MIB + 100, prefetch_ahead=2
    ) as loader:
        first, head = loader.load_initial_layer()
        require_same(head, data[: first.length])
        require_same(b"".join(bytes(memoryview(part)) for _, part in loader.stream_layers()), data)
    with pipeline_load(uri, socket_path, num_layers=5) as loader:
        layer, part = loader.get_layer(3)
        require_same(part, data[layer.start_offset : layer.start_offset + layer.length])


def pipelined_missing(socket_path: str, uri: str) -> str:
    """What the loader says of an object that is not there."""
    try:
        HyperCachePipelinedLoader(uri, socket_path)
    except FileNotFoundError as error:
        return str(error)
    raise AssertionError("the loader found what nobody wrote")
