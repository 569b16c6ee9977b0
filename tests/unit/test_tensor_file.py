"""Tensor files: allocated first, filled in any order, read by safetensors; damaged headers."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from eyas.errors import EyasError
from eyas.shards import (
    Layout,
    TensorFileWriter,
    ensure_free,
    map_arrays,
    read_header,
    write_arrays,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

LIGHT = settings(max_examples=60, deadline=None, derandomize=True)
TORCH = {
    "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


# ---- tensor files

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"), st.tuples(st.sampled_from(sorted(TORCH)), SHAPES), max_size=5
)


@LIGHT
@given(tensors=TENSORS, metadata=st.dictionaries(NAMES, NAMES, max_size=2), seed=st.integers(0, 99))
def test_rows_in_any_order_are_what_safetensors_reads(tensors: dict, metadata: dict, seed: int):
    rng = random.Random(seed)
    layout = Layout.of(tensors, metadata)
    contents, pieces = {}, []
    for name, (dtype, shape) in tensors.items():
        spec = layout.tensors[name]
        raw = rng.randbytes(spec.nbytes)
        contents[name] = bytes(b & 1 for b in raw) if dtype == "BOOL" else raw
        rows, size = (shape[0] if shape else 1), spec.row_bytes
        pieces += [(name, row, contents[name][row * size : (row + 1) * size]) for row in range(rows)]
    rng.shuffle(pieces)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with TensorFileWriter(path, layout) as writer:
            for name, row, data in pieces:
                writer.write_rows(name, row, data)
            writer.sync()
        assert path.stat().st_size == layout.nbytes
        loaded = load_file(path)
        assert set(loaded) == set(tensors)
        for name, (dtype, shape) in tensors.items():
            assert (loaded[name].dtype, tuple(loaded[name].shape)) == (TORCH[dtype], shape)
            assert bytes(loaded[name].flatten().view(torch.uint8).tolist()) == contents[name]
        with safe_open(path, "pt") as file:
            assert (file.metadata() or {}) == metadata
        specs, found = read_header(path)
        assert specs == layout.tensors and found == metadata


def small_file(path: Path) -> Layout:
    layout = Layout.of({"a": ("I32", (3, 2)), "b": ("U8", (5,)), "e": ("BF16", (0, 4))}, {"format": "test"})
    with TensorFileWriter(path, layout) as writer:
        writer.write_rows("a", 0, np.arange(6, dtype="<i4").data)
        writer.write_rows("b", 0, b"bytes")
    return layout


@pytest.mark.parametrize(("row", "size"), [(-1, 8), (2, 16), (3, 8), (0, 25)])
def test_writing_outside_a_tensor_is_refused(tmp_path: Path, row: int, size: int):
    layout = small_file(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    with TensorFileWriter(tmp_path / "file", layout) as writer, pytest.raises(ValueError, match="a: rows from"):
        writer.write_rows("a", row, bytes(size))
    assert (tmp_path / "file").read_bytes() == before


def test_reopening_keeps_what_a_killed_job_wrote(tmp_path: Path):
    path = tmp_path / "file"
    layout = small_file(path)
    with TensorFileWriter(path, layout) as writer:
        writer.write_rows("b", 1, b"Y")
    assert map_arrays(path, ("b",))["b"].tobytes() == b"bYtes"
    path.write_bytes(path.read_bytes()[:-1])  # another size: another file, started afresh
    with TensorFileWriter(path, layout):
        pass
    assert map_arrays(path, ("b",))["b"].tobytes() == bytes(5)


def test_killed_between_allocation_and_header(tmp_path: Path):
    """The file has its full size then, and no header: the next job must write it."""
    path = tmp_path / "file"
    layout = small_file(path)
    path.write_bytes(bytes(layout.nbytes))
    with TensorFileWriter(path, layout):
        pass
    assert read_header(path)[0] == layout.tensors


def test_full_disk_is_told_before_any_work(tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EyasError, match=r"file: no room for [\d,]+ bytes \(No space left on device\)"):
        small_file(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_free_space_is_compared_exactly(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    ensure_free(tmp_path, 1000, "Shard x")
    with pytest.raises(EyasError, match=r"Shard x needs 1,500 bytes in .*, where 1,000 are free; free 500 bytes"):
        ensure_free(tmp_path, 1500, "Shard x")


def test_every_truncation_is_noticed(tmp_path: Path):
    path = tmp_path / "file"
    small_file(path)
    whole = path.read_bytes()
    for changed in [whole[:n] for n in range(len(whole))] + [whole + b"\0"]:
        path.write_bytes(changed)
        with pytest.raises(EyasError, match="file: truncated or damaged"):
            read_header(path)
    with pytest.raises(EyasError, match="none: this file is missing"):
        read_header(tmp_path / "none")


@LIGHT
@example(changes=[(128, ord("e"))])  # "[0,4]" becomes "[0e4]", a shape of one float
@example(changes=[(43, ord("b"))])  # two tensors of one name
@given(changes=st.lists(st.tuples(st.integers(0, 215), st.integers(0, 255)), min_size=1, max_size=3))
def test_damage_is_an_eyas_error_or_harmless(changes: list[tuple[int, int]]):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        assert len(small_file(path).header) == 216
        content = bytearray(path.read_bytes())
        for position, value in changes:
            content[position] = value
        path.write_bytes(content)
        try:
            specs, _ = read_header(path)
            arrays = map_arrays(path, tuple(specs))
        except EyasError:
            return
        assert {name: a.nbytes for name, a in arrays.items()} == {name: s.nbytes for name, s in specs.items()}
        assert set(load_file(path)) == set(specs)  # what we accept, safetensors accepts


@LIGHT
@given(content=st.binary(max_size=60))
def test_garbage_is_an_eyas_error(content: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for text in (content, len(content).to_bytes(8, "little") + content):
            path.write_bytes(text)
            try:
                assert read_header(path)[0] == {}  # "{}" is a file without tensors
            except EyasError as exc:
                assert "truncated or damaged" in str(exc)


def header(tensor: str = "", **changes: str) -> str:
    """The header of a file with one tensor of four bytes, and what is given besides."""
    entry = {"dtype": '"U8"', "shape": "[4]", "data_offsets": "[0,4]"} | changes
    return '{"a":{' + ",".join(f'"{key}":{value}' for key, value in entry.items()) + "}" + tensor + "}"


IMPOSSIBLE = {
    "list": "[]",
    "number": "3",
    "no entry": '{"a":1}',
    "unknown dtype": header(dtype='"F8"'),
    "list as dtype": header(dtype='["U8"]'),
    "text as size": header(shape='["4"]'),
    "float as size": header(shape="[4.0]"),  # numpy cannot map it
    "negative sizes": header(shape="[-2,-2]"),
    "float as offset": header(data_offsets="[0.0,4.0]"),
    "overflow": header(data_offsets=f"[1.5,{'9' * 400}]"),  # a float minus an int that no float can hold
    "two in one place": header(',"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'),
    "number as metadata": header(',"__metadata__":3'),
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_headers_are_an_eyas_error(tmp_path: Path, text: str):
    def write(header_text: str) -> None:
        (tmp_path / "file").write_bytes(len(header_text).to_bytes(8, "little") + header_text.encode() + bytes(4))

    write(header())
    assert read_header(tmp_path / "file")[0]["a"].shape == (4,)  # it is the change that is refused
    write(text)
    with pytest.raises(EyasError, match="truncated or damaged"):
        read_header(tmp_path / "file")


# ---- arrays


def test_arrays_round_trip(tmp_path: Path):
    arrays = {
        "ids": np.arange(7, dtype=np.int32), "offsets": np.array([0, 7], np.int64), "mask": np.ones(7, np.uint8),
        "t2d": np.array([True, False]), "f": np.eye(3, dtype=np.float32)[:, ::2],  # not contiguous
        "h": np.array(1.5, np.float16), "none": np.zeros((0, 4), np.int32),
    }  # fmt: skip
    path = tmp_path / "file"
    path.write_bytes(b"leftover" * 999)
    write_arrays(path, arrays, {"format": "test"})
    mapped = map_arrays(path, tuple(arrays))
    for name, array in arrays.items():
        assert mapped[name].dtype == array.dtype and mapped[name].shape == array.shape
        assert np.array_equal(mapped[name], array) and np.array_equal(load_file(path)[name].numpy(), array)
    with pytest.raises(ValueError):
        mapped["ids"][0] = 1  # read-only: a reader cannot damage the file
    with pytest.raises(EyasError, match="has no tensor x, y"):
        map_arrays(path, ("ids", "x", "y"))


def test_bfloat16_is_mapped_as_its_bits(tmp_path: Path):
    values = torch.tensor([[1.0, -2.5], [0.0, 3e38]], dtype=torch.bfloat16)
    layout = Layout.of({"x": ("BF16", (2, 2))}, {})
    with TensorFileWriter(tmp_path / "file", layout) as writer:
        writer.write_rows("x", 0, values.view(torch.int16).numpy().data)
    mapped = map_arrays(tmp_path / "file", ("x",))["x"]
    assert mapped.dtype == np.uint16
    assert torch.equal(torch.from_numpy(mapped.astype(np.int32)).to(torch.int16).view(torch.bfloat16), values)
