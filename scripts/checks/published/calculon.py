"""Predict the iterations of ``tensor.csv`` by calculon (Isaev et al. 2023) and print how far off that is, by source.

    python scripts/checks/published/calculon.py CHECKOUT

``CHECKOUT`` is a clone of github.com/calculon-ai/calculon, whose own A100 (``systems/a100_80g.json``) is taken.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def predictor(checkout: Path) -> Callable[[dict[str, str]], float]:
    """Return what predicts a row's ms."""
    sys.path[0] = str(checkout)  # in place of this folder, where this file has the same name
    for name in ("pandas", "psutil"):  # its commands need them, not its model
        sys.modules.setdefault(name, ModuleType(name))
    from calculon.llm import Llm  # type: ignore[import-not-found]  # the user's
    from calculon.system import System  # type: ignore[import-not-found]

    system = System(json.loads((checkout / "systems" / "a100_80g.json").read_text()))
    logging.getLogger().setLevel(logging.ERROR)

    def predicted(row: dict[str, str]) -> float:
        selective = row["source"].endswith("-selective")  # with sequence parallelism
        count: dict[str, int] = {name: int(value) for name, value in row.items() if name not in ("source", "ms")}
        application = Llm.Application(
            {
                "hidden": count["hidden"],
                "feedforward": 4 * count["hidden"],
                "seq_size": count["sequence"],
                "attn_heads": count["heads"],
                "attn_size": count["hidden"] // count["heads"],
                "num_blocks": count["blocks"],
            }
        )
        asked: dict[str, Any] = {
            "num_procs": count["tensor"] * count["stages"] * count["pipelines"],
            "tensor_par": count["tensor"],
            "pipeline_par": count["stages"],
            "data_par": count["pipelines"],
            "tensor_par_net": 0,
            "pipeline_par_net": 1,
            "data_par_net": 1,
            "batch_size": count["batch"],
            "microbatch_size": count["microbatch"],
            "datatype": "float16",
            "fused_activation": False,
            "attention_type": "multihead",
            "activation_recompute": "attn_only" if selective else "full",
            "pipeline_interleaving": count["chunks"],
            "optimizer_sharding": False,
            "tensor_par_comm_type": "rs_ag" if selective else "ar",
            "tensor_par_overlap": "none",
            "seq_par_ag_redo": False,
            "data_par_overlap": False,
            "weight_offload": False,
            "activations_offload": False,
            "optimizer_offload": False,
            "training": True,
        }
        model = Llm(application, logging.getLogger())
        model.compile(system, Llm.Execution.from_json(asked))
        model.run(system)
        return 1000.0 * float(model.get_stats_json(False)["total_time"])

    return predicted


def main() -> None:
    predicted, errors, failed = predictor(Path(sys.argv[1])), defaultdict[str, list[float]](list), list[str]()
    with open(Path(__file__).with_name("tensor.csv"), encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["zero"] != "0":  # which it hasn't
                continue
            try:
                off = predicted(row) / float(row["ms"]) - 1
            except Exception as error:  # calculon's own, where it refuses a row
                failed.append(f"{row['source']}: {error}")
            else:
                errors[row["source"]].append(off)
    for name, found in errors.items():
        size = [abs(x) for x in found]
        mean, bias = sum(size) / len(size), sum(found) / len(found)
        print(f"{name}: {len(found)} rows, {mean:.1%} off, bias {bias:+.1%}, worst {max(size):.1%}")
    for name in dict.fromkeys(x.partition(":")[0] for x in failed):
        own = [x for x in failed if x.startswith(name)]
        print(f"{name}: {len(own)} rows refused, such as: {own[0]}")


if __name__ == "__main__":
    main()
