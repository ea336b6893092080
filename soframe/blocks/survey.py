"""The modules and parameters of a model, before any has a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from soframe.blocks.heads import heads_of
from soframe.blocks.reasons import parameters_of

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""The names of wrapped modules in torch's ``checkpoint_wrapper`` and ``torch.compile``."""


def plain_name(name: str) -> str:
    """Return the name of a module or a parameter without wrappers around single modules.

    So a block keeps its name, and with it its state, when its layer is wrapped.
    """
    return ".".join([part for part in name.split(".") if part not in _WRAPPERS])


@dataclass(frozen=True)
class Survey:
    """The modules and parameters of a model; sets and keys of numbers are identities.

    Attributes:
        names: The names of each module.
        by_name: The modules by name; a wrapper has the name of the module inside, which is here.
        modules: The modules with parameters, each with its first name.
        parameters: The parameters with their names.
        lazy: The modules with parameters that are not initialised.
        sharers: The modules that have each parameter, with their names.
        ends: The parameters of heads and of embeddings.
        guessed_heads: The parameters of heads that nothing shows but that their layers come last.
        shows_head: Whether the model shows its head, or it is guessed.
    """

    names: dict[int, list[str]]
    by_name: dict[str, nn.Module]
    modules: list[tuple[str, nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]
    lazy: set[nn.Module]
    sharers: dict[int, dict[nn.Module, str]]
    ends: set[int]
    guessed_heads: set[int]
    shows_head: bool

    @classmethod
    def of(
        cls,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        with_head: nn.Module | None,
    ) -> Survey:
        """Return the survey of a model, given its parameters and its part with the head."""
        names: dict[int, list[str]] = {}
        by_name: dict[str, nn.Module] = {}
        by_identity: dict[int, nn.Module] = {}
        for full, module in model.named_modules(remove_duplicate=False):
            name = plain_name(full)
            names.setdefault(id(module), []).append(name)
            by_name[name] = by_identity[id(module)] = module
        modules: list[tuple[str, nn.Module]] = []
        sharers: dict[int, dict[nn.Module, str]] = {}
        lazy: set[nn.Module] = set()
        of_embeddings: set[int] = set()
        for module in by_identity.values():
            if not module._parameters:
                continue
            name, parameters = names[id(module)][0], parameters_of(module).values()
            modules.append((name, module))
            for parameter in parameters:
                sharers.setdefault(id(parameter), {})[module] = name
                if isinstance(parameter, nn.parameter.UninitializedParameter):
                    lazy.add(module)
            if isinstance(module, nn.Embedding):
                of_embeddings.update(map(id, parameters))
        heads = heads_of(model, with_head)
        of_heads = set(map(id, heads.weights))
        return cls(
            names=names,
            by_name=by_name,
            modules=modules,
            parameters=[(plain_name(name), p) for name, p in named],
            lazy=lazy,
            sharers=sharers,
            ends=of_heads | of_embeddings,
            guessed_heads=of_heads - of_embeddings if heads.guessed else set(),
            shows_head=bool(heads.weights),
        )
