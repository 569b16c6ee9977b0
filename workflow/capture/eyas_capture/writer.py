"""One file a request: allocated at once, filled chunk by chunk, renamed when the prompt is whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
from dataclasses import dataclass, field

import torch

from eyas_capture import FORMAT, VERSION

_OURS = re.compile(r"eyas-[0-9a-f-]{1,200}")
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_ITEM = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_POLL = 0.05


def is_ours(rid: object) -> bool:
    """Whether a request came from Eyas: other requests are served untouched."""
    return isinstance(rid, str) and _OURS.fullmatch(rid) is not None


class Broken(Exception):
    """Why a request has no dump."""


@dataclass
class Layout:
    """Header and places of a dump's tensors: name -> (begin, bytes a row)."""

    header: bytes
    places: dict[str, tuple[int, int]]
    size: int

    @classmethod
    def of(cls, tokens: int, aux_width: int, last_width: int, dtype: str, metadata: dict[str, str]) -> Layout:
        tensors = {
            "aux_hidden_states": (dtype, (tokens, aux_width)),
            "last_hidden_state": (dtype, (tokens, last_width)),
            "input_ids": ("I32", (tokens,)),
        }
        # Widest dtype first, so that every tensor is aligned.
        order = sorted(tensors, key=lambda name: -_ITEM[tensors[name][0]])
        entries: dict[str, object] = {"__metadata__": metadata}
        begins, widths, position = {}, {}, 0
        for name in order:
            kind, shape = tensors[name]
            widths[name] = _ITEM[kind] * (shape[1] if len(shape) > 1 else 1)
            size = widths[name] * tokens
            entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + size]}
            begins[name] = position
            position += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {n: (len(header) + begins[n], widths[n]) for n in order}, len(header) + position)


@dataclass
class Dump:
    """The dump of one request while its prompt is prefilled."""

    folder: str
    rid: str
    ids: list[int]
    layers: list[int]
    wait_seconds: float
    written: int = 0
    touched: float = field(default_factory=time.monotonic)
    error: str | None = None
    gone: bool = False  # set by another thread when nobody wants the dump any more
    _fd: int = -1
    _layout: Layout | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def _part(self) -> str:
        return os.path.join(self.folder, f".{self.rid}.part")

    @property
    def path(self) -> str:
        return os.path.join(self.folder, f"{self.rid}.safetensors")

    def add(self, start: int, aux: torch.Tensor, last: torch.Tensor) -> None:
        """Write the states of a chunk whose first token is the prompt's `start`; remembers what goes wrong."""
        with self._lock:
            self.touched = time.monotonic()
            if self.error is not None and start != 0:
                return
            try:
                self._add(start, aux, last)
            except Broken as exc:
                self._fail(str(exc))
            except OSError as exc:
                self._fail(f"{exc.strerror} ({exc.errno})")
            except Exception as exc:
                self._fail(f"{type(exc).__name__}: {exc}")

    def _add(self, start: int, aux: torch.Tensor, last: torch.Tensor) -> None:
        if start == 0:  # the first chunk, or the request was retracted and starts over
            self.written, self.error = 0, None
        if start != self.written:
            if self.written == 0:
                raise Broken(
                    f"its first {start} tokens came from the prefix cache; start the server with --disable-radix-cache"
                )
            raise Broken(f"a chunk begins at token {start}, and {self.written} are there")
        count = len(aux)
        if len(last) != count or start + count > len(self.ids):
            raise Broken(f"{count} aux and {len(last)} last states from token {start} of {len(self.ids)}")
        if aux.dtype != last.dtype or aux.dtype not in _NAMES:
            raise Broken(f"states in {aux.dtype} and {last.dtype}")
        if aux.shape[1] != len(self.layers) * last.shape[1]:
            raise Broken(f"aux states of width {aux.shape[1]} for {len(self.layers)} layers of {last.shape[1]}")
        if self._layout is None:
            self._open(aux, last)
        assert self._layout
        for name, states in (("aux_hidden_states", aux), ("last_hidden_state", last)):
            begin, width = self._layout.places[name]
            flat = states.detach().to("cpu").contiguous().view(torch.uint8)
            self._write(flat.numpy().data.cast("B"), begin + start * width)
        self.written = start + count

    def _open(self, aux: torch.Tensor, last: torch.Tensor) -> None:
        metadata = {
            "format": FORMAT, "version": VERSION, "rid": self.rid, "layers": json.dumps(self.layers),
            "dtype": str(aux.dtype).removeprefix("torch."), "prefix": "0", "tokens": str(len(self.ids)),
        }  # fmt: skip
        layout = Layout.of(len(self.ids), aux.shape[1], last.shape[1], _NAMES[aux.dtype], metadata)
        fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._fd = fd
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                os.posix_fallocate(fd, 0, layout.size)
                break
            except OSError as exc:
                os.ftruncate(fd, 0)  # what was allocated must not keep others waiting
                if exc.errno not in _FULL:
                    raise
                if self.gone or time.monotonic() > deadline:
                    raise Broken(f"no room for {layout.size:,} bytes within {self.wait_seconds:g} s") from None
                time.sleep(_POLL)
        self._layout = layout
        self._write(memoryview(layout.header), 0)
        ids = torch.tensor(self.ids, dtype=torch.int32).view(torch.uint8).numpy()
        self._write(ids.data.cast("B"), layout.places["input_ids"][0])

    def _write(self, data: memoryview, position: int) -> None:
        while data:  # a single write may be short
            count = os.pwrite(self._fd, data, position)
            data, position = data[count:], position + count

    def finish(self) -> str:
        """Put the dump at its final name when the prompt is whole; raises Broken with the reason when it is not."""
        with self._lock:
            if self.error is None and self.written != len(self.ids):
                self._fail(f"{self.written} of {len(self.ids)} tokens were captured")
            if self.error is not None:
                raise Broken(self.error)
            self._close()
            os.rename(self._part, self.path)
            return self.path

    def _fail(self, reason: str) -> None:
        self.error = reason
        self._drop()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drop(self) -> None:
        self._close()
        self._layout = None
        self.written = 0
        with contextlib.suppress(OSError):
            os.unlink(self._part)

    def discard(self) -> None:
        """The request is gone."""
        with self._lock:
            self._fail("discarded")
