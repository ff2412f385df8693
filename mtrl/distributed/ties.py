"""Tied parameters: one parameter with several names, such as an embedding that is also the output layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Return the additional names of tied parameters, each mapped to the parameter's first name."""
    first: dict[nn.Parameter, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first.setdefault(parameter, name) != name}


def tie(module: nn.Module, aliases: Mapping[str, str]) -> None:
    """Make each parameter of `aliases` the same object as the parameter that it names, as before a conversion."""
    for alias, first in aliases.items():
        _replace(module, alias, module.get_parameter(first))


def untie(module: nn.Module, aliases: Mapping[str, str]) -> None:
    """Make each parameter of `aliases` an object of its own, with the same memory."""
    for alias, first in aliases.items():
        parameter = module.get_parameter(first)
        _replace(module, alias, nn.Parameter(parameter.detach(), parameter.requires_grad))


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner)._parameters[leaf] = parameter
