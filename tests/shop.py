"""Uploading to a store in memory that behaves as those of clouds do."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from fsspec.core import url_to_fs
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from support import at_any_moment, contents, packer

TEXTS = [f"text {i} " + "ab" * (i % 50) for i in range(400)]
OTHERS = [text.replace("text", "TEXT") for text in TEXTS]  # of the same sizes
OPTIONS = ("-l", 64, "-t", "bytes", "--unit-bytes", 6000, "--workers", 1)
OUT = "shop://bucket/deep/out"
MARKER = ".packer/publishing.json"


class Shop(AbstractFileSystem):
    """A store that has no folders, and objects only once they are whole.

    Threads write to it: `(*objects,)` is of one moment.
    """

    protocol = "shop"
    objects: ClassVar[dict[str, bytes]] = {}
    log: ClassVar[list[tuple[str, str]]] = []  # what is written and removed
    read: ClassVar[list[str]] = []
    has_versions: ClassVar[bool]
    disturb: ClassVar[Callable[[str, str], None]]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("shop://").strip("/")

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in Shop.objects:
            content = Shop.objects[path]
            version = {"ETag": sha256(content).hexdigest()} if Shop.has_versions else {}
            return {"name": path, "size": len(content), "type": "file", **version}
        if any(name.startswith(f"{path}/") for name in (*Shop.objects,)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if self.info(path)["type"] == "file":
            return [self.info(path)]
        rest = (name[len(path) + 1 :] for name in (*Shop.objects,) if name.startswith(f"{path}/"))
        entries = [self.info(f"{path}/{n}") for n in sorted({n.partition("/")[0] for n in rest})]
        return entries if detail else [one["name"] for one in entries]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            self.info(path)
            Shop.read.append(path.removeprefix("bucket/deep/out/"))
            return io.BytesIO(Shop.objects[path])
        return _Upload(self, path, mode, **options)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        self.note("remove", path)
        self.info(path)
        del Shop.objects[path]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("it would make a bucket")

    @classmethod
    def note(cls, what: str, path: str) -> None:
        name = path.removeprefix("bucket/deep/out/")
        cls.disturb(what, name)
        cls.log.append((what, name))


class _Upload(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.whole = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.whole += self.buffer.getvalue()
        if final:
            Shop.note("write", self.path)
            Shop.objects[self.path] = self.whole
        return True

    def discard(self) -> None:
        Shop.note("discard", self.path)


def pack(*more: object, source: str = "a.jsonl", out: str = OUT) -> Any:
    return packer("pack", source, *OPTIONS, "-q", "-o", out, *more)


def succeeds(*more: object, **how: str) -> None:
    result = pack(*more, **how)
    assert result.exit_code == 0, result.stderr
    assert os.listdir("tmp") == []


def local(source: str = "a.jsonl") -> dict[str, bytes]:
    """What the same command writes to a local directory."""
    out = f"local-{source}"
    if not Path(out).exists():
        assert pack(source=source, out=out).exit_code == 0
    return contents(out)


def there(url: str = OUT) -> dict[str, bytes]:
    """All objects below a URL."""
    store, root = url_to_fs(url)
    files = {name.removeprefix(root).lstrip("/"): store.cat_file(name) for name in store.find(root)}
    return at_any_moment(files)


def fail_at(number: int, error: BaseException) -> None:
    """Raise at the so-manieth write of a shard, whichever of the threads does it."""
    writes = itertools.count(1)

    def disturb(what: str, name: str) -> None:
        if what == "write" and name.endswith(".arrow") and next(writes) == number:
            raise error

    Shop.disturb = disturb
