"""Make the files in profiles/: estimates for named GPUs, and with --measure two that are measured on this CPU.

    python scripts/make_profiles.py --date 2026-11-20 [--measure]
    python scripts/make_profiles.py --sizes

The networks of MadPipe's evaluation at 1000 x 1000 pixels, batch 8, and VGG-16 stand for the V100 of that time; GPT-2
in bfloat16 for an A100. Estimates say so in ``device`` and ``source``. Measured files are in CPU time of one thread,
which other load on the machine disturbs little. ``--sizes`` counts the bytes of all layers again and leaves times and
everything else in the files as they are.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeplan import zoo
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.files.profiles import profile_text, read_profile
from pipeplan.files.text import write_text
from pipeplan.problem import Chain
from pipeplan.runtime.device import ThreadClock
from pipeplan.runtime.profiler.estimate import estimate_model
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions

FOLDER = Path(__file__).parents[1] / "profiles"
ESTIMATED = [  # file, model, batch, accelerator, type
    ("resnet50-1000-b8-v100", "resnet50,image=1000", 8, "v100", "float32"),
    ("resnet101-1000-b8-v100", "resnet101,image=1000", 8, "v100", "float32"),
    ("inception-v3-1000-b8-v100", "inception-v3,image=1000", 8, "v100", "float32"),
    ("densenet121-1000-b8-v100", "densenet121,image=1000", 8, "v100", "float32"),
    ("vgg16-224-b32-v100", "vgg16", 32, "v100", "float32"),
    ("gpt2-small-b4-a100", "gpt2-small", 4, "a100", "bfloat16"),
    ("gpt2-medium-b4-a100", "gpt2-medium", 4, "a100", "bfloat16"),
    ("gpt2-large-b4-a100", "gpt2-large", 4, "a100", "bfloat16"),
    ("gpt2-xl-b4-a100", "gpt2-xl", 4, "a100", "bfloat16"),
]
MEASURED = [  # file, model, batch, steps
    ("gpt-tiny-b8-cpu", "gpt-tiny", 8, 30),
    ("gpt2-small-b1-cpu", "gpt2-small,sequence=256", 1, 7),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--date", help="goes into source")
    parser.add_argument("--measure", action="store_true", help="measure too, not only estimate")
    parser.add_argument("--sizes", action="store_true", help="count bytes again in the files that are there")
    arguments = parser.parse_args()
    if arguments.sizes:
        for file, name, batch, gpu, dtype in ESTIMATED:
            model = zoo.load(name)
            about = _about(name, batch, arguments)
            resize(
                file,
                estimate_model(
                    model, batch, accelerator(gpu), MeasureOptions(dtype=getattr(torch, dtype)), **about
                ).chain,
            )
        for file, name, batch, _ in MEASURED:
            about = _about(name, batch, arguments)
            resize(file, measure_model(zoo.load(name), batch, MeasureOptions(steps=1, warmup=0), **about).chain)
        return
    if arguments.date is None:
        parser.error("--date is needed: it goes into source")
    for file, name, batch, gpu, dtype in ESTIMATED:
        model = zoo.load(name)
        about = _about(name, batch, arguments)
        write(
            file,
            estimate_model(model, batch, accelerator(gpu), MeasureOptions(dtype=getattr(torch, dtype)), **about).chain,
        )
    if arguments.measure:
        for file, name, batch, steps in MEASURED:
            about = _about(name, batch, arguments)
            chain = measure_model(
                zoo.load(name), batch, MeasureOptions(steps=steps, clock=ThreadClock()), **about
            ).chain
            write(file, replace(chain, device=f"{chain.device}, CPU time"))


def _about(name: str, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return {"name": name, "date": arguments.date or "", "data": zoo.load(name).data(batch)}


def resize(file: str, counted: Chain) -> None:
    """Write the profile ``file`` again with the bytes of ``counted``."""
    chain = read_profile(str(FOLDER / f"{file}.json"))
    sizes = ("weight_bytes", "output_bytes", "saved_bytes", "saves", "view_of", "storage_bytes", "parameters")
    layers = [
        replace(layer, **{field: getattr(new, field) for field in sizes})
        for layer, new in zip(chain.layers, counted.layers, strict=True)
    ]
    write(file, replace(chain, layers=tuple(layers), input_bytes=counted.input_bytes, shared=counted.shared))


def write(file: str, chain: Chain) -> None:
    path = FOLDER / f"{file}.json"
    write_text(str(path), profile_text(chain))
    time_ms = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1]) / 1e6
    print(f"{path.name:32} {len(chain):3} layers {time_ms:9.1f} ms {path.stat().st_size // 1024:4} KiB  {chain.device}")


if __name__ == "__main__":
    main()
