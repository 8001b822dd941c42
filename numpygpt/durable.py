"""Files and folders that are there whole or not at all, whatever happens to the program or the machine.

It rests on two promises of the file system: a rename is one move, of which neither a reader nor a crash sees half;
and what was written is on the disk once fsync returns, not before. So everything is written under a temporary name,
fsynced and renamed, and then the folder that holds the name is fsynced too.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".tmp-"  # names that begin so are leftovers of a crash and may be deleted


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to write files into; when the block ends well, it becomes `path` in one move.

    Raises FileExistsError if `path` is there and not an empty folder: a folder can't be replaced in one move.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} exists already, and nothing is ever written over a checkpoint")
    make_folder(path.parent)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f"{TEMPORARY}{path.name}-"))
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        temporary.chmod(0o755)  # mkdtemp makes folders that only their owner reads
        sync(temporary)
        if path.exists():
            path.rmdir()
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file to write (and read back) that becomes `path` in one move, when the block ends well.

    The folder is made if need be. If the block raises, whatever was at `path` stays, and nothing else is left.
    """
    path = Path(path)
    make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{TEMPORARY}{path.name}-")
    try:
        with open(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync(path.parent)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this program alone; one that is missing is made, and goes again if it is empty at the end.

    The lock is on the folder itself, so no file is left, and it ends with the program, however that ends. Raises
    BlockingIOError if another program holds it. Windows has no such lock: there, nothing is held.
    """
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    make_folder(folder)
    try:
        with contextlib.ExitStack() as stack:
            if fcntl is not None:
                handle = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise BlockingIOError(f"another program is at work in {folder}: wait for it, or stop it") from error
                except OSError:
                    pass  # a file system without locks
            yield
    finally:
        with contextlib.suppress(OSError):  # not empty: from here on all is to stay
            for path in made:
                path.rmdir()


def write_file(path: Path, content: str) -> None:
    """Write the text file `path`; one that is there is replaced in one move."""
    with replacing(path) as file:
        file.write(content.encode())


def remove_folder(path: Path) -> None:
    """Delete `path` so that no crash leaves half of it under its name."""
    leftover = path.with_name(f"{TEMPORARY}{path.name}-deleted")
    shutil.rmtree(leftover, ignore_errors=True)
    path.rename(leftover)
    sync(path.parent)
    shutil.rmtree(leftover)


def remove_leftovers(folder: Path) -> None:
    """Delete what a crash left in `folder` under temporary names."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_folder(path: Path) -> None:
    """Make the folder `path`, and those above it, so that they outlive a crash."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Return once a file's content, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
