"""A patched model has configs of its own, so that other models with the same config object see nothing of the patch."""
import copy
from typing import Any

IMPLEMENTATION = "_attn_implementation_internal"


class Private:
    """The configs of a model and the copies that stand in for them. A deep copy of the model takes it along."""

    def __init__(self, model):
        whole = model.config
        self.pairs = [(whole, copy.copy(whole))]
        for name in whole.sub_configs:  # one level is enough: the text config is there, or `whole` itself
            if (part := getattr(whole, name, None)) is not None:
                self.pairs.append((part, copy.copy(part)))
                vars(self.pairs[0][1])[name] = self.pairs[-1][1]
        self.before = [dict(vars(mine)) for _, mine in self.pairs]

    def put_on(self, model) -> None:
        _swap(model, self.pairs)

    def take_off(self, model) -> None:
        """What the user changed in a config while the model was patched stays changed."""
        parts = {id(mine): own for own, mine in self.pairs}
        for (own, mine), before in zip(self.pairs, self.before):
            for name, value in vars(mine).items():
                if name != IMPLEMENTATION and (name not in before or before[name] is not value):
                    vars(own)[name] = parts.get(id(value), value)
            for name in before.keys() - vars(mine).keys():
                vars(own).pop(name, None)
        _swap(model, [(mine, own) for own, mine in self.pairs])


def _swap(model, pairs: list[tuple[Any, Any]]) -> None:
    for m in model.modules():
        for old, new in pairs:
            if vars(m).get("config") is old:
                m.config = new
