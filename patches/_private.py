"""Give a patched model its own configs, so that other models with the same config object do not see the patch."""
import copy
from typing import Any

IMPLEMENTATION = "_attn_implementation_internal"


class Private:
    """The configs of a model, and the copies that replace them while the model is patched. A deep copy of the model
    copies this object too."""

    def __init__(self, model):
        whole = model.config
        self.pairs = [(whole, copy.copy(whole))]
        for name in whole.sub_configs:  # one level is enough: the text config is one of these, or `whole` itself
            if (part := getattr(whole, name, None)) is not None:
                self.pairs.append((part, copy.copy(part)))
                vars(self.pairs[0][1])[name] = self.pairs[-1][1]
        self.before = [dict(vars(mine)) for _, mine in self.pairs]

    def put_on(self, model) -> None:
        _swap(model, self.pairs)

    def take_off(self, model) -> None:
        """Restore the configs. A change that the user made to a config of the patched model stays."""
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
