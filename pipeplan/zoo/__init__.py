"""Example models and their data, written for this project, that run anywhere torch does.

This file needs no torch: ``MODELS`` lists what there is, :func:`load` imports one. A loaded
:class:`~pipeplan.zoo.model.Model` follows the model contract (``model(batch) -> (layers, example_input, loss)``), and
``model.data(batch)`` gives the ``data(index, seed) -> (input, target)`` that fits it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import BadInput

if TYPE_CHECKING:
    from .model import Model

HUGGING_FACE = "hf:"  # begins the name of a transformers model
ZOO = "zoo:"  # begins the name of a zoo model where a module:function could stand
MODELS = {
    "gpt-tiny": "pipeplan.zoo.gpt:tiny",
    "gpt2-small": "pipeplan.zoo.gpt:gpt2_small",
    "gpt2-medium": "pipeplan.zoo.gpt:gpt2_medium",
    "gpt2-large": "pipeplan.zoo.gpt:gpt2_large",
    "gpt2-xl": "pipeplan.zoo.gpt:gpt2_xl",
    "gpt3-175b": "pipeplan.zoo.gpt:gpt3_175b",
    "myelin-12b": "pipeplan.zoo.gpt:myelin_12b",
    "myelin-24b": "pipeplan.zoo.gpt:myelin_24b",
    "myelin-50b": "pipeplan.zoo.gpt:myelin_50b",
    "myelin-100b": "pipeplan.zoo.gpt:myelin_100b",
    "llama-tiny": "pipeplan.zoo.llama:tiny",
    "llama-7b": "pipeplan.zoo.llama:llama_7b",
    "llama3-8b": "pipeplan.zoo.llama:llama3_8b",
    "llama3-70b": "pipeplan.zoo.llama:llama3_70b",
    "llama3-405b": "pipeplan.zoo.llama:llama3_405b",
    "small-cnn": "pipeplan.zoo.cnn:small",
    "alexnet": "pipeplan.zoo.alexnet:alexnet",
    "vgg16": "pipeplan.zoo.vgg:vgg16",
    "resnet50": "pipeplan.zoo.resnet:resnet50",
    "resnet101": "pipeplan.zoo.resnet:resnet101",
    "densenet121": "pipeplan.zoo.densenet:densenet121",
    "inception-v3": "pipeplan.zoo.inception:inception_v3",
    "inception-v3-auxiliary": "pipeplan.zoo.inception:inception_v3_auxiliary",
    "awd-lm": "pipeplan.zoo.lstm:awd_lm",
    "gnmt": "pipeplan.zoo.lstm:gnmt",
}


def load(text: str) -> Model[Any]:
    """Return the model that ``text`` names, with options after commas: ``gpt-tiny`` or ``gpt-tiny,blocks=8,tied=true``.

    Options are the fields of the model's configuration. BadInput names the models or the options that exist.
    """
    name, *options = text.split(",")
    if name not in MODELS:
        raise BadInput(f"no model is named {name!r}; the zoo has {', '.join(MODELS)}")
    module, attribute = MODELS[name].split(":")
    model: Model[Any] = getattr(import_module(module), attribute)
    return model.with_text(options)
