"""What a model is, apart from its weights: to show that patching leaves no trace."""
import types


def hooks(module) -> dict:
    """Every kind of hook, with the functions themselves: two lists of equal length need not be the same hooks."""
    return {name: dict(value) for name, value in vars(module).items() if "hook" in name and isinstance(value, dict)}


def methods(model) -> dict:
    """The function behind every bound method, wherever it comes from (class or instance).

    But __setstate__: torch.compile puts another one into torch.nn.Module when it is first used, and generate() may be
    what uses it.
    """
    found = {name: getattr(model, name, None) for name in dir(model) if name != "__setstate__"}
    return {name: m.__func__ for name, m in found.items() if isinstance(m, types.MethodType)}


def snapshot(model) -> dict:
    return {
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "hooks": {name: hooks(m) for name, m in model.named_modules()},
        "implementation": model.config._attn_implementation,
        "config": (dict(vars(model.config)), model.config.to_dict(), model.generation_config.to_dict()),
        "methods": methods(model),
    }
