"""Builds the GPU in software, once for a torch and a source, and says what processes need to have it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pipeplan-softgpu")


class NotBuilt(Exception):
    """There is no GPU in software here, and why."""


def built() -> Path:
    """The folder of the built extension; NotBuilt where there is no compiler, or not this torch."""
    import torch

    sources = [path for path in sorted(HERE.iterdir()) if path.suffix in (".h", ".cpp")]
    compiler = shutil.which("g++")
    if compiler is None:
        raise NotBuilt("no g++ here, which the GPU in software is compiled by")
    if torch.version.cuda is not None:
        raise NotBuilt("this torch has a device type CUDA of its own")
    key = sha256(b"".join(path.read_bytes() for path in sources) + Path(__file__).read_bytes())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    folder = CACHE / f"{torch.__version__}-{sysconfig.get_python_version()}-{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for it
        if not (folder / f"_softgpu{suffix}").exists():
            _compile(compiler, Path(torch.__file__).parent, folder / "made.so")
            info = folder / "softgpu-0.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: softgpu\nVersion: 0\n")
            (info / "entry_points.txt").write_text("[torch.backends]\nsoftgpu = softgpu.torch_cuda:install\n")
            (folder / "made.so").rename(folder / f"_softgpu{suffix}")
    return folder


def _compile(compiler: str, torch: Path, to: Path) -> None:
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", "-ltorch_python", "-ltorch", f"-Wl,-rpath,{torch}/lib"]
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_softgpu"]
    command = [compiler, *flags, *(f"-I{x}" for x in includes), str(HERE / "softgpu.cpp"), *libraries, "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotBuilt(f"the GPU in software doesn't compile here: {done.stderr[:3000]}")


def environment(gpus: int, folder: Path | None = None, **knobs: int) -> dict[str, str]:
    """The environment of a process that has ``gpus`` GPUs in software, as have those that it starts.

    ``folder`` is where they leave what they did; ``knobs`` are BYTES and DELAY_US (softgpu.torch_cuda).
    """
    assert find_spec("torch"), "it is torch's device"
    path = [str(built()), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    own = {"SOFTGPU": str(gpus), "PYTHONPATH": os.pathsep.join(filter(None, path))}
    own |= {f"SOFTGPU_{name.upper()}": str(value) for name, value in knobs.items()}
    return {**os.environ, **own, **({} if folder is None else {"SOFTGPU_FOLDER": str(folder)})}


if __name__ == "__main__":  # python tests/softgpu/build.py GPUS COMMAND ...
    os.execvpe(sys.argv[2], sys.argv[2:], environment(int(sys.argv[1])))
