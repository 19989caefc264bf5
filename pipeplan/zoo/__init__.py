"""Example models and their data, written for this project, that run anywhere torch does.

This file needs no torch: ``MODELS`` lists what there is, :func:`load` imports one. A loaded
:class:`~pipeplan.zoo.model.Model` follows the model contract (``model(batch) -> (layers, example_input, loss)``), and
``model.data(batch)`` gives the ``data(index, seed) -> (input, target)`` that fits it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from .text.sizes import TRANSFORMERS, Llama

if TYPE_CHECKING:
    from .model import Model

HUGGING_FACE = "hf:"  # begins the name of a transformers model
ZOO = "zoo:"  # begins the name of a zoo model where a module:function could stand
CORES = {"attention=unfused": "attention=again", "attn_implementation=eager": "attn_implementation=again"}
"""Options of a zoo's GPT, and of a transformers model, that keeps attention's scores, and whose core runs again."""
MODELS = {  # name -> the file that builds it
    **{name: "text.llama" if isinstance(sizes, Llama) else "text.gpt" for name, sizes in TRANSFORMERS.items()},
    **dict.fromkeys(("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"), "text.mixture"),
    **dict.fromkeys(("clip-tiny", "clip-large", "llava-tiny", "llava-7b", "llava-70b"), "towers"),
    "small-cnn": "images.convolutional",
    "alexnet": "images.convolutional",
    "vgg16": "images.convolutional",
    "resnet50": "images.convolutional",
    "resnet101": "images.convolutional",
    "densenet121": "images.convolutional",
    "inception-v3": "images.inception",
    "inception-v3-auxiliary": "images.inception",
    "awd-lm": "text.lstm",
    "gnmt": "text.lstm",
}


def running_again(model: str) -> str | None:
    """Return what the ``model`` is called whose backwards run the cores of attention again; None where it has none."""
    return next((model.replace(kept, again) for kept, again in CORES.items() if kept in model or again in model), None)


def load(text: str) -> Model[Any]:
    """Return the model that ``text`` names, with options after commas: ``gpt-tiny`` or ``gpt-tiny,blocks=8,tied=true``.

    Options are the fields of the model's configuration. BadInput names the models or the options that exist.
    """
    name, *options = text.split(",")
    if name not in MODELS:
        raise BadInput(f"no model is named {name!r}; the zoo has {', '.join(MODELS)}")
    model: Model[Any] = import_module(f".{MODELS[name]}", __name__).MODELS[name]
    return model.with_text(options)
